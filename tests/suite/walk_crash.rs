//! A process that dies between two steps: what was committed stays, what was not is done again, nothing is done twice.

use std::os::unix::process::ExitStatusExt;

use musterd::store::flush::Close;

use crate::suite::support::audit;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, session, success, write, written};
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, ask, assert_accounts_balance, end_of, free_all_blocks, submit,
};

const QUICK: &str = "
[completion]
sweep_min = \"100ms\"
sweep_max = \"200ms\"
[queues.default]
fibers = 1
";

const ON_DONE: &str = "SELECT count(*) FROM musterd.tasks WHERE command = 'tell'";
/// Every result with the transaction that wrote it: who writes one again cannot hide it.
const WRITTEN: &str = "SELECT coalesce(array_agg(o.xmin::text || ':' || l.line ORDER BY l.line), '{}')
       FROM musterd.outcomes o CROSS JOIN LATERAL musterd.lines_of(o.lines) l (line)";

/// Runs a worker until it dies at the failpoint.
async fn dies_at(db: &TestDb, failpoint: &str) {
    let daemon = Daemon::builder(db, QUICK).env("MUSTERD_FAILPOINTS", &format!("{failpoint}=abort")).start();
    let status = daemon.wait_exit(PATIENCE).await;
    assert_eq!(status.signal(), Some(6), "{status}: {:?}", daemon.log().last());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_right_after_a_flush_was_committed_repeats_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    audit::install(&client).await;
    let batch = submit(&client, "echo", 40, "on_done => 'tell'").await;
    dies_at(&db, "flush.committed").await;
    let written: Vec<String> = ask(&client, WRITTEN).await;
    assert!(!written.is_empty() && written.len() < 40, "{written:?}");
    free_all_blocks(&client).await;
    let _daemon = Daemon::builder(&db, QUICK).start();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 40, 0, 0));
    let now: Vec<String> = ask(&client, WRITTEN).await;
    assert!(written.iter().all(|result| now.contains(result)), "{written:?} {now:?}");
    assert_accounts_balance(&client).await;
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 1);
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_after_the_last_flush_leaves_the_end_to_the_sweep() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "echo", 1, "on_done => 'tell'").await;
    dies_at(&db, "flush.committed").await;
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.results").await, 1);
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 0, "the batch has not ended yet");
    let _daemon = Daemon::builder(&db, QUICK).start();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 1, 0, 0));
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_before_the_completion_committed_leaves_no_trace_of_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "echo", 5, "on_done => 'tell'").await;
    dies_at(&db, "complete.counted").await;
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 0);
    let _daemon = Daemon::builder(&db, QUICK).start();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 5, 0, 0));
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_after_the_completion_committed_neither_loses_nor_repeats_its_task() {
    let db = TestDb::new().await;
    let client = db.client().await;
    audit::install(&client).await;
    let batch = submit(&client, "echo", 5, "on_done => 'tell', context => '{\"for\": \"me\"}'").await;
    dies_at(&db, "complete.committed").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 5, 0, 0));
    let payload = "SELECT payload::text FROM musterd.tasks WHERE command = 'tell'";
    let told: serde_json::Value = serde_json::from_str(&ask::<String>(&client, payload).await).unwrap();
    assert_eq!((&told["batch_id"], &told["succeeded"]), (&batch.into(), &5.into()), "{told}");
    assert_eq!((&told["state"], &told["context"]["for"]), (&"succeeded".into(), &"me".into()), "{told}");
    let daemon = Daemon::builder(&db, QUICK).start();
    daemon.wait_ready().await;
    // A second batch goes all the way, so the sweep and the checks have had their turn.
    let second = submit(&client, "echo", 5, "").await;
    assert_eq!(end_of(&client, second).await.0, "succeeded");
    assert_eq!(ask::<i64>(&client, ON_DONE).await, 1);
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
}

/// The sweep's own tick, by its own clock: a batch whose end was missed while the worker lived.
#[tokio::test(flavor = "multi_thread")]
async fn the_sweep_of_a_living_worker_ends_a_batch_that_was_missed() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, session(&db).await);
    // The recovery looks for missed batches, too: once at the start, and then not before the end of this test.
    let toml = format!("{QUICK}[liveness]\nrecovery_interval = \"1h\"\nrows_ttl = \"2h\"\n");
    let old_worker = "INSERT INTO musterd.workers (id, host, pid, version, state, seen_at, ended_at)
                      VALUES ('old', 'h', 1, '0', 'dead', now() - interval '2 days', now() - interval '2 days')";
    client.execute(old_worker, &[]).await.unwrap();
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    eventually(
        PATIENCE,
        "the recovery has looked, which ends with taking old workers off the list",
        async || {
            (ask::<i64>(&client, "SELECT count(*) FROM musterd.workers WHERE id = 'old'").await == 0)
                .then_some(())
        },
    )
    .await;
    let batch = submit(&client, "work", 3, "").await;
    // All its rows are done by a worker that asks for no check, and of a command that this one does not handle.
    for block in carve(&other, 1, 3).await {
        assert_eq!(write(&other, success(&block, 1..=3, Some(Close::default()))).await, written(3));
    }
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 3, 0, 0));
    eventually(PATIENCE, "the sweep has counted it", async || {
        // More than once, if the batch had not ended when the next sweep looked.
        (daemon.metric("musterd_sweep_found_total").await >= 1.0).then_some(())
    })
    .await;
}
