//! The HTTP API with the real daemon: every route does what the command line does, and says it in the same words.

pub(crate) mod caller;
mod door;
mod errors;
mod follow;
mod many;
mod schema;
mod slow;
mod tls;
mod trace;
mod unread;
mod upload;

use serde_json::{Value, json};

use crate::suite::batch_cli::json_of;
use crate::suite::outputs::ground::{file_store, over};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::ask;
use caller::{Caller, JSON, NDJSON, PATIENCE};

/// A daemon and somebody who calls it, as often as they like unless the test says otherwise.
async fn start(db: &TestDb, toml: &str) -> (Daemon, Caller) {
    let unlimited = if toml.contains("[http]") { "" } else { "[http]\nrate_limit = 0\n" };
    let daemon = Daemon::builder(db, &format!("{unlimited}{toml}")).start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    caller.warm_up().await;
    (daemon, caller)
}

/// Asks for a batch until it has ended.
async fn ended(caller: &Caller, id: &Value) -> Value {
    eventually(PATIENCE, "the batch ends", async || {
        let batch = caller.get(&format!("/v1/batches/{id}")).await.json(200);
        batch["finished_at"].is_string().then_some(batch)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_come_in_every_format_and_go_their_way() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let inputs = json!([{ "name": "Ann, Bob", "age": "41" }, { "name": "Zoë", "age": "7" }]);
    for (media_type, query, body) in [
        (
            "application/x-ndjson",
            "",
            "{\"name\":\"Ann, Bob\",\"age\":\"41\"}\n\n{\"name\":\"Zoë\",\"age\":\"7\"}",
        ),
        ("application/json; charset=utf-8", "", &*inputs.to_string()),
        ("text/csv", "", "name,age\n\"Ann, Bob\",41\nZoë,7\n"),
        ("text/csv;charset=UTF-8", "&delimiter=%3B&quote=%27", "name;age\n'Ann, Bob';41\nZoë;7\n"),
        ("text/tab-separated-values", "", "name\tage\nAnn, Bob\t41\nZoë\t7\n"),
        (
            "application/x-ndjson",
            "&exported=true",
            "{\"_line\":1,\"_input\":{\"name\":\"Ann, Bob\",\"age\":\"41\"}}\n{\"_line\":2,\"_input\":{\"name\":\"Zoë\",\"age\":\"7\"}}",
        ),
    ] {
        let path = format!("/v1/batches?command=echo{query}");
        let answer = caller.post(&path, &[("content-type", media_type)], body).await;
        let submitted = answer.json(201);
        let id = &submitted["id"];
        assert_eq!(submitted, json!({ "id": id, "rows": 2, "repeated": false }));
        assert_eq!(answer.headers["location"], format!("/v1/batches/{id}"));
        assert_eq!(ended(&caller, id).await["succeeded"], 2);
        let page = caller.get(&format!("/v1/batches/{id}/rows")).await.json(200);
        let rows = page["rows"].as_array().unwrap();
        let given: Vec<&Value> = rows.iter().map(|row| &row["input"]).collect();
        assert_eq!(json!(given), inputs, "{media_type}");
        assert!(
            rows.iter().all(|row| row["result"] == row["input"] && row["state"] == "succeeded"),
            "{rows:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_options_of_a_submit_reach_the_batch() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let path = "/v1/batches?command=noop&queue=elsewhere&context=%7B%22a%22%3A1%7D&priority=-7&hold=true&max_attempts=4\
                &row_timeout=90s&max_failed=2.5%25&on_budget=abort&on_done=tell";
    let key = ("idempotency-key", "order 66");
    let id = caller.post(path, &[NDJSON, key], "1\n2\n3").await.json(201)["id"].clone();
    let told = "SELECT concat_ws(' ', b.command, b.queue, t.payload, b.priority, t.state, b.max_attempts, b.row_timeout,
        b.max_failed, b.max_failed_percent, b.on_budget, b.on_done, t.idempotency_key, b.rows)
        FROM musterd.batches b JOIN musterd.tasks t USING (id)";
    assert_eq!(
        ask::<String>(&db.client().await, told).await,
        "noop elsewhere {\"a\": 1} -7 held 4 00:01:30 0 2.5 abort tell order 66 3"
    );
    let again = caller.post(path, &[NDJSON, key], "1\n2\n3").await.json(200);
    assert_eq!(again, json!({ "id": id, "rows": 3, "repeated": true }));
    let problem = caller.post(path, &[NDJSON, key], "1\n2\n4").await.problem(409, "conflict");
    assert!(problem["detail"].as_str().unwrap().contains(&format!("batch {id}")), "{problem}");
    assert_eq!(ask::<i64>(&db.client().await, "SELECT count(*) FROM musterd.batches").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_a_key_are_appended_once() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let id = caller.post("/v1/batches?command=noop&hold=true", &[NDJSON], "1").await.json(201)["id"].clone();
    let (path, key) = (format!("/v1/batches/{id}/append"), ("idempotency-key", "tuesday"));
    let first = json!({ "id": id, "added": 2, "rows": 3, "repeated": false });
    assert_eq!(caller.post(&path, &[NDJSON, key], "2\n3").await.json(200), first);
    let repeated = json!({ "id": id, "added": 2, "rows": 3, "repeated": true });
    caller.post(&path, &[NDJSON], "4").await.json(200);
    assert_eq!(caller.post(&path, &[NDJSON, key], "2\n3").await.json(200), repeated);
    let problem = caller.post(&path, &[NDJSON, key], "2\n5").await.problem(409, "conflict");
    assert!(problem["detail"].as_str().unwrap().contains("other rows"), "{problem}");
    // The answer is there after the end, too.
    caller.post(&format!("/v1/batches/{id}/release"), &[], "").await.json(200);
    assert_eq!(ended(&caller, &id).await["succeeded"], 4);
    assert_eq!(caller.post(&path, &[NDJSON, key], "2\n3").await.json(200), repeated);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_held_appended_to_released_and_aborted() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"").await;
    let id = caller.post("/v1/batches?command=noop&hold=true", &[NDJSON], "1").await.json(201)["id"].clone();
    let at = |what: &str| format!("/v1/batches/{id}/{what}");
    let reasons = caller.get(&format!("/v1/why/batch/{id}")).await.json(200);
    assert_eq!(reasons["reasons"][0]["code"], "held");
    let csv = [("content-type", "text/csv")];
    let appended = caller.post(&at("append"), &csv, "a\n2\n3\n").await.json(200);
    assert_eq!(appended, json!({ "id": id, "added": 2, "rows": 3, "repeated": false }));
    let released = caller.post(&at("release"), &[], "").await.json(200);
    assert_eq!(released["id"], id);
    assert_eq!(ended(&caller, &id).await["succeeded"], 3);
    caller.post(&at("append"), &csv, "a\n4\n").await.problem(409, "conflict");
    let nothing_failed = caller.post(&at("redrive"), &[], "").await.json(200);
    assert_eq!(nothing_failed, json!({ "id": id, "state": "succeeded", "rows": 0 }));

    let id = caller.post("/v1/batches?command=sleep", &[NDJSON], "1\n2").await.json(201)["id"].clone();
    let held = caller.post(&format!("/v1/batches/{id}/hold"), &[], "").await.json(200);
    assert_eq!(held, json!({ "id": id, "state": "held" }));
    let aborted = caller.post(&format!("/v1/batches/{id}/abort"), &[JSON], "").await.json(200);
    assert!(["aborting", "aborted"].contains(&aborted["state"].as_str().unwrap()), "{aborted}");
    assert_eq!(ended(&caller, &id).await["aborted"], 2);
    caller.post(&format!("/v1/batches/{id}/redrive"), &[], "").await.problem(409, "conflict");
    caller.post("/v1/batches/4711/redrive", &[], "").await.problem(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_command_line_prints_is_what_the_api_answers() {
    let db = TestDb::new().await;
    let (outputs, _) = file_store();
    let (daemon, caller) =
        start(&db, &format!("{outputs}[handlers.half]\nkind = \"builtin\"\nbuiltin = \"fail\"\n")).await;
    let id = caller.post("/v1/batches?command=half&max_attempts=1", &[NDJSON], "1\n2").await.json(201)["id"]
        .clone();
    ended(&caller, &id).await;
    let files = over(&db.client().await, 3, "x").await;
    caller.post(&format!("/v1/batches/{files}/release"), &[], "").await;
    db.client()
        .await
        .execute("SELECT pg_notify('musterd_check', $1::text)", &[&files.to_string()])
        .await
        .unwrap();
    ended(&caller, &json!(files)).await;
    let task = caller.post("/v1/tasks", &[JSON], r#"{"command":"echo","payload":[1,2.50]}"#).await.json(201);
    let task = task["id"].to_string();
    eventually(PATIENCE, "the task ends", async || {
        (caller.get(&format!("/v1/tasks/{task}")).await.json(200)["state"] == "succeeded").then_some(())
    })
    .await;
    let (id, files) = (id.to_string(), files.to_string());
    for (args, path) in [
        (&["batch", "list"][..], "/v1/batches".to_owned()),
        (&["batch", "list", "--state", "failed", "--limit", "1"], "/v1/batches?state=failed&limit=1".into()),
        (&["batch", "show", &id], format!("/v1/batches/{id}")),
        (&["batch", "show", &files], format!("/v1/batches/{files}")),
        (&["batch", "rows", &id, "--failed"], format!("/v1/batches/{id}/rows?state=failed")),
        (
            &["batch", "rows", &id, "--from", "2", "--limit", "1"],
            format!("/v1/batches/{id}/rows?from=2&limit=1"),
        ),
        (&["task", "show", &task], format!("/v1/tasks/{task}")),
        (&["why", "batch", &id], format!("/v1/why/batch/{id}")),
        (&["why", "task", &task], format!("/v1/why/task/{task}")),
        (&["why", "queue", "default"], "/v1/why/queue/default".into()),
    ] {
        let answer = caller.get(&path).await.json(200);
        assert_eq!(answer, json_of(daemon.config(), args).await, "{path}");
    }
    let outputs = caller.get(&format!("/v1/batches/{files}/outputs")).await.json(200);
    assert_eq!(outputs["outputs"], json_of(daemon.config(), &["batch", "outputs", &files]).await);
    assert_eq!(outputs["outputs"]["files"][0]["name"], "out.txt");
    let none = caller.get(&format!("/v1/batches/{id}/outputs")).await.json(200);
    assert_eq!(none, json!({ "batch": id.parse::<i64>().unwrap(), "outputs": null }));
    let tasks = caller.get("/v1/tasks?state=succeeded&command=echo").await.json(200);
    assert_eq!(tasks["tasks"], json_of(daemon.config(), &["task", "list", "--command", "echo"]).await);
    let queues = caller.get("/v1/queues").await.json(200);
    assert_eq!(queues["queues"], json_of(daemon.config(), &["queue", "list"]).await);
    assert_eq!(caller.get("/v1/queues/default").await.json(200), queues["queues"][0]);

    let download = caller.get(&format!("/v1/batches/{files}/outputs/out.txt")).await;
    assert_eq!((download.status, &*download.body), (200, "1:x\n2:x\n3:x\n"));
    assert_eq!(
        download.headers["etag"],
        format!("{:?}", outputs["outputs"]["files"][0]["sha256"].as_str().unwrap())
    );
    caller.get(&format!("/v1/batches/{files}/outputs/manifest.json")).await.problem(404, "not_found");

    for (format, media_type) in [("csv", "text/csv; charset=utf-8"), ("ndjson", "application/x-ndjson")] {
        let export = caller.get(&format!("/v1/batches/{id}/export?rows=failed&format={format}")).await;
        assert_eq!((export.status, &*export.headers["content-type"]), (200, media_type));
        let args = ["batch", "export", &id, "--failed", "--format", format];
        let printed = daemon.config().musterd(&args).await;
        assert_eq!(export.body, String::from_utf8(printed.stdout).unwrap());
        assert!(export.body.lines().count() >= 2, "{}", export.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_enqueued_listed_retried_and_aborted() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[retry]\nmax_attempts = 1").await;
    let body = json!({ "command": "noop", "payload": { "n": 1 }, "queue": "elsewhere", "priority": 3, "delay": "1h",
        "max_attempts": 5, "timeout": "2m", "dedup_key": "one", "replace": true, "on_child_failure": "abort_siblings" });
    let key = ("idempotency-key", "task-1");
    let answer = caller.post("/v1/tasks", &[JSON, key], &body.to_string()).await;
    let id = answer.json(201)["id"].clone();
    assert_eq!(answer.headers["location"], format!("/v1/tasks/{id}"));
    assert_eq!(caller.post("/v1/tasks", &[JSON, key], &body.to_string()).await.json(201)["id"], id);
    caller.post("/v1/tasks", &[JSON, key], r#"{"command":"noop"}"#).await.problem(409, "conflict");
    let task = caller.get(&format!("/v1/tasks/{id}")).await.json(200);
    assert_eq!(
        (&task["state"], &task["priority"], &task["max_attempts"]),
        (&"scheduled".into(), &3.into(), &5.into())
    );
    let told = "SELECT concat_ws(' ', timeout, dedup_key, on_child_failure, run_at > now() + interval '50 min') FROM musterd.tasks";
    assert_eq!(ask::<String>(&db.client().await, told).await, "00:02:00 one abort_siblings t");
    let uncle = json!({ "command": "noop", "after": [id] });
    let uncle = caller.post("/v1/tasks", &[JSON], &uncle.to_string()).await.json(201)["id"].clone();
    assert_eq!(caller.get(&format!("/v1/tasks/{uncle}")).await.json(200)["after"], json!([id]));
    let page = caller.get("/v1/tasks?limit=1").await.json(200);
    assert_eq!((&page["tasks"][0]["id"], &page["next_before"]), (&uncle, &uncle));
    let page = caller.get(&format!("/v1/tasks?limit=1&before={uncle}")).await.json(200);
    assert_eq!(page["tasks"][0]["id"], id);
    let aborted = caller.post(&format!("/v1/tasks/{id}/abort"), &[], "").await.json(200);
    assert_eq!(aborted, json!({ "id": id, "state": "aborted" }));

    let id = caller.post("/v1/tasks", &[JSON], r#"{"command":"fail"}"#).await.json(201)["id"].clone();
    let failed = async || {
        eventually(PATIENCE, "the task fails", async || {
            let task = caller.get(&format!("/v1/tasks/{id}")).await.json(200);
            (task["state"] == "failed").then(|| task["finished_at"].clone())
        })
        .await
    };
    let first = failed().await;
    let retried = caller.post(&format!("/v1/tasks/{id}/retry"), &[], "").await.json(200);
    assert_eq!(retried, json!({ "id": id, "state": "queued" }));
    eventually(PATIENCE, "it fails once more", async || (failed().await != first).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_are_paused_and_resumed_and_workers_are_seen() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let paused = caller.post("/v1/queues/default/pause", &[], "").await.json(200);
    assert_eq!(paused, json!({ "name": "default", "paused": true }));
    assert_eq!(caller.get("/v1/queues/default").await.json(200)["paused"], true);
    assert_eq!(caller.get("/v1/why/queue/default").await.json(200)["reasons"][0]["code"], "paused");
    let resumed = caller.post("/v1/queues/default/resume", &[], "").await.json(200);
    assert_eq!(resumed, json!({ "name": "default", "paused": false }));
    let workers = caller.get("/v1/workers").await.json(200);
    let id = workers["workers"][0]["id"].as_str().unwrap();
    let worker = caller.get(&format!("/v1/workers/{id}")).await.json(200);
    assert_eq!((&worker["id"], &worker["state"]), (&id.into(), &"alive".into()));
    caller.get("/v1/workers/nobody").await.problem(404, "not_found");
    caller.get("/v1/queues/nowhere").await.problem(404, "not_found");
}
