//! `musterd why`: for everything that is not moving the right reason, in the right sentence, with what to do.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::Client;

use crate::suite::support::config::{TestConfig, json, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;

const SOON: Duration = Duration::from_secs(60);

/// The reasons, in their order, each as `code: sentence → what to do`.
async fn why(config: &TestConfig, args: &[&str]) -> Vec<String> {
    let args: Vec<&str> = ["why"].into_iter().chain(args.iter().copied()).chain(["--json"]).collect();
    let answer: Value = json(&config.musterd(&args).await);
    let told = |reason: &Value| {
        let advice = reason["what_to_do"].as_str().map(|advice| format!(" → {advice}")).unwrap_or_default();
        format!("{}: {}{advice}", reason["code"].as_str().unwrap(), reason["sentence"].as_str().unwrap())
    };
    answer["reasons"].as_array().unwrap().iter().map(told).collect()
}

async fn id(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0).to_string()
}

/// Asks until the first reason begins so.
async fn begins(config: &TestConfig, args: &[&str], beginning: &str) -> Vec<String> {
    eventually(SOON, beginning, async || {
        let reasons = why(config, args).await;
        reasons.first().is_some_and(|first| first.starts_with(beginning)).then_some(reasons)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn held_paused_aborting_and_no_worker_at_all_are_told() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let held = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb], hold => true)").await;
    assert_eq!(
        why(&config, &["batch", &held]).await,
        [format!("held: batch {held} is held → musterd batch release {held}")]
    );
    let waiting = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb])").await;
    let nobody = "no_worker: no worker is alive → start one: musterd run";
    assert_eq!(why(&config, &["batch", &waiting]).await, [nobody]);
    let task = id(&client, "SELECT musterd.enqueue('noop')").await;
    assert_eq!(why(&config, &["task", &task]).await, [nobody]);
    client.execute("SELECT musterd.pause_queue('default')", &[]).await.unwrap();
    let paused = "paused: queue default is paused → musterd queue resume default";
    for subject in [["batch", &waiting], ["task", &task], ["queue", "default"]] {
        assert_eq!(why(&config, &subject).await, [paused, nobody], "{subject:?}");
    }
    let empty = id(&client, "SELECT musterd.submit_batch('noop', '{}'::jsonb[])").await;
    assert_eq!(why(&config, &["batch", &empty]).await, [format!("ended: batch {empty} has succeeded")]);
    client.execute(&format!("SELECT musterd.abort({waiting})"), &[]).await.unwrap();
    let aborting = format!("aborting: batch {waiting} is being aborted; 0 blocks are still in hand");
    assert_eq!(why(&config, &["batch", &waiting]).await, [aborting]);
    // For people: a line each, and what to do under it.
    let shown = stdout(&config.musterd(&["why", "batch", &held]).await);
    assert_eq!(shown, format!("batch {held} is held\n  → musterd batch release {held}\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_worker_the_handler_the_schedule_and_the_children_are_named() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[queues.lane]\nmode = \"structured\"\n[handlers.sleep]\nduration = \"1h\"";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let config = daemon.config();
    let nobodys = id(&client, "SELECT musterd.submit_batch('unheard_of', ARRAY['1'::jsonb])").await;
    let no_handler = "no_handler: none of the 1 live workers of queue default handles \"unheard_of\" \
                      → add [handlers.unheard_of] to a worker's configuration";
    assert_eq!(why(config, &["batch", &nobodys]).await, [no_handler]);
    client.execute("SELECT musterd.enqueue('unheard_of')", &[]).await.unwrap();
    let held = "SELECT musterd.submit_batch('other', ARRAY['1'::jsonb], hold => true)";
    client.execute(held, &[]).await.unwrap();
    let waiting = "no_handler: none of the 1 live workers of queue default handles \"unheard_of\"; of it 1 tasks and 1 rows \
                   wait → add [handlers.unheard_of] to a worker's configuration";
    assert_eq!(why(config, &["queue", "default"]).await, [waiting]);
    let elsewhere = id(&client, "SELECT musterd.enqueue('noop', queue => 'nowhere')").await;
    let not_served = "queue_not_served: none of the 1 live workers serves queue nowhere \
                      → add [queues.nowhere] to a worker's configuration";
    assert_eq!(why(config, &["task", &elsewhere]).await, [not_served]);
    let later = "SELECT musterd.enqueue('noop', run_at => '2099-01-02 03:04:05Z')";
    let later = id(&client, later).await;
    let scheduled = format!(
        "scheduled: task {later} is not due before 2099-01-02T03:04:05Z → to run it now: musterd task retry {later}"
    );
    assert_eq!(why(config, &["task", &later]).await, [scheduled]);
    let parent = id(&client, "SELECT musterd.enqueue('noop', delay => '1 day')").await;
    let spawn = format!("SELECT musterd.spawn('unheard_of', p_parent_id => {parent})");
    let child = id(&client, &spawn).await;
    let wait = format!("UPDATE musterd.task_records SET state = 'waiting' WHERE id = {parent}");
    client.execute(&wait, &[]).await.unwrap();
    let children = format!(
        "waiting_for_children: task {parent} waits for 1 children: {child} (unheard_of, queued) → musterd why task {child}"
    );
    assert_eq!(why(config, &["task", &parent]).await, [children]);
    let uncle = format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{parent}]::bigint[])");
    let uncle = id(&client, &uncle).await;
    let after = format!(
        "waiting_for_tasks: task {uncle} starts after {parent} has ended → musterd why task {parent}"
    );
    assert_eq!(why(config, &["task", &uncle]).await, [after]);
    let fine =
        "nothing_wrong: nothing is wrong: 1 worker serves queue lane; 0 tasks and 0 rows wait, 0 tasks run";
    assert_eq!(why(config, &["queue", "lane"]).await, [fine]);
    // A structured queue works on one scope; the other waits, and is told for which.
    let first = "SELECT musterd.submit_batch('sleep', ARRAY['1'::jsonb], queue => 'lane')";
    let first = id(&client, first).await;
    begins(
        config,
        &["batch", &first],
        "nothing_wrong: nothing is wrong: its first rows are running, 1 rows are left",
    )
    .await;
    let second =
        id(&client, "SELECT musterd.submit_batch('sleep', ARRAY['1'::jsonb], queue => 'lane')").await;
    let focus = format!(
        "focus_elsewhere: queue lane is structured, and all its fibers work on scope {first} → musterd why task {first}"
    );
    assert_eq!(why(config, &["batch", &second]).await, [focus]);
    let focus = format!("focus: all fibers of queue lane work on scope {first}");
    assert_eq!(why(config, &["queue", "lane"]).await[0], focus);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_handler_is_told_with_its_last_error_its_retries_and_its_budget() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[retry]\nbase = \"1h\"\nmax = \"1h\"\n\
                [handlers.stumble]\nbuiltin = \"fail\"\nfailure = \"error\"\nrate = 1.0\n\
                [handlers.fail]\nfailure = \"final\"\nrate = 1.0\n\
                [queues.default]\nfibers = 1";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let config = daemon.config();
    let rows = "ARRAY['1'::jsonb, '2']";
    // All its rows wait for their next try.
    let stumbling = id(&client, &format!("SELECT musterd.submit_batch('stumble', {rows})")).await;
    let told =
        begins(config, &["batch", &stumbling], "backoff: 2 rows wait for their next try (attempt 2)").await;
    assert!(told[0].contains(", the first at 2") && told[0].contains("; one failed with: "), "{told:?}");
    assert_eq!(told.len(), 1, "{told:?}");
    let task = id(&client, "SELECT musterd.enqueue('stumble')").await;
    let told = begins(config, &["task", &task], "backoff: task ").await;
    assert!(
        told[0].contains("is tried again (attempt 2) at ") && told[0].contains("; the error: "),
        "{told:?}"
    );
    assert!(told[0].ends_with(&format!("→ to run it now: musterd task retry {task}")), "{told:?}");
    // It has failed for good.
    let failed = id(&client, &format!("SELECT musterd.submit_batch('fail', {rows})")).await;
    let told = begins(config, &["batch", &failed], "ended: ").await;
    assert!(told[0].starts_with(&format!("ended: batch {failed} has failed")), "{told:?}");
    // Too many have failed: it was held, as it asked to be.
    let submit = format!("SELECT musterd.submit_batch('fail', {rows}, on_budget => 'hold')");
    let budget = id(&client, &submit).await;
    let told = begins(config, &["batch", &budget], "budget: ").await;
    let sentence = format!(
        "budget: batch {budget} was held because 1 row failed and 0 are allowed → fix the cause, then: musterd batch release {budget}"
    );
    assert_eq!(told[0], sentence);
    assert!(told[1].starts_with("failing: 1 row has failed, 0 are allowed; one of them: "), "{told:?}");
    assert!(told[1].ends_with(&format!("→ musterd batch rows {budget} --failed")), "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flushes_that_fail_are_told_with_the_worker_and_its_trouble() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    client.batch_execute("ALTER TABLE musterd.outcomes RENAME COLUMN attempt TO gone").await.unwrap();
    let batch = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb])").await;
    let told = begins(config, &["batch", &batch], "flushes_failing: worker ").await;
    assert!(
        told[0].contains(": outcomes cannot be written: ") && told[0].contains("\"attempt\""),
        "{told:?}"
    );
    assert!(told[0].contains("; it keeps what it has done and starts nothing → fix the cause"), "{told:?}");
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(why(config, &["queue", "default"]).await, told);
    client.batch_execute("ALTER TABLE musterd.outcomes RENAME COLUMN gone TO attempt").await.unwrap();
    begins(config, &["batch", &batch], "ended: ").await;
    begins(config, &["queue", "default"], "nothing_wrong: ").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_transaction_is_told_with_its_pid_age_and_statement() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let reader = db.client().await;
    reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 AS forgotten").await.unwrap();
    let batch = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb])").await;
    let pid: i32 = {
        let sql =
            "SELECT pid FROM pg_stat_activity WHERE query LIKE '%forgotten' AND pid <> pg_backend_pid()";
        client.query_one(sql, &[]).await.unwrap().get(0)
    };
    for subject in [["batch", batch.as_str()], ["queue", "default"]] {
        assert!(!why(&config, &subject).await.iter().any(|told| told.starts_with("long_transaction")));
        let told = why(&config, &[subject[0], subject[1], "--long-transaction", "0s"]).await;
        let last = told.last().unwrap();
        assert!(last.starts_with("long_transaction: a transaction of "), "{told:?}");
        assert!(last.contains(&format!("(pid {pid}, idle in transaction) has been open for ")), "{told:?}");
        assert!(
            last.contains("its statement: BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 AS forgotten"),
            "{told:?}"
        );
        assert!(last.ends_with(&format!("→ end it, or: SELECT pg_terminate_backend({pid})")), "{told:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_nothing_is_wrong_the_rate_and_the_time_left_are_told() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[queues.default]\nfibers = 1\n[handlers.sleep]\nduration = \"20ms\"\n\
                [handlers.long]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"1h\"\ntimeout = \"2h\"";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let rows = "ARRAY (SELECT to_jsonb(g) FROM generate_series(1, 100000) g)";
    let batch = id(&client, &format!("SELECT musterd.submit_batch('sleep', {rows})")).await;
    let told = eventually(SOON, "a rate is told", async || {
        let told = why(daemon.config(), &["batch", &batch]).await;
        told[0].contains(" rows/s, about ").then_some(told)
    })
    .await;
    assert!(told[0].starts_with("nothing_wrong: nothing is wrong: ") && told.len() == 1, "{told:?}");
    let (_, rest) = told[0].split_once(" rows are left at ").unwrap();
    assert!(rest.split_once(" rows/s").unwrap().0.parse::<f64>().unwrap() > 0.0, "{told:?}");
    let task = id(&client, "SELECT musterd.enqueue('long', queue => 'default')").await;
    let told = begins(daemon.config(), &["task", &task], "nothing_wrong: nothing is wrong: ").await;
    assert_eq!(told.len(), 1, "{told:?}");
}

#[tokio::test]
async fn what_does_not_exist_is_said_so() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    for args in [["why", "batch", "17"], ["why", "task", "17"], ["why", "queue", "nowhere"]] {
        let output = config.musterd(&args).await;
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("there is no"), "{args:?}");
    }
}
