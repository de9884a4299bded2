//! The end of a worker: what is in hand is finished or given back, and nothing stays owned.

use std::sync::Arc;

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::wait::{SOON, eventually, within};
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, progress, retry, submit, succeeded,
};

const ONE_FIBER: &str = "[queues.default]\nfibers = 1";
const OWNED: &str = "SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL";

/// Line 1 wants another try, line 3 waits at the gate.
fn waiting_at_three(gate: &Gate) -> Arc<Script> {
    let gate = gate.clone();
    Script::new(move |call| {
        let gate = gate.clone();
        async move {
            match (call.line, call.attempt) {
                (1, 1) => retry("again"),
                (3, _) => {
                    gate.pass().await;
                    succeeded()
                }
                _ => succeeded(),
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_the_block_in_hand_and_begins_no_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let script = waiting_at_three(&gate);
    let worker = Worker::start(&db, ONE_FIBER, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 10, "").await;
    within(PATIENCE, gate.entered()).await;
    assert!(worker.is_ready().await);
    worker.stop.drain.cancel();
    eventually(PATIENCE, "it is not ready any more", async || (!worker.is_ready().await).then_some(())).await;
    assert_eq!(script.calls().len(), 3, "the block in hand waits for its handler");
    gate.open();
    assert!(worker.stop().await.is_clean());
    assert_eq!(script.calls().len(), 5, "the block of five lines, and nothing else");
    assert_eq!(ask::<i64>(&client, OWNED).await, 0);
    assert_eq!(progress(&client, batch).await.succeeded, 4);

    let next = Script::succeeding();
    let _worker = Worker::start(&db, "", &[("work", next.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    assert_eq!(next.calls().len(), 6, "five fresh lines and the second try of the first");
    assert_accounts_balance(&client).await;
}

/// What a worker leaves of the block whose third line it had to let go of.
async fn assert_given_back(db: &TestDb, batch: i64) {
    let client = db.client().await;
    let blocks = "SELECT array_agg(lines || ' attempt ' || attempt || ' due ' ||
                         (available_at <= now() + interval '1 s') || ' ' || coalesce(worker, 'free') ORDER BY attempt)
                    FROM musterd.blocks";
    assert_eq!(
        ask::<Vec<String>>(&client, blocks).await,
        ["{[3,6)} attempt 1 due true free", "{[1,2)} attempt 2 due true free"]
    );
    assert_eq!(progress(&client, batch).await.succeeded, 1);
    let next = Script::succeeding();
    let _worker = Worker::start(db, "", &[("work", next.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    let mut calls: Vec<(i32, i32)> = next.calls().iter().map(|call| (call.line, call.attempt)).collect();
    calls.sort_unstable();
    let mut expected: Vec<(i32, i32)> = (3..=10).map(|line| (line, 1)).collect();
    expected.insert(0, (1, 2));
    assert_eq!(calls, expected, "nothing is charged for what was given back");
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_the_grace_what_runs_is_given_back_and_no_try_is_charged() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let toml = format!("{ONE_FIBER}\n[shutdown]\ngrace = \"100ms\"");
    let worker = Worker::start(&db, &toml, &[("work", waiting_at_three(&gate))]).await;
    let batch = submit(&client, "work", 10, "").await;
    within(PATIENCE, gate.entered()).await;
    assert!(worker.stop().await.is_clean());
    assert_given_back(&db, batch).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_word_gives_back_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let toml = format!("{ONE_FIBER}\n[shutdown]\ngrace = \"1h\"");
    let worker = Worker::start(&db, &toml, &[("work", waiting_at_three(&gate))]).await;
    let batch = submit(&client, "work", 10, "").await;
    within(PATIENCE, gate.entered()).await;
    worker.stop.drain.cancel();
    worker.stop.now.cancel();
    assert!(worker.stop().await.is_clean());
    assert_given_back(&db, batch).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_process_exits_with_nought_and_owns_nothing_after_sigterm_under_load() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "[handlers.sleep]\nduration = \"5ms\"").start();
    daemon.wait_ready().await;
    let batch = submit(&client, "sleep", 20_000, "").await;
    eventually(PATIENCE, "rows are done", async || {
        (progress(&client, batch).await.succeeded > 100).then_some(())
    })
    .await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(PATIENCE).await.code(), Some(0));
    assert_eq!(ask::<i64>(&client, OWNED).await, 0);
    let left = progress(&client, batch).await;
    let results: i64 = ask(&client, "SELECT count(*) FROM musterd.results").await;
    assert_eq!(i64::from(left.succeeded), results);
    assert!(left.queued > 0 && left.running == 0, "{left:?}");
    let stopped = "SELECT state FROM musterd.workers";
    assert_eq!(ask::<String>(&client, stopped).await, "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_does_not_wait_for_the_handlers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"\n[shutdown]\ngrace = \"29s\"";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let batch = submit(&client, "sleep", 100, "").await;
    eventually(PATIENCE, "rows run", async || (progress(&client, batch).await.running > 0).then_some(()))
        .await;
    daemon.signal(Signal::TERM);
    daemon.wait_for_log(PATIENCE, |line| line.contains("draining; once more")).await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(ask::<i64>(&client, OWNED).await, 0);
    assert_eq!(progress(&client, batch).await.queued, 100);
}
