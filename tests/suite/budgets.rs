//! Budgets of failures: decided by the database when they are spent, and by nothing that was true before.

use std::sync::Arc;

use musterd::handler::Outcome;
use musterd::state::State;

use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, progress, submit, succeeded,
};

/// Fails the lines for which `fails` says so.
fn failing(fails: fn(i32) -> bool) -> Arc<Script> {
    Script::new(move |call| async move {
        if fails(call.line) { Outcome::Failed("no".into()) } else { succeeded() }
    })
}

async fn is_held(client: &tokio_postgres::Client, batch: i64) -> i32 {
    eventually(PATIENCE, "the batch is held and nothing of it runs", async || {
        let now = progress(client, batch).await;
        (now.state == State::Held && now.running == 0).then_some(now.failed)
    })
    .await
}

/// FINDINGS 5: a release goes on to the next failure, not to the next look.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_was_released_goes_on_until_the_next_failure() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Three bad rows at the beginning, and one in the middle.
    let script = failing(|line| line <= 3 || line == 1_500);
    let worker =
        Worker::start(&db, "[queues.default]\nfibers = 2\nblock_size = 20", &[("work", script.clone())])
            .await;
    let batch = submit(&client, "work", 3_000, "max_failed => 2, on_budget => 'hold'").await;
    assert_eq!(is_held(&client, batch).await, 3);
    let release = format!("SELECT musterd.release({batch})");
    assert_eq!(ask::<String>(&client, &release).await, "running");
    // Blocks close without a failure, more than a thousand rows long; then comes the next one.
    assert_eq!(is_held(&client, batch).await, 4);
    let done = progress(&client, batch).await.succeeded;
    assert!(done >= 1_400, "it was stopped after {done} rows without a new failure");
    assert_eq!(ask::<String>(&client, &release).await, "running");
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 2_996, 4, 0));
    assert!(script.runs().values().all(|runs| *runs == 1), "a row was run twice");
    assert_accounts_balance(&client).await;
    assert!(worker.stop().await.is_clean());
}

/// FINDINGS 9: whatever a producer has locked, others are claimed, run and ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_of_a_batch_that_a_producer_has_locked_holds_up_no_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // A wait for the lock would be longer than the test.
    let toml = format!(
        "[queues.default]\nfibers = 2\nblock_size = 5\n[queues.other]\nfibers = 2\n\
         [database]\nurl = {:?}\nlock_timeout = \"10m\"\nstatement_timeout = \"10m\"",
        db.url()
    );
    for action in ["hold", "abort"] {
        let gate = Gate::closed();
        let at_gate = gate.clone();
        let bad = Script::new(move |_| {
            let gate = at_gate.clone();
            async move {
                gate.pass().await;
                Outcome::Failed("no".into())
            }
        });
        let worker = Worker::start(&db, &toml, &[("work", bad), ("good", Script::succeeding())]).await;
        let batch = submit(&client, "work", 200, &format!("max_failed => 3, on_budget => '{action}'")).await;
        within(PATIENCE, gate.entered_by(2)).await;
        let producer = db.client().await;
        let append = format!("BEGIN; SELECT musterd.append_rows({batch}, '[201]'::jsonb)");
        producer.batch_execute(&append).await.unwrap();
        gate.open();
        for queue in ["default", "other"] {
            for rows in [3, 300] {
                let beside = submit(&client, "good", rows, &format!("queue => '{queue}'")).await;
                assert_eq!(
                    end_of(&client, beside).await,
                    ("succeeded".into(), rows, 0, 0),
                    "{action}, {queue}"
                );
            }
        }
        producer.batch_execute("COMMIT").await.unwrap();
        match action {
            "hold" => assert!(is_held(&client, batch).await > 3),
            _ => assert_eq!(end_of(&client, batch).await.0, "aborted"),
        }
        client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
        end_of(&client, batch).await;
        assert!(worker.stop().await.is_clean());
    }
    assert_accounts_balance(&client).await;
}

/// The same for the end itself: batches that have nothing left to run, and producers that have them locked.
#[tokio::test(flavor = "multi_thread")]
async fn batches_that_producers_have_locked_keep_no_other_from_its_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let at_gate = gate.clone();
    let waiting = Script::new(move |_| {
        let gate = at_gate.clone();
        async move {
            gate.pass().await;
            succeeded()
        }
    });
    let toml = format!(
        "[queues.default]\nfibers = 8\n[database]\nurl = {:?}\nlock_timeout = \"10m\"\nstatement_timeout = \"10m\"",
        db.url()
    );
    let worker = Worker::start(&db, &toml, &[("work", waiting), ("good", Script::succeeding())]).await;
    let (mut locked, mut producers) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        locked.push(submit(&client, "work", 1, "").await);
    }
    within(PATIENCE, gate.entered_by(4)).await;
    for batch in &locked {
        let producer = db.client().await;
        let append = format!("BEGIN; SELECT musterd.append_rows({batch}, '[2]'::jsonb)");
        producer.batch_execute(&append).await.unwrap();
        producers.push(producer);
    }
    gate.open();
    for batch in &locked {
        eventually(PATIENCE, "its only row is done", async || {
            (progress(&client, *batch).await.succeeded == 1).then_some(())
        })
        .await;
    }
    for rows in [1, 50, 1, 500] {
        let beside = submit(&client, "good", rows, "").await;
        assert_eq!(end_of(&client, beside).await, ("succeeded".into(), rows, 0, 0));
    }
    for producer in &producers {
        producer.batch_execute("COMMIT").await.unwrap();
    }
    for batch in locked {
        assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 2, 0, 0));
    }
    assert_accounts_balance(&client).await;
    assert!(worker.stop().await.is_clean());
}

/// FINDINGS 10: the allowance is that of the batch as it is now, not as it was at the first block.
#[tokio::test(flavor = "multi_thread")]
async fn a_percentage_is_taken_of_the_rows_that_were_appended_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let at_gate = gate.clone();
    // One row in five fails, and half of them may. The tenth waits until there are more than ten.
    let script = Script::new(move |call| {
        let gate = at_gate.clone();
        async move {
            if call.line == 10 {
                gate.pass().await;
            }
            if call.line % 5 == 0 { Outcome::Failed("no".into()) } else { succeeded() }
        }
    });
    let worker =
        Worker::start(&db, "[queues.default]\nfibers = 2\nblock_size = 10", &[("work", script.clone())])
            .await;
    let batch = submit(&client, "work", 10, "max_failed_percent => 50, on_budget => 'hold'").await;
    within(PATIENCE, gate.entered()).await;
    let append = "SELECT musterd.append_rows($1, ARRAY(SELECT to_jsonb(g) FROM generate_series(11, 410) g))";
    client.query(append, &[&batch]).await.unwrap();
    gate.open();
    // 82 failures, of which five were allowed when it began. A fiber that waited for a hold at each would not be done in time.
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 328, 82, 0));
    assert!(script.runs().values().all(|runs| *runs == 1), "rows were given back");
    assert_eq!(worker.metric("musterd_rows_given_back_total").await, 0.0);
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

/// Every generation has its own failures: those of the one before are history.
#[tokio::test(flavor = "multi_thread")]
async fn the_failures_of_an_earlier_generation_spend_no_budget() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = failing(|line| line <= 8);
    let worker =
        Worker::start(&db, "[queues.default]\nfibers = 2\nblock_size = 3", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 20, "max_failed_percent => 50, on_budget => 'abort'").await;
    for generation in 1..=4 {
        let end = ended_in(&client, batch, generation).await;
        assert_eq!(end, ("succeeded".into(), 12, 8, 0), "generation {generation}");
        assert_eq!(
            ask::<String>(&client, &format!("SELECT state FROM musterd.redrive({batch})")).await,
            "running"
        );
    }
    ended_in(&client, batch, 5).await;
    let runs = script.runs();
    assert!((1..=20).all(|line| runs[&(batch, line)] == if line <= 8 { 5 } else { 1 }), "{runs:?}");
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

/// How a generation of a batch ended.
async fn ended_in(client: &tokio_postgres::Client, batch: i64, generation: i32) -> (String, i32, i32, i32) {
    eventually(PATIENCE, "the generation ends", async || {
        let now = progress(client, batch).await;
        (now.generation == generation && now.is_over()).then_some((
            now.state.to_string(),
            now.succeeded,
            now.failed,
            now.aborted,
        ))
    })
    .await
}
