//! Hold, release and abort, with workers and without.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use musterd::handler::{Done, Outcome};
use serde_json::{Value, json};

use super::{json_of, refused, said, some_batches};
use crate::suite::outputs::ground::{PATIENCE, Worker, end_lines, ended, file_store, folder, state};
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::wait::within;

async fn submit(db: &TestDb, command: &str, rows: i32) -> i64 {
    let submit =
        "SELECT musterd.submit_batch($1, ARRAY(SELECT to_jsonb(n) FROM generate_series(1, $2::int) n))";
    db.client().await.query_one(submit, &[&command, &rows]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_release_and_abort_say_what_they_made_of_it_also_without_a_worker() {
    let (toml, dir) = file_store();
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, &toml));
    let id = submit(&db, "noop", 10).await;
    let batch = id.to_string();
    assert_eq!(said(&config, &["batch", "hold", &batch]).await, format!("batch {id}: held\n"));
    assert_eq!(json_of(&config, &["batch", "hold", &batch]).await, json!({ "id": id, "state": "held" }));
    assert_eq!(said(&config, &["batch", "release", &batch]).await, format!("batch {id}: queued\n"));
    // Four rows have ended; no worker is there to finish it.
    end_lines(&client, id, 1, 4, "a").await;
    assert_eq!(said(&config, &["batch", "abort", &batch]).await, format!("batch {id}: aborted\n"));
    let shown = json_of(&config, &["batch", "show", &batch]).await;
    assert_eq!((&shown["succeeded"], &shown["aborted"]), (&json!(4), &json!(6)));
    assert_eq!(shown["aborting"], false, "it is over");
    assert!(
        dir.join(folder(&client, id, "g1-r10-d4").await).join("manifest.json").exists(),
        "its files are there, too"
    );
    let rows = json_of(&config, &["batch", "rows", &batch, "--state", "aborted"]).await;
    assert_eq!(rows["rows"].as_array().unwrap().len(), 6);
    // Once more changes nothing, whatever is asked.
    for command in ["abort", "hold", "release"] {
        assert_eq!(said(&config, &["batch", command, &batch]).await, format!("batch {id}: aborted\n"));
    }
}

/// Rows that wait as the metric counts them.
const DEPTHS: &str = include_str!("../../../src/store/sql/depths.sql");

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_does_not_wait() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let ids = some_batches(&db).await;
    let counted = async || {
        let queue = &json_of(&config, &["queue", "list"]).await[0];
        let metric = client.query_one(DEPTHS, &[&vec!["default"], &1000_i64]).await.unwrap();
        assert_eq!(queue["rows_queued"], json!(metric.get::<_, i64>("rows")), "one word, one number");
        (queue["rows_queued"].as_i64().unwrap(), queue["rows_held"].as_i64().unwrap())
    };
    // One line that was never reached and one that is tried again, and four of the last; four are held.
    assert_eq!(counted().await, (6, 4));
    said(&config, &["batch", "hold", &ids[2].to_string()]).await;
    assert_eq!(counted().await, (4, 6));
    said(&config, &["batch", "release", &ids[3].to_string()]).await;
    assert_eq!(counted().await, (8, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn abort_of_a_running_batch_cancels_its_handlers_and_nothing_starts_after_it() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let (gate, started, dropped) =
        (Gate::closed(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (entering, counting, counted) = (gate.clone(), Arc::clone(&started), Arc::clone(&dropped));
    let worker = Worker::start(&db, "", "slow", move |_| {
        counting.fetch_add(1, Ordering::SeqCst);
        let (gate, cancelled) = (entering.clone(), OnDrop(Arc::clone(&counted)));
        async move {
            gate.pass().await;
            std::mem::forget(cancelled);
            Outcome::Succeeded(Done::default())
        }
        .boxed()
    })
    .await;
    let id = submit(&db, "slow", 20_000).await;
    within(PATIENCE, gate.entered_by(8)).await;
    let began = Instant::now();
    assert_eq!(said(&config, &["batch", "abort", &id.to_string()]).await, format!("batch {id}: aborted\n"));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let at_abort = started.load(Ordering::SeqCst);
    assert_eq!(dropped.load(Ordering::SeqCst), at_abort, "what ran was cancelled");
    // Everything that could start now would: the gate is open and the worker goes on working.
    gate.open();
    let next = submit(&db, "noop", 100).await;
    assert_eq!(ended(&client, next).await, "succeeded");
    assert_eq!(started.load(Ordering::SeqCst), at_abort, "nothing started after it");
    let sql = "SELECT (SELECT count(*) FROM musterd.results WHERE batch_id = $1),
                      (SELECT count(*) FROM musterd.blocks WHERE batch_id = $1)";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, 0));
    worker.stop().await;
}

struct OnDrop(Arc<AtomicUsize>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_nobody_gives_back_keeps_an_aborted_batch_open() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let id = submit(&db, "noop", 10).await;
    let claim = "WITH cursor AS (UPDATE musterd.batches SET next_line = 11 WHERE id = $1)
        INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, worker, token)
        VALUES ($1, '{[1,11)}', 10, 'default', 'noop', 100, 'gone', gen_random_uuid())";
    client.execute(claim, &[&id]).await.unwrap();
    let batch = id.to_string();
    let said = said(&config, &["batch", "abort", &batch]).await;
    assert!(said.starts_with(&format!("batch {id}: aborting\nnothing more of it starts")), "{said}");
    assert_eq!(json_of(&config, &["batch", "show", &batch]).await["aborting"], true);
    assert_eq!(state(&client, id).await, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_holds_or_aborts_a_batch_that_fails_too_much() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[handlers.no]\nkind = \"builtin\"\nbuiltin = \"fail\"\nfailure = \"final\"\nduration = \"1ms\"\n\
                [queues.default]\nfibers = 2\nblock_size = 10";
    let daemon = Daemon::builder(&db, toml).start();
    let config = daemon.config();
    let rows: String = (0..5_000).map(|n| format!("{n}\n")).collect();
    std::fs::write(config.dir().join("rows.ndjson"), rows).unwrap();
    let submit = async |what: &str| -> Value {
        let args = ["submit", "rows.ndjson", "--command", "no", "--max-failed", "20", "--on-budget", what];
        json_of(config, &args).await["id"].clone()
    };
    let aborted = submit("abort").await;
    assert_eq!(ended(&client, aborted.as_i64().unwrap()).await, "aborted");
    let shown = json_of(config, &["batch", "show", &aborted.to_string()]).await;
    assert!(shown["failed"].as_i64().unwrap() > 20 && shown["aborted"].as_i64().unwrap() > 0, "{shown}");
    let held = submit("hold").await;
    crate::suite::support::wait::eventually(PATIENCE, "the batch is held", async || {
        (state(&client, held.as_i64().unwrap()).await == "held").then_some(())
    })
    .await;
    let wrong = config.musterd(&["submit", "rows.ndjson", "--command", "no", "--on-budget", "cry"]).await;
    assert_eq!(wrong.status.code(), Some(2));
    assert!(refused(config, &["batch", "show", "999"]).await.contains("no batch 999"));
}
