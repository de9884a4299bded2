//! S26: nothing that a stranger can send changes the fate of a row or a task.

use std::sync::Arc;

use futures::future::BoxFuture;
use musterd::handler::{Handler, Outcome, RowCall, TaskCall, TaskDone, TaskOutcome};

use crate::suite::support::config::TestConfig;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::embedded::Embedded;
use crate::suite::support::gate::Gate;
use crate::suite::support::sql::refusal;
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::{
    PATIENCE, QUICK, ask, assert_accounts_balance, end_of, progress, submit, succeeded,
};

/// Rows and tasks that wait for the test. Whether any was cut off.
struct Waiting {
    gate: Gate,
    cut_off: tokio::sync::watch::Sender<usize>,
}

struct OnDrop(Option<tokio::sync::watch::Sender<usize>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(|count| count.send_modify(|count| *count += 1));
    }
}

impl Waiting {
    async fn wait(&self) {
        let mut guard = OnDrop(Some(self.cut_off.clone()));
        self.gate.pass().await;
        guard.0 = None;
    }
}

impl Handler for Waiting {
    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        Box::pin(async {
            self.wait().await;
            succeeded()
        })
    }

    fn task<'a>(&'a self, _: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        Box::pin(async {
            self.wait().await;
            TaskOutcome::Done(TaskDone::default())
        })
    }
}

/// FINDINGS 2.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_abort_changes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = db.login("pg_monitor").await;
    let (stranger, _connection) = connect(&login.url).await;
    let said = refusal(&stranger, "SELECT count(*) FROM musterd.tasks").await;
    assert!(said.starts_with("42501"), "it may do nothing but connect: {said}");
    let (gate, cut_off) = (Gate::closed(), tokio::sync::watch::Sender::new(0));
    let handler = Arc::new(Waiting { gate: gate.clone(), cut_off: cut_off.clone() });
    let config = TestConfig::new(&db, &format!("{QUICK}\n[queues.default]\nfibers = 4"));
    let daemon = Embedded::start(&config, "work", handler, PATIENCE);
    let task: i64 = ask(&client, "SELECT musterd.enqueue('work')").await;
    within(PATIENCE, gate.entered_by(1)).await;
    let aborted = submit(&client, "work", 1, "").await;
    within(PATIENCE, gate.entered_by(2)).await;
    let batch = submit(&client, "work", 40, "").await;
    within(PATIENCE, gate.entered_by(4)).await;
    for _ in 0..3 {
        for payload in
            [batch.to_string(), task.to_string(), "0".into(), "-1".into(), "all".into(), i64::MAX.to_string()]
        {
            for channel in ["musterd_abort", "musterd_check", "musterd_wake"] {
                stranger.batch_execute(&format!("NOTIFY {channel}, '{payload}'")).await.unwrap();
            }
        }
    }
    // One that is meant comes last: when it has been obeyed, all others have been heard.
    client.query("SELECT musterd.abort($1)", &[&aborted]).await.unwrap();
    assert_eq!(end_of(&client, aborted).await, ("aborted".into(), 0, 0, 1));
    assert_eq!(*cut_off.borrow(), 1, "other handlers were cut off, too");
    assert!(progress(&client, batch).await.running > 0);
    gate.open();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 40, 0, 0));
    eventually(PATIENCE, "the task ends", async || {
        let ended = format!(
            "SELECT state::text FROM musterd.tasks WHERE id = {task} AND attempt = 1 AND crashes = 0"
        );
        (ask::<String>(&client, &ended).await == "succeeded").then_some(())
    })
    .await;
    assert_eq!(*cut_off.borrow(), 1);
    assert_accounts_balance(&client).await;
    assert!(daemon.stop().await.is_clean());
}

/// A stranger may hold every advisory lock that there is: they are a courtesy, and batches end without them.
#[tokio::test(flavor = "multi_thread")]
async fn advisory_locks_that_a_stranger_holds_keep_no_batch_open() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = db.login("pg_monitor").await;
    let (stranger, _connection) = connect(&login.url).await;
    let locks = "SELECT count(pg_advisory_lock(hashtextextended(what || id, 0)))
                   FROM generate_series(1, 50) id, unnest(ARRAY['musterd.scope:', 'musterd.upload:']) what";
    assert_eq!(ask::<i64>(&stranger, locks).await, 100);
    let gate = Gate::closed();
    gate.open();
    let handler = Arc::new(Waiting { gate, cut_off: tokio::sync::watch::Sender::new(0) });
    let daemon = Embedded::start(&TestConfig::new(&db, QUICK), "work", handler, PATIENCE);
    for rows in [3, 100, 0] {
        let batch = submit(&client, "work", rows, "").await;
        assert!(batch <= 50);
        assert_eq!(end_of(&client, batch).await, ("succeeded".into(), rows, 0, 0));
    }
    assert!(daemon.stop().await.is_clean());
}
