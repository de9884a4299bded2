//! `musterd enqueue`, `task` and `queue`: what they do, what they print, and how they end.

use std::process::Output;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{QUICK, end_of, text, texts};

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refusal(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

async fn json_of(config: &TestConfig, args: &[&str]) -> Value {
    let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    let output = config.musterd(&args).await;
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {output:?}"))
}

async fn enqueue(config: &TestConfig, args: &[&str]) -> i64 {
    let args: Vec<&str> = ["enqueue"].iter().chain(args).copied().collect();
    printed(&config.musterd(&args).await).trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_option_of_enqueue_reaches_the_task() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    let first = enqueue(&config, &["report"]).await;
    let plain = "queue, priority, state, payload, max_attempts, timeout, on_child_failure";
    let shown = async |client: &Client, id: i64, columns: &str| {
        text(client, &format!("SELECT {columns} FROM musterd.tasks WHERE id = {id}")).await
    };
    assert_eq!(shown(&client, first, plain).await, "default|100|queued|{}|||wait");
    let whole = [
        "report",
        "{\"a\": 1}",
        "--queue",
        "side",
        "--priority",
        "-5",
        "--delay",
        "1h",
        "--max-attempts",
        "7",
        "--timeout",
        "90s",
        "--dedup-key",
        "d",
        "--idempotency-key",
        "i",
        "--on-child-failure",
        "abort_siblings",
    ];
    let id = enqueue(&config, &whole).await;
    assert_eq!(shown(&client, id, plain).await, "side|-5|scheduled|{\"a\": 1}|7|00:01:30|abort_siblings");
    let keys = "dedup_key, idempotency_key, run_at > now() + interval '59 minutes'";
    assert_eq!(shown(&client, id, keys).await, "d|i|t");
    assert_eq!(enqueue(&config, &whole).await, id, "the same request is the same task");
    let other = config.musterd(&["enqueue", "report", "{\"a\": 2}", "--idempotency-key", "i"]).await;
    assert!(refusal(&other).contains("was used by task"), "{other:?}");

    let joined = enqueue(&config, &["report", "{\"a\": 3}", "--dedup-key", "d", "--replace"]).await;
    assert_eq!(joined, id);
    assert_eq!(shown(&client, id, "payload").await, "{\"a\": 3}");
    let at = enqueue(&config, &["report", "--run-at", "2099-12-24T18:00:00Z"]).await;
    assert_eq!(shown(&client, at, "state, run_at AT TIME ZONE 'UTC'").await, "scheduled|2099-12-24 18:00:00");
    let uncle =
        enqueue(&config, &["report", "--after", &first.to_string(), "--after", &at.to_string()]).await;
    assert_eq!(json_of(&config, &["task", "show", &uncle.to_string()]).await["after"], json!([first, at]));
    for wrong in [
        &["enqueue", "a b"][..],
        &["enqueue", "c", "{"],
        &["enqueue", "c", "--delay", "1h", "--run-at", "2099-12-24T18:00:00Z"],
    ] {
        assert_eq!(config.musterd(wrong).await.status.code(), Some(2), "{wrong:?}");
    }
    let missing = config.musterd(&["enqueue", "c", "--after", "4711"]).await;
    assert!(refusal(&missing).contains("no task 4711 to wait for"), "{missing:?}");
    for (wrong, words) in [
        (["--timeout", "0s"], "timeout is 00:00:00 (It is above zero"),
        (["--delay", "100000 years"], "delay is more than a hundred years ahead"),
        (["--run-at", "9999-01-01T00:00:00Z"], "run_at is more than a hundred years ahead"),
    ] {
        let output = config.musterd(&[&["enqueue", "c"][..], &wrong].concat()).await;
        assert!(refusal(&output).contains(words), "{output:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn moments_that_no_calendar_has_are_shown_all_the_same() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    let task = enqueue(&config, &["noop"]).await.to_string();
    let batch = text(&client, "SELECT musterd.submit_batch('noop', '[1]')").await;
    // No function lets them in. A restore, or a superuser, may.
    client
        .batch_execute(
            "UPDATE musterd.tasks SET run_at = '20000-01-01', created_at = '-infinity', finished_at = 'infinity';
             SELECT guard.result(id, 1, 'succeeded', p_at => '-infinity') FROM musterd.batches;
             INSERT INTO musterd.workers (id, host, pid, version, started_at, seen_at, ended_at)
             VALUES ('w', 'h', 1, '0', '-infinity', '20000-01-01', 'infinity')",
        )
        .await
        .unwrap();
    let shown = json_of(&config, &["task", "show", &task]).await;
    assert_eq!(shown["run_at"], "9999-12-30T22:00:00.999999999Z");
    for args in [
        &["task", "list"][..],
        &["task", "show", &task],
        &["why", "task", &task],
        &["batch", "list"],
        &["batch", "show", &batch],
        &["batch", "rows", &batch],
        &["worker", "list"],
    ] {
        printed(&config.musterd(args).await);
        json_of(&config, args).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_shown_waited_for_aborted_and_tried_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, QUICK).start();
    let config = daemon.config();
    let done = json_of(config, &["enqueue", "echo", "{\"id\": 7}", "--wait"]).await;
    let id = done["id"].to_string();
    assert_eq!((&done["state"], &done["result"]), (&json!("succeeded"), &json!({"id": 7})));
    let shown = json_of(config, &["task", "show", &id]).await;
    assert_eq!(shown["state"], "succeeded");
    for key in
        ["id", "state", "parent_id", "attempt", "result", "error", "queue", "command", "children", "after"]
    {
        assert!(shown.get(key).is_some(), "{key}: {shown}");
    }
    let table = printed(&config.musterd(&["task", "show", &id]).await);
    assert!(table.contains("succeeded") && table.contains("{\"id\": 7}"), "{table}");

    let failed = config.musterd(&["enqueue", "fail", "--max-attempts", "2", "--wait"]).await;
    assert_eq!(failed.status.code(), Some(1));
    let failed = json_of(config, &["task", "list", "--state", "failed"]).await[0].clone();
    assert_eq!((&failed["command"], &failed["attempt"]), (&json!("fail"), &json!(2)));
    assert!(failed["error"].as_str().unwrap().contains("asked to fail"), "{failed}");
    let id = failed["id"].to_string();
    assert_eq!(json_of(config, &["task", "retry", &id]).await["state"], "queued");
    assert_eq!(end_of(&client, id.parse().unwrap()).await, "failed");
    assert_eq!(config.musterd(&["task", "wait", &id]).await.status.code(), Some(1));

    let later = enqueue(config, &["noop", "--delay", "1h"]).await.to_string();
    let waited = config.musterd(&["task", "wait", &later, "--timeout", "100ms"]).await;
    assert_eq!(waited.status.code(), Some(1));
    assert!(refusal(&waited).contains("is still scheduled"), "{waited:?}");
    assert_eq!(json_of(config, &["task", "abort", &later]).await["state"], "aborted");
    assert_eq!(json_of(config, &["task", "retry", &later]).await["state"], "queued");
    assert!(printed(&config.musterd(&["task", "wait", &later]).await).contains("succeeded"));
    let missing = config.musterd(&["task", "show", "4711"]).await;
    assert!(refusal(&missing).contains("there is no task 4711"), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_listed_by_page_and_filter() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    let parent = texts(&client, "SELECT musterd.enqueue('plan')").await.remove(0);
    client
        .batch_execute(&format!(
            "SELECT musterd.spawn('part', '{{}}', {parent}) FROM generate_series(1, 3);
        SELECT musterd.enqueue('other', queue => 'side'); SELECT musterd.submit_batch('rows', '[1]'::jsonb)"
        ))
        .await
        .unwrap();
    let ids = async |args: &[&str]| {
        let args: Vec<&str> = ["task", "list"].iter().chain(args).copied().collect();
        let list = json_of(&config, &args).await;
        list.as_array().unwrap().iter().map(|task| task["id"].as_i64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&[]).await, [5, 4, 3, 2, 1], "newest first; a batch is not listed among tasks");
    assert_eq!(ids(&["--parent", &parent]).await, [4, 3, 2]);
    assert_eq!(ids(&["--queue", "side"]).await, [5]);
    assert_eq!(ids(&["--command", "part", "--state", "queued"]).await, [4, 3, 2]);
    assert_eq!(ids(&["--limit", "2"]).await, [5, 4]);
    assert_eq!(ids(&["--limit", "2", "--before", "4"]).await, [3, 2]);
    let table = printed(&config.musterd(&["task", "list", "--limit", "2"]).await);
    assert!(
        table.contains("COMMAND") && table.contains("other") && table.contains("task list --before 4"),
        "{table}"
    );
    assert_eq!(config.musterd(&["task", "list", "--state", "done"]).await.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_are_listed_paused_and_resumed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "[queues.lane]\nmode = \"structured\"\nfibers = 3\n").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    assert_eq!(printed(&config.musterd(&["queue", "pause", "default"]).await), "queue default is paused\n");
    let id = enqueue(config, &["noop"]).await;
    let listed = json_of(config, &["queue", "list"]).await;
    let named =
        |name: &str| listed.as_array().unwrap().iter().find(|queue| queue["name"] == name).unwrap().clone();
    let default = named("default");
    assert_eq!(
        (&default["paused"], &default["tasks_queued"], &default["workers"]),
        (&json!(true), &json!(1), &json!(1))
    );
    assert_eq!((&named("lane")["mode"], &named("lane")["fibers"]), (&json!("structured"), &json!(3)));
    let table = printed(&config.musterd(&["queue", "list"]).await);
    assert!(table.contains("QUEUE") && table.contains("paused") && table.contains("structured"), "{table}");
    assert_eq!(
        json_of(config, &["queue", "resume", "default"]).await,
        json!({"name": "default", "paused": false})
    );
    assert_eq!(end_of(&client, id).await, "succeeded");
    // Pausing what has not been used yet is no mistake, but may be a slip.
    let noted = async |name: &str| {
        let output = config.musterd(&["queue", "pause", name]).await;
        assert_eq!(printed(&output), format!("queue {name} is paused\n"));
        String::from_utf8(output.stderr).unwrap().contains("has not been used yet")
    };
    assert!(noted("defualt").await);
    assert!(!noted("defualt").await, "it is known now");
    assert!(!noted("lane").await);
}
