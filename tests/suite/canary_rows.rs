//! A canary: some rows of a batch run first, exactly those, and the rest waits for a decision that is made once.

use musterd::handler::{Done, Outcome};
use serde_json::json;
use tokio_postgres::Client;

use crate::suite::batch_cli::{json_of, said};
use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, assert_accounts_balance, end_of, progress, submit, succeeded,
};

async fn canary(client: &Client, rows: i32, options: &str) -> i64 {
    let sql = format!(
        "SELECT b.id FROM (SELECT musterd.submit_batch('work', (SELECT jsonb_agg(n) FROM generate_series(1, {rows}) n), max_failed => 100000) AS id) b
          WHERE musterd.canary(b.id, {options}) > 0"
    );
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

async fn is_held(client: &Client, batch: i64) {
    eventually(PATIENCE, "the canary has ended and the batch is held", async || {
        (progress(client, batch).await.state == musterd::state::State::Held).then_some(())
    })
    .await;
}

/// With two replicas, a small block size, retries and rows that append: fifty run, each once more for its retry, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_canary_of_fifty_runs_fifty() {
    for options in ["'50'", "'1%', sample => true", "'1%'"] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let script = Script::new(|call| async move {
            match (call.line % 10, call.attempt) {
                (0, 1) => Outcome::Retry { error: "once more".into(), after: None },
                (3, _) => Outcome::Failed(format!("no {}", call.line).into()),
                _ => Outcome::Succeeded(Done {
                    outputs: vec![("a.txt".into(), "0123456789".into())],
                    ..Done::default()
                }),
            }
        });
        let workers = [
            Worker::start(&db, "", &[("work", script.clone())]).await,
            Worker::start(&db, "", &[("work", script.clone())]).await,
        ];
        let batch = canary(&client, 5_000, options).await;
        is_held(&client, batch).await;
        let ran = |script: &Script| script.runs().keys().map(|(_, line)| *line).collect::<Vec<i32>>();
        let first = ran(&script);
        assert_eq!(first.len(), 50, "{options}: {first:?}");
        match options.contains("sample") {
            true => assert!(
                (0..50).all(|n| first[n as usize] > n * 100 && first[n as usize] <= (n + 1) * 100),
                "{first:?}"
            ),
            false => assert_eq!(first, (1..=50).collect::<Vec<_>>()),
        }
        let config = TestConfig::new(&db, "");
        let id = batch.to_string();
        let shown = json_of(&config, &["batch", "show", &id]).await;
        let failed = first.iter().filter(|line| *line % 10 == 3).count();
        let (state, report) = (&shown["canary"]["state"], &shown["canary"]["report"]);
        assert_eq!(
            (state, &report["rows"], &report["failed"], &report["rest"]),
            (&json!("held"), &json!(50), &json!(failed), &json!(4_950))
        );
        assert!(failed == 0 || report["errors"][0]["count"] == failed, "{report}");
        assert!(
            report["rest_output_bytes"].as_f64().unwrap() > 10_000.0
                && report["rows_per_second"].as_f64().unwrap() > 0.0,
            "{report}"
        );
        assert!(said(&config, &["batch", "show", &id]).await.contains("the others wait"));
        assert!(said(&config, &["why", "batch", &id]).await.contains("its canary of 50 rows has ended"));
        let queued = json_of(&config, &["batch", "rows", &id, "--queued", "--limit", "10000"]).await;
        assert_eq!(queued["rows"].as_array().unwrap().len(), 4_950);

        assert_eq!(value(&client, &format!("SELECT musterd.release({batch})")).await, "running");
        let (_, good, bad, _) = end_of(&client, batch).await;
        assert_eq!((good, bad), (4_500, 500));
        assert_eq!(ran(&script).len(), 5_000);
        let events = "SELECT kind FROM musterd.events ORDER BY id";
        assert_eq!(rows(&client, events).await, ["canary_hold", "release"]);
        assert_accounts_balance(&client).await;
        for worker in workers {
            worker.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_canary_releases_the_rest_by_itself_and_a_bad_one_does_not() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Of the first hundred rows two fail.
    let script =
        Script::new(
            |call| async move { if call.line <= 2 { Outcome::Failed("no".into()) } else { succeeded() } },
        );
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let good = canary(&client, 1_000, "'100', auto_release => 'failed<2.5%'").await;
    assert_eq!(end_of(&client, good).await, ("succeeded".into(), 998, 2, 0));
    let bad = canary(&client, 1_000, "'100', auto_release => 'failed<2%'").await;
    is_held(&client, bad).await;
    let told = format!("SELECT batch = {good}, kind, detail -> 'failed' FROM musterd.events ORDER BY id");
    assert_eq!(rows(&client, &told).await, ["t|canary_release|2", "f|canary_hold|2"]);
    // It is redriven like any other, and its canary is over.
    assert_eq!(value(&client, &format!("SELECT musterd.release({bad})")).await, "running");
    assert_eq!(end_of(&client, bad).await, ("succeeded".into(), 998, 2, 0));
    assert_accounts_balance(&client).await;
}

/// Two workers judge at once, an operator releases, holds and appends beside them.
#[tokio::test(flavor = "multi_thread")]
async fn a_canary_is_judged_once_and_a_release_before_its_end_opens_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = canary(&client, 100, "'10'").await;
    assert_eq!(value(&client, &format!("SELECT musterd.release({batch})")).await, "running");
    assert_eq!(value(&client, "SELECT canary_only, next_line FROM musterd.batches").await, "t|11");
    assert_eq!(value(&client, &format!("SELECT musterd.append_rows({batch}, '[101]'::jsonb)")).await, "101");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.batches_over").await, "0");
    let run = format!(
        "DELETE FROM musterd.blocks; SELECT guard.result({batch}, n, 'succeeded') FROM generate_series(1, 10) n"
    );
    client.batch_execute(&run).await.unwrap();
    let mut schedule = Schedule::new(&db, &["a", "b", "operator"]).await;
    let judge = format!("SELECT verdict FROM musterd.check_budget({batch})");
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &judge).await.rows(), ["canary"]);
    assert_eq!(schedule.run("b", &judge).await.rows(), ["busy"], "it does not wait");
    schedule.blocks("operator", &format!("SELECT musterd.release({batch})")).await;
    schedule.run("a", "COMMIT").await;
    // The release came behind the judgement, so it is one of the rest.
    assert_eq!(schedule.resumes("operator").await.rows(), ["running"]);
    assert_eq!(
        value(&client, "SELECT canary_only, open, next_line, rows FROM musterd.batches").await,
        "f|t|11|101"
    );
    assert_eq!(schedule.run("b", &judge).await.rows(), ["within"]);
    let _worker = Worker::start(&db, "", &[("work", Script::succeeding())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 101, 0, 0));
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_canary_is_refused_and_one_of_all_rows_is_none() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "work", 10, "hold => true").await;
    let canary = |options: &str| format!("SELECT musterd.canary({batch}, {options})");
    for wrong in
        ["'0'", "'-1'", "'101%'", "'x'", "'5', auto_release => 'failed<0%'", "'5', auto_release => 'good'"]
    {
        assert!(refusal(&client, &canary(wrong)).await.starts_with("22023"), "{wrong}");
    }
    assert_eq!(value(&client, &canary("'100%'")).await, "10");
    assert_eq!(value(&client, "SELECT canary IS NULL FROM musterd.batches").await, "t");
    assert_eq!(value(&client, &canary("'11%'")).await, "2");
    assert_eq!(value(&client, &canary("'2'")).await, "2", "a repeat is none");
    assert!(refusal(&client, &canary("'3'")).await.contains("has begun"));
    let script = Script::succeeding();
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(value(&client, &format!("SELECT musterd.release({batch})")).await, "running");
    is_held(&client, batch).await;
    assert_eq!(script.calls().len(), 2);
    // Aborted while it waits, it ends.
    assert_eq!(value(&client, &format!("SELECT musterd.abort({batch})")).await, "aborting");
    assert_eq!(end_of(&client, batch).await, ("aborted".into(), 2, 0, 8));
    worker.stop().await;

    let file = tempfile::NamedTempFile::with_suffix(".ndjson").unwrap();
    std::fs::write(file.path(), "1\n2\n3\n4\n").unwrap();
    let config = TestConfig::new(&db, "");
    let path = file.path().to_str().unwrap();
    let args = [
        "submit",
        path,
        "--command",
        "work",
        "--canary",
        "50%",
        "--auto-release",
        "failed<1%",
        "--idempotency-key",
        "k",
    ];
    let submitted = json_of(&config, &args).await;
    assert_eq!(json_of(&config, &args).await["repeated"], true);
    let chosen = format!(
        "SELECT canary, canary_only, auto_release FROM musterd.batches WHERE id = {}",
        submitted["id"]
    );
    assert_eq!(value(&client, &chosen).await, "2|t|1");
}
