//! S24 and L10: a batch whose lines do not add up, by a hand in the database, stays open, is named, and heals if it can.

use musterd::state::State;
use std::sync::Arc;
use std::time::Duration;

use musterd::store::batches::{self, Look};
use tokio_postgres::Client;

use crate::suite::batch_cli::json_of;
use crate::suite::support::audit::by_hand;
use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, session, success, write, written};
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, progress, submit, succeeded_with,
};

/// Gives every row its line as its result.
fn counting() -> Arc<Script> {
    Script::new(|call| async move { succeeded_with(&call.line.to_string()) })
}

/// A batch of ten rows, done in two blocks; it has not ended.
async fn all_done(db: &TestDb) -> i64 {
    let (client, worker) = (db.client().await, session(db).await);
    let batch = submit(&client, "work", 10, "on_done => 'tell'").await;
    for block in carve(&worker, 2, 5).await {
        let mut part = success(&block, [], Some(Default::default()));
        for line in block.lines.iter() {
            part.outcomes.succeed(line, Some(musterd::json::Json::from_text(line.to_string())), None);
        }
        assert_eq!(write(&worker, part).await, written(5));
    }
    batch
}

/// What `why` says of a batch that does not add up; it asks when the batch was over for a while.
async fn why(config: &TestConfig, batch: i64) -> String {
    eventually(PATIENCE, "why names it", async || {
        let told = json_of(config, &["why", "batch", &batch.to_string()]).await;
        let reason =
            told["reasons"].as_array().unwrap().iter().find(|reason| reason["code"] == "unbalanced")?;
        Some(reason["sentence"].as_str().unwrap().to_owned())
    })
    .await
}

/// What one look at it finds: how many lines are missing, doubled and outside.
async fn unbalanced(db: &TestDb, batch: i64) -> (String, i64, i64) {
    match &batches::look(&session(db).await, &[batch]).await.unwrap()[..] {
        [Look::Unbalanced(found)] => (found.missing.to_string(), found.doubled, found.outside),
        other => panic!("{other:?}"),
    }
}

/// Rows with their results: every one has its own.
async fn results_are_right(client: &Client) {
    let wrong = "SELECT count(*) FROM musterd.results WHERE result IS DISTINCT FROM to_jsonb(line)";
    assert_eq!(ask::<i64>(client, wrong).await, 0);
    assert_eq!(ask::<i64>(client, "SELECT count(*) FROM musterd.results").await, 10);
}

/// Runs a worker until the batch has ended; the lines that it ran again.
async fn heals(db: &TestDb, batch: i64) -> Vec<i32> {
    let client = db.client().await;
    let script = counting();
    let worker = Worker::start(db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    results_are_right(&client).await;
    assert_accounts_balance(&client).await;
    let lines: Vec<i32> = script.runs().keys().map(|(_, line)| *line).collect();
    assert_eq!(worker.metric("musterd_lines_reopened_total").await, lines.len() as f64);
    assert!(worker.stop().await.is_clean());
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.tasks WHERE command = 'tell'").await, 1);
    lines
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_were_deleted_by_hand_run_again() {
    let db = TestDb::new().await;
    let (client, worker, config) = (db.client().await, session(&db).await, TestConfig::new(&db, ""));
    let batch = submit(&client, "work", 10, "on_done => 'tell'").await;
    let blocks = carve(&worker, 2, 5).await;
    let mut part = success(&blocks[0], [], None);
    for line in [2, 4] {
        part.outcomes.succeed(line, Some(musterd::json::Json::from_text(line.to_string())), None);
    }
    assert_eq!(write(&worker, part).await, written(2));
    client.batch_execute("DELETE FROM musterd.blocks").await.unwrap();
    assert_eq!(unbalanced(&db, batch).await, ("{[1,2),[3,4),[5,11)}".into(), 0, 0));
    let sentence = why(&config, batch).await;
    assert!(sentence.ends_with("of 8 rows nothing is recorded: lines 1, 3, 5 to 10"), "{sentence}");
    assert_eq!(heals(&db, batch).await, [1, 3, 5, 6, 7, 8, 9, 10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_was_removed_from_an_outcome_runs_again() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let batch = all_done(&db).await;
    let remove = "UPDATE musterd.outcomes SET lines = '{[1,3),[4,6)}', succeeded = 4, results = E'1\\n2\\n4\\n5' WHERE first_line = 1";
    by_hand(&client, remove).await;
    assert_eq!(unbalanced(&db, batch).await, ("{[3,4)}".into(), 0, 0));
    let sentence = why(&config, batch).await;
    assert!(sentence.ends_with("of 1 row nothing is recorded: line 3"), "{sentence}");
    assert_eq!(heals(&db, batch).await, [3]);
}

/// No program can know which of two records is right: the batch stays open until a person decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_was_doubled_keeps_the_batch_open() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let batch = all_done(&db).await;
    let columns = "batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results";
    let double = format!(
        "INSERT INTO musterd.outcomes ({columns}) VALUES ({batch}, 3, gen_random_uuid(), 1, 1, 1, '{{[3,4)}}', 1, 0, '7');
         INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error) VALUES ({batch}, 9, 1, 1, 1, 'no'), ({batch}, 11, 1, 1, 1, 'no')"
    );
    by_hand(&client, &double).await;
    assert_eq!(unbalanced(&db, batch).await, ("{}".into(), 2, 1));
    let sentence = why(&config, batch).await;
    let told = "2 are recorded more than once, 1 are not lines of the batch; it stays open";
    assert!(sentence.ends_with(told), "{sentence}");
    let script = counting();
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    // It is looked at by every sweep; beside it another batch goes all the way.
    eventually(PATIENCE, "it was found by several sweeps", async || {
        (worker.metric("musterd_batches_unbalanced_total").await >= 3.0).then_some(())
    })
    .await;
    let healthy = submit(&client, "work", 5, "").await;
    assert_eq!(end_of(&client, healthy).await.0, "succeeded");
    assert_eq!(progress(&client, batch).await.state, State::Running);
    assert_eq!(worker.metric("musterd_lines_reopened_total").await, 0.0, "nothing is missing");
    // The second records are deleted by hand, and then it ends.
    let undo = format!(
        "DELETE FROM musterd.outcomes WHERE batch_id = {batch} AND first_line = 3 AND succeeded = 1; DELETE FROM musterd.failures"
    );
    by_hand(&client, &undo).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    assert!(script.runs().keys().all(|(of, _)| *of == healthy), "nothing ran again");
    assert_accounts_balance(&client).await;
    assert!(worker.stop().await.is_clean());
}

/// An abort ends it all the same: lines may be missing then, and none may be doubled.
#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_batch_ends_without_the_lines_that_are_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = all_done(&db).await;
    by_hand(&client, "DELETE FROM musterd.outcomes WHERE first_line = 6").await;
    client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
    let worker = Worker::start(&db, "", &[("work", counting())]).await;
    assert_eq!(end_of(&client, batch).await, ("aborted".into(), 5, 0, 5));
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

/// From now on an audit takes a while, as of a batch with very many outcomes.
async fn slow_audit(client: &Client, length: Duration) {
    let slow = format!(
        "ALTER FUNCTION musterd.audit(bigint) RENAME TO audit_at_once;
         CREATE FUNCTION musterd.audit(p_batch bigint, OUT succeeded int, OUT failed int, OUT doubled bigint, OUT outside bigint,
                                       OUT missing int4multirange, OUT recorded bigint) LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM pg_catalog.pg_sleep({});
             SELECT a.* INTO succeeded, failed, doubled, outside, missing, recorded FROM musterd.audit_at_once(p_batch) a;
         END $$",
        length.as_secs_f64()
    );
    client.batch_execute(&slow).await.unwrap();
}

/// FINDINGS 7: however long the audit takes, it has no limit; and neither has the one that heals.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_longer_than_the_statement_timeout_ends_and_heals_the_batch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    slow_audit(&client, Duration::from_millis(3_000)).await;
    let broken = all_done(&db).await;
    by_hand(&client, "DELETE FROM musterd.outcomes WHERE first_line = 6").await;
    let toml = format!("[database]\nurl = {:?}\nstatement_timeout = \"1500ms\"", db.url());
    let script = counting();
    let worker = Worker::start(&db, &toml, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 5, "").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 5, 0, 0));
    assert_eq!(end_of(&client, broken).await, ("succeeded".into(), 10, 0, 0));
    let again: Vec<i32> =
        script.runs().keys().filter(|(of, _)| *of == broken).map(|(_, line)| *line).collect();
    assert_eq!(again, [6, 7, 8, 9, 10]);
    assert!(worker.stop().await.is_clean());
}
