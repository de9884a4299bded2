//! Who gets in: tokens and their scopes, loopback without them, and no page of another site.

use std::path::Path;

use super::caller::{Caller, JSON, NDJSON, PATIENCE};
use super::start;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::{run, services};

const READ: &str = "canary-read-0123456789abcdef";
const WRITE: &str = "canary-write-0123456789abcdef";
const LATER: &str = "canary-later-0123456789abcdef";

fn tokens(dir: &Path) -> String {
    std::fs::write(dir.join("read"), format!("# those who look\n{READ}\n")).unwrap();
    std::fs::write(dir.join("write"), WRITE).unwrap();
    format!(
        "read_tokens_file = {:?}\nwrite_tokens_file = {:?}\n",
        dir.join("read").display().to_string(),
        dir.join("write").display().to_string()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_what_its_scope_says_and_is_taken_away_without_a_restart() {
    let db = TestDb::new().await;
    let dir = run::new_dir("tokens");
    let (daemon, nobody) = start(&db, &format!("[http]\n{}", tokens(&dir))).await;
    let (reader, writer) = (nobody.with_token(READ), nobody.with_token(WRITE));

    let refused = nobody.get("/v1/batches").await;
    refused.problem(401, "unauthorized");
    assert_eq!(refused.headers["www-authenticate"], "Bearer");
    let refused = nobody.with_token("canary-wrong-0123456789abcdef").get("/v1/batches").await;
    refused.problem(401, "unauthorized");
    assert!(refused.headers["www-authenticate"].contains("invalid_token"), "{refused:?}");
    for odd in ["", " ", &READ[..20], &format!("{READ}x"), "# those who look"] {
        nobody.with_token(odd).get("/v1/batches").await.problem(401, "unauthorized");
    }
    nobody.get("/v1/nothing").await.problem(401, "unauthorized");
    nobody.get("/v1/batches/1/outputs/openapi.json").await.problem(401, "unauthorized");
    nobody.post("/v1/batches?command=noop", &[NDJSON], "1").await.problem(401, "unauthorized");
    reader.get("/v1/batches").await.json(200);
    let refused = reader.post("/v1/batches?command=noop", &[NDJSON], "1").await;
    refused.problem(403, "insufficient_scope");
    assert!(refused.headers["www-authenticate"].contains("insufficient_scope"), "{refused:?}");
    reader.post("/v1/queues/default/pause", &[], "").await.problem(403, "insufficient_scope");
    writer.get("/v1/batches").await.json(200);
    writer.post("/v1/batches?command=noop", &[NDJSON], "1").await.json(201);
    for open in ["/livez", "/readyz", "/metrics", "/v1/openapi.json"] {
        assert_eq!(nobody.get(open).await.status, 200, "{open}");
    }

    std::fs::write(dir.join("write"), LATER).unwrap();
    eventually(PATIENCE, "the new token is known", async || {
        (nobody.with_token(LATER).get("/v1/queues").await.status == 200).then_some(())
    })
    .await;
    writer.get("/v1/batches").await.problem(401, "unauthorized");
    reader.get("/v1/batches").await.json(200);

    // A file that is gone for a moment locks nobody out, and lets nobody in.
    std::fs::remove_file(dir.join("write")).unwrap();
    eventually(PATIENCE, "it is missed", async || {
        writer.get("/v1/batches").await.problem(401, "unauthorized");
        let complaint = |line: &String| line.contains("not all tokens of the API can be used");
        daemon.log().iter().any(complaint).then_some(())
    })
    .await;
    nobody.with_token(LATER).get("/v1/batches").await.json(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_tokens_only_this_machine_gets_in_and_only_by_its_own_name() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    for host in ["127.0.0.1", "localhost:1234", "[::1]:80", "LocalHost"] {
        caller.send("GET", "/v1/queues", &[("host", host)], b"").await.json(200);
    }
    for host in ["rebind.example", "rebind.example:9464", "127.0.0.1.rebind.example", "192.0.2.7", ""] {
        let refused = caller.send("GET", "/v1/queues", &[("host", host)], b"").await;
        refused.problem(403, "foreign_host");
    }
    for (name, value) in [
        ("x-forwarded-for", "192.0.2.7"),
        ("X-Forwarded-Host", "127.0.0.1"),
        ("forwarded", "for=192.0.2.7"),
        ("x-real-ip", "192.0.2.7"),
    ] {
        caller.send("GET", "/v1/queues", &[(name, value)], b"").await.problem(403, "forwarded");
    }
    for (path, status) in [("/livez", 200), ("/readyz", 403), ("/metrics", 403)] {
        for header in [("host", "rebind.example"), ("x-forwarded-for", "192.0.2.7")] {
            assert_eq!(caller.send("GET", path, &[header], b"").await.status, status, "{path}");
        }
    }

    let open = format!("[http]\nlisten = \"0.0.0.0:{}\"", services::free_port());
    let (_daemon, caller) = start(&db, &open).await;
    let problem = caller.get("/v1/queues").await.problem(403, "tokens_required");
    assert!(problem["detail"].as_str().unwrap().contains("http.write_tokens_file"), "{problem}");
    caller.post("/v1/batches?command=noop", &[NDJSON], "1").await.problem(403, "tokens_required");
    assert_eq!(caller.get("/readyz").await.status, 200);
    for path in ["/readyz", "/metrics"] {
        assert_eq!(caller.send("GET", path, &[("host", "pod.example")], b"").await.status, 200, "{path}");
    }
    caller.get("/v1/openapi.json").await.json(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_sites_are_turned_away() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, "").await;
    let port = daemon.config().http_port();
    let own = format!("http://127.0.0.1:{port}");
    caller
        .send("GET", "/v1/queues", &[("origin", &own), ("sec-fetch-site", "same-origin")], b"")
        .await
        .json(200);
    for header in [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ] {
        caller.send("GET", "/v1/queues", &[header], b"").await.problem(403, "cross_site");
        caller.post("/v1/queues/default/pause", &[header], "").await.problem(403, "cross_site");
    }
    for simple in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let header = ("content-type", simple);
        caller
            .post("/v1/queues/default/pause", &[header], "a=1")
            .await
            .problem(415, "unsupported_media_type");
        caller
            .post("/v1/tasks", &[header], r#"{"command":"noop"}"#)
            .await
            .problem(415, "unsupported_media_type");
    }
    let preflight = [("origin", "https://evil.example"), ("access-control-request-method", "POST")];
    let answer = caller.send("OPTIONS", "/v1/batches", &preflight, b"").await;
    assert_eq!(answer.status, 403);
    assert!(!answer.headers.keys().any(|name| name.starts_with("access-control")), "{answer:?}");
    assert_eq!(caller.get("/v1/queues/default").await.json(200)["paused"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_too_often_is_told_when_to_come_back() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 1").await;
    // Two at once are a burst; on a slow machine a few more get their turn.
    let answer = eventually(PATIENCE, "it is enough", async || {
        let answer = caller.get("/v1/openapi.json").await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    answer.problem(429, "rate_limited");
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(caller.get("/readyz").await.status, 200, "health is never limited");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_who_ask_too_often_keep_out_no_caller_with_a_token() {
    let db = TestDb::new().await;
    let dir = run::new_dir("tokens");
    let (_daemon, stranger) = start(&db, &format!("[http]\nrate_limit = 1\n{}", tokens(&dir))).await;
    let guesser = stranger.with_token("canary-wrong-0123456789abcdef");
    for client in [&stranger, &guesser] {
        eventually(PATIENCE, "it is enough", async || {
            (client.get("/v1/queues").await.status == 429).then_some(())
        })
        .await;
    }
    // All from one address, as behind a proxy.
    stranger.with_token(READ).get("/v1/queues").await.json(200);
    stranger.with_token(WRITE).get("/v1/queues").await.json(200);
    eventually(PATIENCE, "a token has its own limit", async || {
        (stranger.with_token(READ).get("/v1/queues").await.status == 429).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_and_payloads_appear_nowhere() {
    let db = TestDb::new().await;
    let dir = run::new_dir("tokens");
    let toml = format!("[log]\nlevel = \"trace\"\n[http]\n{}", tokens(&dir));
    let daemon = Daemon::builder(&db, &toml).log("trace").start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    let mut said = Vec::new();
    for token in [READ, WRITE, "canary-wrong-0123456789abcdef"] {
        let caller = caller.with_token(token);
        for (path, body) in [
            ("/v1/batches?command=noop&context=%22canary-context", "{\"canary-row\": nope}"),
            ("/v1/batches?command=noop", "{\"canary-row\": nope}"),
            ("/v1/batches?command=noop", "\"canary-row\\u0000\""),
            ("/v1/batches?command=canary%20value", "1"),
        ] {
            said.push(caller.post(path, &[NDJSON], body).await.body);
        }
        said.push(
            caller
                .post("/v1/tasks", &[JSON], "{\"command\": \"canary value\", \"payload\": nope}")
                .await
                .body,
        );
        said.push(
            caller.post("/v1/tasks", &[JSON], "{\"command\": 7, \"payload\": \"canary-payload\"}").await.body,
        );
        said.push(
            caller
                .post(
                    "/v1/tasks",
                    &[JSON],
                    "{\"command\": \"noop\", \"payload\": \"canary-payload\", \"priority\": 1e99}",
                )
                .await
                .body,
        );
        said.push(caller.post("/v1/tasks", &[JSON, ("idempotency-key", "canary-é")], "{}").await.body);
        said.push(caller.get("/v1/workers").await.body);
    }
    assert_eq!(said.iter().filter(|answer| answer.contains("\"status\":400")).count(), 6, "{said:?}");
    said.push(caller.get("/metrics").await.body);
    said.push(caller.get("/readyz").await.body);
    for args in [&["config", "show"][..], &["config", "show", "--json"], &["doctor"]] {
        said.push(String::from_utf8(daemon.config().musterd(args).await.stdout).unwrap());
    }
    said.extend(daemon.log());
    for text in &said {
        assert!(!text.contains("canary"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_is_logged_and_an_event_with_the_name_of_its_token() {
    let db = TestDb::new().await;
    let dir = run::new_dir("tokens");
    std::fs::write(dir.join("read"), format!("reader:{READ}")).unwrap();
    std::fs::write(dir.join("write"), format!("alice:{WRITE}\nbob:{LATER}\n")).unwrap();
    let (read, write) = (dir.join("read").display().to_string(), dir.join("write").display().to_string());
    let toml = format!("[http]\nread_tokens_file = {read:?}\nwrite_tokens_file = {write:?}\n");
    let daemon = Daemon::builder(&db, &toml).log("info").start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    let (alice, bob, reader) = (caller.with_token(WRITE), caller.with_token(LATER), caller.with_token(READ));
    let batch =
        alice.post("/v1/batches?command=nobody&hold=true", &[NDJSON], "1").await.json(201)["id"].clone();
    let task = bob.post("/v1/tasks", &[JSON], r#"{"command": "nobody"}"#).await.json(201)["id"].clone();
    alice.post(&format!("/v1/batches/{batch}/release"), &[], "").await.json(200);
    bob.post(&format!("/v1/tasks/{task}/abort"), &[], "").await.json(200);
    bob.post("/v1/queues/other/pause", &[], "").await.json(200);
    reader.post("/v1/queues/other/resume", &[], "").await.problem(403, "insufficient_scope");

    let listed = reader.get("/v1/events?limit=2").await.json(200);
    assert_eq!(listed["events"][0]["kind"], "pause");
    assert_eq!(listed["events"][0]["detail"]["queue"], "other");
    let next = listed["next_before"].as_i64().unwrap();
    let rest = reader.get(&format!("/v1/events?before={next}")).await.json(200);
    let told: Vec<String> = [&listed, &rest]
        .iter()
        .flat_map(|page| page["events"].as_array().unwrap())
        .map(|event| {
            format!("{} {} {} {}", event["kind"], event["client"], event["batch"], event["task"])
                .replace('"', "")
        })
        .collect();
    assert_eq!(
        told,
        [
            "pause bob null null".to_owned(),
            format!("abort bob null {task}"),
            format!("release alice {batch} null"),
        ]
    );
    for (query, count) in
        [(format!("batch={batch}"), 1), (format!("task={task}"), 1), ("kind=pause".into(), 1)]
    {
        let found = reader.get(&format!("/v1/events?{query}")).await.json(200);
        assert_eq!(found["events"].as_array().unwrap().len(), count, "{query}");
    }
    reader.get("/v1/events?kind=nothing").await.problem(400, "invalid_request");

    let log = daemon.log();
    let changes: Vec<&String> =
        log.iter().filter(|line| line.contains("a client of the API asked for a change")).collect();
    assert_eq!(changes.len(), 6, "{changes:?}");
    for (line, words) in changes.iter().zip([
        ["alice", "/v1/batches", &batch.to_string(), "201"],
        ["bob", "/v1/tasks", &task.to_string(), "201"],
        ["alice", "/v1/batches/{id}/release", &batch.to_string(), "200"],
        ["bob", "/v1/tasks/{id}/abort", &task.to_string(), "200"],
        ["bob", "/v1/queues/{name}/pause", "other", "200"],
        ["reader", "/v1/queues/{name}/resume", "other", "403"],
    ]) {
        assert!(
            words.iter().all(|word| line.contains(word)) && line.contains("127.0.0.1"),
            "{line} {words:?}"
        );
        assert!(!line.contains("canary"), "{line}");
    }
}
