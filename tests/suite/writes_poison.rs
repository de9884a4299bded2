//! A result that cannot be stored is its own row's failure, and no other's.

use std::collections::BTreeSet;
use std::sync::Arc;

use musterd::handler::{Done, Outcome};
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::worker::{
    Script, Worker, ask, assert_accounts_balance, end_of, submit, succeeded_with,
};

/// `count` different lines of a hundred, the same in every run.
fn chosen(count: usize, seed: u64) -> BTreeSet<i32> {
    let mut state = seed;
    let mut lines = BTreeSet::new();
    while lines.len() < count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        lines.insert((state >> 33) as i32 % 100 + 1);
    }
    lines
}

/// Succeeds everywhere, with `poison` as the result of the chosen lines.
fn poisoned(lines: &BTreeSet<i32>, poison: &'static str) -> Arc<Script> {
    let lines = lines.clone();
    Script::new(move |call| {
        let result = if lines.contains(&call.line) { poison } else { "true" };
        async move { succeeded_with(result) }
    })
}

/// The failed lines of a batch, and their errors.
async fn failures(client: &Client, batch: i64) -> (BTreeSet<i32>, BTreeSet<String>) {
    let sql = "SELECT line, error FROM musterd.results WHERE batch_id = $1 AND state = 'failed'";
    let rows = client.query(sql, &[&batch]).await.unwrap();
    (rows.iter().map(|row| row.get(0)).collect(), rows.iter().map(|row| row.get(1)).collect())
}

/// Runs 100 rows of which `count` have `poison` as their result: exactly those fail, each with an error that begins with
/// `words`. How many flushes were refused.
async fn fail_alone(db: &TestDb, count: usize, poison: &'static str, words: &str) -> f64 {
    let client = db.client().await;
    let lines = chosen(count, count as u64);
    let script = poisoned(&lines, poison);
    let worker = Worker::start(db, "", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 100, "").await;
    let bad = count as i32;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 100 - bad, bad, 0), "{poison}");
    let (failed, errors) = failures(&client, batch).await;
    assert_eq!(failed, lines, "{poison}");
    assert!(errors.iter().all(|error| error.starts_with(words)), "{errors:?}");
    assert_eq!(script.calls().len(), 100, "what cannot be stored is not tried again");
    assert!(worker.is_ready().await);
    let refused = worker.metric("musterd_batcher_rollbacks_total").await;
    assert!(worker.stop().await.is_clean());
    refused
}

/// What PostgreSQL cannot hold is found where it comes in: it never gets as far as a flush.
#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_rows_with_an_unstorable_result_fail() {
    let db = TestDb::new().await;
    let kinds = [
        (1, r#""\u0000""#, "PostgreSQL cannot store the character NUL"),
        (7, "{\"broken\":", "not JSON: expected "),
        (33, "1e400000", "PostgreSQL cannot hold this number"),
        (60, r#"{"a":["x\u0000y"]}"#, "PostgreSQL cannot store the character NUL"),
        (99, r#""\ud800""#, "half of a surrogate pair"),
        (100, r#""\u0000""#, "PostgreSQL cannot store the character NUL"),
    ];
    for (count, poison, fault) in kinds {
        let words = format!("the result cannot be stored: {fault}");
        assert_eq!(fail_alone(&db, count, poison, &words).await, 0.0, "a flush was refused");
    }
    assert_accounts_balance(&db.client().await).await;
}

/// What only the database can refuse is found by halving.
#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_rows_that_the_database_refuses_fail() {
    let db = TestDb::new().await;
    let check = "ALTER TABLE musterd.outcomes ADD CONSTRAINT clean CHECK (results NOT LIKE '%poison%')";
    db.client().await.batch_execute(check).await.unwrap();
    for count in [1, 7, 33, 60, 99, 100] {
        let words = "the result cannot be stored: new row for relation \"outcomes\" violates check constraint \"clean\"";
        assert!(fail_alone(&db, count, "\"poison\"", words).await >= 1.0, "no flush was refused");
    }
    assert_accounts_balance(&db.client().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn output_text_and_errors_with_a_nul_are_as_harmless() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| async move {
        let outputs = vec![("log".to_owned(), "a\0b".to_owned())];
        match call.line {
            4 => Outcome::Succeeded(Done { outputs, ..Done::default() }),
            5 => Outcome::Failed("bad\0news".into()),
            _ => succeeded_with("1"),
        }
    });
    let worker = Worker::start(&db, "", &[("work", script)]).await;
    let batch = submit(&client, "work", 50, "").await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 48, 2, 0));
    let errors: Vec<String> =
        ask(&client, "SELECT array_agg(error ORDER BY line) FROM musterd.results WHERE state = 'failed'")
            .await;
    assert_eq!(errors, ["the output text cannot be stored: it has a NUL character", "bad\u{fffd}news"]);
    assert_eq!(worker.metric("musterd_batcher_rollbacks_total").await, 0.0, "a flush was refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_or_trigger_of_the_users_fails_the_row_it_refuses() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "ALTER TABLE musterd.outcomes ADD CONSTRAINT small CHECK (results IS NULL OR results NOT LIKE '%\"large\"%');
             CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.results LIKE '%\"odd\"%' THEN RAISE EXCEPTION 'one of % is odd', NEW.lines; END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON musterd.outcomes FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    let script = Script::new(|call| async move {
        succeeded_with(match call.line {
            17 => "\"large\"",
            42 => "\"odd\"",
            _ => "null",
        })
    });
    let _worker = Worker::start(&db, "", &[("work", script)]).await;
    let batch = submit(&client, "work", 100, "max_failed => 2").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 98, 2, 0));
    let errors: Vec<String> =
        ask(&client, "SELECT array_agg(error ORDER BY line) FROM musterd.results WHERE state = 'failed'")
            .await;
    assert!(errors[0].contains("\"small\"") && errors[0].contains("23514"), "{errors:?}");
    assert!(errors[1].contains("one of {[42,43)} is odd") && errors[1].contains("P0001"), "{errors:?}");
    assert_accounts_balance(&client).await;
}
