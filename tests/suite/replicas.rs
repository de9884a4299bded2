//! Four replicas on one database: every row ends once, every batch is finished once, whatever is cut off meanwhile.

use std::time::Duration;

use musterd::handler::Outcome;
use rustix::process::Signal;
use tokio_postgres::Client;

use crate::suite::support::audit;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, retry, submit, succeeded,
};

/// Sizes of many small batches, some large ones and some empty ones, the same in every run.
fn sizes(count: u64) -> impl Iterator<Item = i32> {
    (0..count).map(|index| match index * 7_919 % 20 {
        0 => 0,
        1 => 5_000,
        n @ 2..=5 => 300 + n as i32 * 40,
        n => n as i32,
    })
}

async fn all_ended(client: &Client, limit: Duration) {
    eventually(limit, "every batch ends", async || {
        let open = "SELECT count(*) FROM musterd.batches WHERE summarized_at IS NULL";
        (ask::<i64>(client, open).await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn four_replicas_run_every_row_once_and_every_retry_as_often_as_it_should() {
    let db = TestDb::new().await;
    let client = db.client().await;
    audit::install(&client).await;
    // Of ten rows one wants a second try, one all of them, and one fails at once.
    let script = Script::new(|call| async move {
        match (call.line % 10, call.attempt) {
            (3, 1) | (5, _) => retry("again"),
            (7, _) => Outcome::Failed("no".into()),
            _ => succeeded(),
        }
    });
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(Worker::start(&db, "[queues.default]\nfibers = 3", &[("work", script.clone())]).await);
    }
    let mut rows = Vec::new();
    for size in sizes(60) {
        let size = size.min(500);
        rows.push((submit(&client, "work", size, "on_done => 'tell'").await, size));
    }
    all_ended(&client, PATIENCE * 2).await;
    let runs = script.runs();
    for (batch, size) in rows {
        for line in 1..=size {
            let expected = match line % 10 {
                3 => 2,
                5 => 3,
                _ => 1,
            };
            assert_eq!(runs.get(&(batch, line)), Some(&expected), "batch {batch} line {line}");
        }
    }
    for worker in workers {
        assert!(worker.stop().await.is_clean());
    }
    assert_accounts_balance(&client).await;
    let told = "SELECT count(DISTINCT payload ->> 'batch_id') || '/' || count(*) FROM musterd.tasks WHERE command = 'tell'";
    assert_eq!(ask::<String>(&client, told).await, "60/60");
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn four_processes_lose_nothing_when_their_sessions_are_ended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    audit::install(&client).await;
    let toml = r#"
[handlers.flaky]
kind = "builtin"
builtin = "fail"
rate = 0.1
[handlers.hard]
kind = "builtin"
builtin = "fail"
rate = 0.05
failure = "final"
[retry]
base = "10ms"
max = "100ms"
[claim]
poll_interval = "100ms"
[completion]
sweep_min = "1s"
sweep_max = "2s"
[queues.default]
fibers = 4
"#;
    let daemons: Vec<Daemon> = (0..4).map(|_| Daemon::builder(&db, toml).log("info").start()).collect();
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    for (index, size) in sizes(200).enumerate() {
        let command = ["echo", "flaky", "hard", "noop"][index % 4];
        submit(&client, command, size, "max_failed_percent => 50").await;
        if index % 20 == 10 {
            let end_some = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name LIKE 'musterd%' AND random() < 0.4";
            client.query(end_some, &[]).await.unwrap();
        }
    }
    all_ended(&client, PATIENCE * 3).await;
    assert_accounts_balance(&client).await;
    // A row of `flaky` that failed had three tries, one of `hard` a single one, and nothing else failed.
    let odd = "SELECT count(*) FROM musterd.results r JOIN musterd.batches b ON b.id = r.batch_id
                WHERE (r.state = 'failed') <> (r.attempt = CASE b.command WHEN 'flaky' THEN 3 ELSE 1 END AND r.error IS NOT NULL)
                   OR (r.state = 'failed' AND b.command NOT IN ('flaky', 'hard'))
                   OR (b.command = 'echo' AND r.result IS DISTINCT FROM
                       (SELECT i.input FROM musterd.rows i WHERE i.batch_id = r.batch_id AND i.line = r.line))";
    assert_eq!(ask::<i64>(&client, odd).await, 0);
    for daemon in &daemons {
        daemon.signal(Signal::TERM);
    }
    for daemon in &daemons {
        assert_eq!(daemon.wait_exit(PATIENCE).await.code(), Some(0));
    }
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(ask::<i64>(&client, deadlocks).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_sees_what_must_not_happen() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "work", 0, "").await;
    audit::install(&client).await;
    client.execute("UPDATE musterd.tasks SET error = 'x' WHERE id = $1", &[&batch]).await.unwrap();
    client.execute("UPDATE musterd.batches SET turn = 0 WHERE id = $1", &[&batch]).await.unwrap();
    let open = submit(&client, "work", 1, "").await;
    client.execute("UPDATE musterd.batches SET turn = 0 WHERE id = $1", &[&open]).await.unwrap();
    assert_eq!(audit::violations(&client).await.len(), 2);
}
