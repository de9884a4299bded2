//! Many tasks by one request: streamed, all of them or none, whatever becomes of the client.

use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::caller::{JSON, NDJSON, PATIENCE, chunk, finish};
use super::start;
use super::upload::{hang_up, nothing_is_left};
use crate::suite::support::database::TestDb;
use crate::suite::support::sql::rows;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::ask;

const MANY: &str = "/v1/tasks/many?command=later&delay=1h";

/// Payloads of about 200 bytes.
fn payloads(count: usize) -> String {
    let filler = "x".repeat(200);
    (1..=count).map(|n| format!("{{\"n\":{n},\"filler\":\"{filler}\"}}\n")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_payload_of_the_body_is_a_task() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (_daemon, caller) = start(&db, "").await;
    let path = "/v1/tasks/many?command=work&queue=side&priority=-5&delay=1h&max_attempts=7&timeout=90s\
                &on_child_failure=abort_siblings";
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let done = caller.post(path, &[NDJSON, ("traceparent", trace)], "1\n\n{\"a\": 2}\n").await.json(201);
    assert_eq!(done, json!({ "tasks": 2, "first_id": 1, "last_id": 2 }));
    let kept = "SELECT payload, queue, priority, state, max_attempts, timeout, on_child_failure, traceparent FROM musterd.tasks ORDER BY id";
    let same = format!("side|-5|scheduled|7|00:01:30|abort_siblings|{trace}");
    assert_eq!(rows(&client, kept).await, ["1", "{\"a\": 2}"].map(|payload| format!("{payload}|{same}")));

    let done = caller.post("/v1/tasks/many?command=echo", &[JSON], "[{\"id\": 7}, null]").await.json(201);
    assert_eq!(done, json!({ "tasks": 2, "first_id": 3, "last_id": 4 }));
    eventually(PATIENCE, "both have run", async || {
        let tasks = caller.get("/v1/tasks?command=echo&state=succeeded").await.json(200);
        let results: Vec<_> = tasks["tasks"].as_array()?.iter().map(|task| task["result"].clone()).collect();
        (results == [json!(null), json!({ "id": 7 })]).then_some(())
    })
    .await;
    let none = caller.post("/v1/tasks/many?command=echo", &[NDJSON], "").await.json(201);
    assert_eq!(none, json!({ "tasks": 0, "first_id": null, "last_id": null }));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_told_and_nothing_is_enqueued() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0\n[submit]\nmax_row_bytes = 1000").await;
    let good = payloads(20_000);
    let problem =
        caller.post(MANY, &[NDJSON], &format!("{good}{{oops}}\n{good}")).await.problem(422, "invalid_rows");
    assert!(problem["detail"].as_str().unwrap().contains("line 20001"), "{problem}");
    let wide = format!("1\n\"{}\"", "x".repeat(1200));
    let problem = caller.post(MANY, &[NDJSON], &wide).await.problem(413, "too_large");
    assert!(problem["detail"].as_str().unwrap().contains("line 2"), "{problem}");
    caller.post(MANY, &[JSON], "{\"a\": 1}").await.problem(422, "invalid_rows");
    caller.post(MANY, &[], "1").await.problem(415, "unsupported_media_type");
    caller.post(MANY, &[("content-type", "text/csv")], "a\n1").await.problem(415, "unsupported_media_type");
    let packed = [NDJSON, ("content-encoding", "gzip")];
    caller.post(MANY, &packed, "1").await.problem(415, "unsupported_media_type");
    let latin = [("content-type", "application/x-ndjson; charset=latin1")];
    caller.post(MANY, &latin, "1").await.problem(415, "unsupported_media_type");
    let path = "/v1/tasks/many?priority=high&delay=1s&run_at=2026-12-24T18:00:00Z&wait=true";
    let problem =
        caller.post(path, &[NDJSON, ("idempotency-key", "k")], "1").await.problem(400, "invalid_request");
    let errors = problem["errors"].as_array().unwrap().iter();
    let mut names: Vec<&str> = errors.map(|error| error["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["command", "delay", "idempotency-key", "priority", "wait"]);
    let late = "/v1/tasks/many?command=later&run_at=9999-01-01T00:00:00Z";
    let problem = caller.post(late, &[NDJSON], "1").await.problem(422, "not_storable");
    assert!(problem["detail"].as_str().unwrap().contains("a hundred years ahead"), "{problem}");
    caller.get("/v1/tasks/many").await.problem(405, "method_not_allowed");
    nothing_is_left(&db).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_leaves_no_task_behind() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0\nmax_uploads = 1").await;
    // More often than there are slots: each is given back.
    for _ in 0..2 {
        let mut stream = caller.begin("POST", MANY, &[NDJSON], None).await;
        chunk(&mut stream, payloads(10_000).as_bytes()).await;
        let inserting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND application_name = 'musterd api' AND query LIKE '%enqueue_many%' AND xact_start IS NOT NULL";
        eventually(PATIENCE, "a group is enqueued", async || {
            (ask::<i64>(&client, inserting).await == 1).then_some(())
        })
        .await;
        caller.post(MANY, &[NDJSON], "1").await.problem(503, "busy");
        hang_up(stream);
        nothing_is_left(&db).await;
    }
    let mut stream = caller.begin("POST", MANY, &[NDJSON], None).await;
    for _ in 0..3 {
        chunk(&mut stream, payloads(4_000).as_bytes()).await;
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(finish(stream).await.json(201)["tasks"], 12_000);
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.tasks").await, 12_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_between_two_groups_ends_no_transaction() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (_daemon, caller) = start(&db, "[database]\nidle_in_transaction_session_timeout = \"1s\"").await;
    let mut stream = caller.begin("POST", MANY, &[NDJSON], None).await;
    chunk(&mut stream, payloads(10_000).as_bytes()).await;
    let idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'musterd api'
         AND state = 'idle in transaction' AND state_change < clock_timestamp() - interval '1500 ms'";
    eventually(PATIENCE, "the transaction waits for the client", async || {
        (ask::<i64>(&client, idle).await == 1).then_some(())
    })
    .await;
    chunk(&mut stream, payloads(1).as_bytes()).await;
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(finish(stream).await.json(201)["tasks"], 10_001);
}
