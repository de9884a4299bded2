//! Everything that can be wrong with a request is told as a problem document that says what to do.

use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::caller::{JSON, NDJSON, finish};
use super::start;
use super::upload::under_way;
use crate::suite::support::database::TestDb;
use crate::suite::support::worker::ask;

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_mistake_has_its_status_and_its_words() {
    let db = TestDb::new().await;
    let toml = "[submit]\nmax_row_bytes = 1000\n[http]\nmax_body_bytes = 2000\nrate_limit = 0";
    let (_daemon, caller) = start(&db, toml).await;

    // Paths and methods.
    caller.get("/v1").await.problem(404, "not_found");
    caller.get("/v1/").await.problem(404, "not_found");
    caller.get("/v1/nothing/here").await.problem(404, "not_found");
    for (method, path, allow) in [
        ("DELETE", "/v1/batches", "GET,HEAD,POST"),
        ("PUT", "/v1/tasks/1", "GET,HEAD"),
        ("GET", "/v1/batches/1/hold", "POST"),
    ] {
        let answer = caller.send(method, path, &[], b"").await;
        answer.problem(405, "method_not_allowed");
        assert_eq!(answer.headers["allow"], allow, "{method} {path}");
    }

    // Ids, names and parameters.
    for path in [
        "/v1/batches/x",
        "/v1/batches/0",
        "/v1/batches/-1",
        "/v1/batches/+1",
        "/v1/tasks/99999999999999999999",
        "/v1/batches/%ff",
        "/v1/queues/a%20b",
        "/v1/workers/a%00b",
        "/v1/batches?state=odd",
        "/v1/batches?limit=0",
        "/v1/batches?limit=1001",
        "/v1/batches?limit=1&limit=2",
        "/v1/batches?colour=red",
        "/v1/batches/1?colour=red",
        "/v1/tasks?parent=me",
        "/v1/batches/1/rows?from=0",
        "/v1/batches/1/export?format=xml",
    ] {
        let problem = caller.get(path).await.problem(400, "invalid_request");
        assert!(problem["errors"][0]["name"].is_string(), "{path}: {problem}");
    }
    let all = caller.post("/v1/batches?priority=high&hold=maybe&colour=red", &[NDJSON], "1").await;
    let problem = all.problem(400, "invalid_request");
    let mut names: Vec<&str> =
        problem["errors"].as_array().unwrap().iter().map(|error| error["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["colour", "command", "hold", "priority"]);
    for path in
        ["/v1/batches/7", "/v1/batches/7/rows", "/v1/batches/7/export", "/v1/batches/7/events", "/v1/tasks/7"]
    {
        caller.get(path).await.problem(404, "not_found");
    }
    for path in ["/v1/batches/7/hold", "/v1/batches/7/abort", "/v1/tasks/7/abort", "/v1/tasks/7/retry"] {
        caller.post(path, &[], "").await.problem(404, "not_found");
    }
    caller.post("/v1/batches/7/append", &[NDJSON], "1").await.problem(404, "not_found");

    // Bodies of JSON.
    for (body, name) in [
        ("", "body"),
        ("{", "body"),
        ("[]", "body"),
        ("{\"command\": \"noop\", \"payload\": \"\\u0000\"}", "body"),
        ("{}", "command"),
        ("{\"command\": \"a b\"}", "command"),
        ("{\"command\": \"noop\", \"after\": \"7\"}", "after"),
        ("{\"command\": \"noop\", \"delay\": \"soon\"}", "delay"),
        ("{\"command\": \"noop\", \"delay\": \"1s\", \"run_at\": \"2026-12-24T18:00:00Z\"}", "delay"),
        ("{\"command\": \"noop\", \"run_at\": \"tomorrow\"}", "run_at"),
        ("{\"command\": \"noop\", \"replace\": true}", "replace"),
        ("{\"command\": \"noop\", \"priority\": 3000000000}", "priority"),
        ("{\"command\": \"noop\", \"colour\": \"red\"}", "colour"),
    ] {
        let problem = caller.post("/v1/tasks", &[JSON], body).await.problem(400, "invalid_request");
        assert_eq!(problem["errors"][0]["name"], name, "{body}: {problem}");
    }
    caller.post("/v1/tasks", &[JSON], "{\"command\":\"noop\",\"after\":[7]}").await.problem(404, "not_found");
    let large = json!({ "command": "noop", "payload": "x".repeat(1500) }).to_string();
    caller.post("/v1/tasks", &[JSON], &large).await.problem(413, "too_large");
    let larger = json!({ "command": "noop", "payload": "x".repeat(5000) }).to_string();
    caller.post("/v1/tasks", &[JSON], &larger).await.problem(413, "too_large");
    let wide = "{\"command\":\"noop\",\"payload\":1e99999}";
    caller.post("/v1/tasks", &[JSON], wide).await.problem(413, "too_large");
    caller.post("/v1/tasks", &[], "{}").await.problem(415, "unsupported_media_type");
    caller
        .post("/v1/tasks", &[("content-type", "text/xml")], "<a/>")
        .await
        .problem(415, "unsupported_media_type");

    // Bodies of rows.
    let submit = "/v1/batches?command=noop";
    for (media_type, body, told) in [
        ("application/x-ndjson", "1\n2\n{broken\n", "line 3"),
        ("application/x-ndjson", "1\n\"\\u0000\"\n", "line 2"),
        ("application/json", "{\"a\": 1}", "array"),
        ("application/json", "[1, 2", "]"),
        ("text/csv", "a,a\n1,2\n", "both called"),
        ("text/csv", "a,b\n1,2\n3\n", "line 3"),
    ] {
        let answer = caller.post(submit, &[("content-type", media_type)], body).await;
        let problem = answer.problem(422, "invalid_rows");
        assert!(problem["detail"].as_str().unwrap().contains(told), "{body}: {problem}");
    }
    caller.send("POST", submit, &[NDJSON], b"\"\xff\"").await.problem(422, "invalid_rows");
    let wide = format!("\"{}\"", "x".repeat(1200));
    let problem = caller.post(submit, &[NDJSON], &wide).await.problem(413, "too_large");
    assert!(problem["detail"].as_str().unwrap().contains("line 1"), "{problem}");
    caller.post(submit, &[], "1").await.problem(415, "unsupported_media_type");
    caller
        .post(submit, &[("content-type", "text/csv; charset=latin1")], "a\n1")
        .await
        .problem(415, "unsupported_media_type");
    let packed = [NDJSON, ("content-encoding", "gzip")];
    caller.post(submit, &packed, "1").await.problem(415, "unsupported_media_type");
    let long = "x".repeat(256);
    caller.post(submit, &[NDJSON, ("idempotency-key", &long)], "1").await.problem(400, "invalid_request");
    let twice = [NDJSON, ("idempotency-key", "a"), ("idempotency-key", "b")];
    caller.post(submit, &twice, "1").await.problem(400, "invalid_request");
    caller
        .post("/v1/batches?command=noop&delimiter=%22", &[("content-type", "text/csv")], "a\n1")
        .await
        .problem(400, "invalid_request");

    let client = db.client().await;
    assert_eq!(
        ask::<i64>(&client, "SELECT count(*) FROM musterd.tasks").await,
        0,
        "nothing came of any of these"
    );
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.rows").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_bodies_are_given_up() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nbody_timeout = \"1s\"").await;
    let submit = "/v1/batches?command=noop";
    let mut slow = caller.begin("POST", submit, &[NDJSON], Some(1000)).await;
    slow.write_all(b"1\n2\n").await.unwrap();
    finish(slow).await.problem(408, "timeout");
    let task = caller.begin("POST", "/v1/tasks", &[JSON], Some(1000)).await;
    finish(task).await.problem(408, "timeout");
    assert_eq!(ask::<i64>(&db.client().await, "SELECT count(*) FROM musterd.tasks").await, 0);

    let (_daemon, caller) = start(&db, "[http]\nupload_timeout = \"1s\"").await;
    let slow = caller.begin("POST", submit, &[NDJSON], Some(1000)).await;
    finish(slow).await.problem(408, "timeout");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_uploads_at_a_time_are_turned_away() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nmax_uploads = 1").await;
    let submit = "/v1/batches?command=noop";
    let mut first = caller.begin("POST", submit, &[NDJSON], Some(4)).await;
    under_way(&db).await;
    let busy = caller.post(submit, &[NDJSON], "1").await;
    busy.problem(503, "busy");
    assert_eq!(busy.headers["retry-after"], "2");
    caller.get("/v1/batches/7/export").await.problem(404, "not_found");
    caller.get("/v1/queues").await.json(200);
    first.write_all(b"1\n2\n").await.unwrap();
    assert_eq!(finish(first).await.json(201)["rows"], 2);
    caller.post(submit, &[NDJSON], "1").await.json(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_documented_is_there() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0").await;
    let document = caller.get("/v1/openapi.json").await.json(200);
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut seen = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let place = path
            .replace("{id}", "4711")
            .replace("{name}", "nowhere")
            .replace("{file}", "out.txt")
            .replace("{worker}", "nobody");
        for method in methods.as_object().unwrap().keys() {
            let answer = caller.send(&method.to_uppercase(), &place, &[], b"").await;
            assert!(answer.status < 500 && answer.status != 405, "{method} {path}: {answer:?}");
            assert!(!answer.body.contains("no such path"), "{method} {path}: {answer:?}");
            seen += 1;
        }
    }
    assert!(seen >= 26, "{seen}");
}
