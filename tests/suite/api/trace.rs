//! The trace context of a submitter reaches the handler, whichever door it came by.

use serde_json::Value;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::caller::{Caller, JSON, NDJSON, PATIENCE};
use super::{ended, start};
use crate::suite::handlers::server::{Act, Server};
use crate::suite::support::config::{finish, json};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A handler that answers with the trace it was given.
const TELLING: &str = r#"
[handlers.tell]
kind = "exec"
argv = ["sh", "-c", '''
while IFS= read -r request; do
    trace=$(printf '%s' "$request" | sed -n 's/.*"traceparent":"\([^"]*\)".*/\1/p')
    line=$(printf '%s' "$request" | sed -n 's/.*"row":{"line":\([0-9]*\),.*/"line":\1,/p')
    printf '{%s"outcome":"succeeded","result":"%s"}\n' "$line" "$trace"
done''']
"#;

async fn told_to_row(caller: &Caller, id: &Value) -> Value {
    assert_eq!(ended(caller, id).await["state"], "succeeded");
    caller.get(&format!("/v1/batches/{id}/rows")).await.json(200)["rows"][0]["result"].clone()
}

async fn told_to_task(caller: &Caller, id: &Value) -> Value {
    eventually(PATIENCE, "the task ends", async || {
        let task = caller.get(&format!("/v1/tasks/{id}")).await.json(200);
        (task["state"] == "succeeded").then(|| task["result"].clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_context_is_handed_on_and_anything_else_is_ignored() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, TELLING).await;
    for (given, expected) in [(vec![TRACE], TRACE), (vec!["nonsense"], ""), (vec![TRACE, TRACE], "")] {
        let mut headers: Vec<(&str, &str)> = given.iter().map(|trace| ("traceparent", *trace)).collect();
        headers.push(NDJSON);
        let id = caller.post("/v1/batches?command=tell", &headers, "1").await.json(201)["id"].clone();
        assert_eq!(told_to_row(&caller, &id).await, expected, "{given:?}");
        headers.pop();
        headers.push(JSON);
        let id = caller.post("/v1/tasks", &headers, r#"{"command":"tell"}"#).await.json(201)["id"].clone();
        assert_eq!(told_to_task(&caller, &id).await, expected, "{given:?}");
    }

    let rows = daemon.config().dir().join("rows.ndjson");
    std::fs::write(&rows, "1\n").unwrap();
    let submit = ["submit", rows.to_str().unwrap(), "--command", "tell", "--json"];
    let enqueue = ["enqueue", "tell", "--json"];
    for (args, option, environment, expected) in [
        (&submit[..], Some(TRACE), None, TRACE),
        (&submit, None, Some(TRACE), TRACE),
        (&submit, None, Some("nonsense"), ""),
        (&enqueue, Some(TRACE), Some("nonsense"), TRACE),
        (&enqueue, None, Some(TRACE), TRACE),
    ] {
        let mut command = daemon.config().command(args);
        command.args(option.iter().flat_map(|trace| ["--traceparent", trace]));
        command.envs(environment.map(|trace| ("TRACEPARENT", trace)));
        let id = json(&finish(command).await)["id"].clone();
        let told = match args[0] {
            "submit" => told_to_row(&caller, &id).await,
            _ => told_to_task(&caller, &id).await,
        };
        assert_eq!(told, expected, "{args:?}");
    }
}

/// A collector that keeps every byte it is sent, and is content.
async fn collector() -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let kept = Arc::<Mutex<Vec<u8>>>::default();
    let keep = Arc::clone(&kept);
    #[expect(clippy::disallowed_methods, reason = "it ends with the test's runtime")]
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !is_whole(&request) && stream.read_buf(&mut request).await.is_ok_and(|read| read > 0) {}
            keep.lock().unwrap().extend(request);
            let _ =
                stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        }
    });
    (format!("http://{address}"), kept)
}

fn is_whole(request: &[u8]) -> bool {
    let Some(head) = request.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
    let lines = String::from_utf8_lossy(&request[..head]).to_lowercase();
    let length = lines.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    request.len() >= head + 4 + length.unwrap_or(0_usize)
}

fn has(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|some| some == wanted)
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_of_the_walk_reach_a_collector_in_the_trace_of_the_submitter() {
    let db = TestDb::new().await;
    let (endpoint, kept) = collector().await;
    let daemon = Daemon::builder(&db, "")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)
        .env("OTEL_BSP_SCHEDULE_DELAY", "100")
        .start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    let headers = [NDJSON, ("traceparent", TRACE)];
    let id = caller.post("/v1/batches?command=noop", &headers, "\"canary\"").await.json(201)["id"].clone();
    ended(&caller, &id).await;
    let task = caller.post("/v1/tasks", &[JSON], r#"{"command":"noop"}"#).await.json(201);
    caller.get(&format!("/v1/tasks/{}", task["id"])).await.json(200);
    let trace: Vec<u8> = hex::decode("4bf92f3577b34da6a3ce929d0e0e4736").unwrap();
    let sent = eventually(PATIENCE, "the spans arrive", async || {
        let sent = kept.lock().unwrap().clone();
        let names = [&b"submit"[..], b"claim", b"block", b"flush", b"task"];
        names.iter().all(|name| has(&sent, name)).then_some(sent)
    })
    .await;
    assert!(has(&sent, b"POST /v1/traces") && has(&sent, b"musterd"), "{}", String::from_utf8_lossy(&sent));
    let in_trace = sent.windows(16).filter(|bytes| *bytes == trace).count();
    assert!(in_trace >= 2, "the submit and the block are of the submitter's trace: {in_trace}");
    assert!(!has(&sent, b"canary"), "no payload");
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait_exit(PATIENCE).await.code(), Some(0));
}

/// What a handler is called with when spans are sent to `endpoint`: for a row, a task, and a row whose submitter has no trace.
async fn given_to_handler(db: &TestDb, endpoint: &str, sampler: &str) -> [Option<String>; 3] {
    let server = Server::start(|request| async move {
        match request.body["kind"].as_str() {
            Some("rows") => request.all("succeeded"),
            _ => Act::Reply(200, r#"{"outcome":"succeeded"}"#.into()),
        }
    })
    .await;
    let daemon = Daemon::builder(db, &server.config(""))
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_BSP_SCHEDULE_DELAY", "100")
        .env("OTEL_TRACES_SAMPLER", sampler)
        .start();
    daemon.wait_ready().await;
    let (caller, trace) = (Caller::of(&daemon), ("traceparent", TRACE));
    caller.warm_up().await;
    for headers in [&[NDJSON, trace][..], &[NDJSON]] {
        let id = caller.post("/v1/batches?command=work", headers, "1").await.json(201)["id"].clone();
        assert_eq!(ended(&caller, &id).await["state"], "succeeded");
    }
    let id = caller.post("/v1/tasks", &[JSON, trace], r#"{"command":"work"}"#).await.json(201)["id"].clone();
    told_to_task(&caller, &id).await;
    // What is left of the spans is sent at its end.
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait_exit(PATIENCE).await.code(), Some(0));
    let [row, alone, task] = &server.seen()[..] else { panic!("{:?}", server.seen()) };
    [row, task, alone].map(|request| {
        let (header, body) = (request.headers.get("traceparent"), request.body["traceparent"].as_str());
        assert_eq!(header.map(String::as_str), body);
        header.cloned()
    })
}

/// A span as OTLP writes it, up to its name.
fn on_the_wire(traceparent: &str, parent: Option<&str>, name: &str) -> Vec<u8> {
    let parts: Vec<&str> = traceparent.split('-').collect();
    assert!(parts[0] == "00" && parts[3] == "01", "{traceparent}");
    let parent = parent.map(|parent| format!("2208{parent}")).unwrap_or_default();
    let fields = format!("0a10{}1208{}{parent}2a{:02x}", parts[1], parts[2], name.len());
    [hex::decode(fields).unwrap(), name.as_bytes().to_vec()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_called_as_a_child_of_the_span_that_calls_it() {
    let db = TestDb::new().await;
    let (endpoint, kept) = collector().await;
    let given = given_to_handler(&db, &endpoint, "parentbased_always_on").await;
    let [row, task, alone] = given.map(|given| given.expect("a handler is always told"));
    let (trace, submitter) = (&TRACE[3..35], &TRACE[36..52]);
    assert!(row[3..35] == *trace && task[3..35] == *trace && alone[3..35] != *trace, "{row} {task} {alone}");
    let spans = [
        on_the_wire(&row, Some(submitter), "block"),
        on_the_wire(&task, Some(submitter), "task"),
        on_the_wire(&alone, None, "block"),
    ];
    eventually(PATIENCE, "the spans of the calls arrive", async || {
        let sent = kept.lock().unwrap().clone();
        spans.iter().all(|span| has(&sent, span)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_that_is_not_sent_is_nobodys_parent() {
    let db = TestDb::new().await;
    let given = given_to_handler(&db, &collector().await.0, "always_off").await;
    assert_eq!(given, [Some(TRACE.to_owned()), Some(TRACE.to_owned()), None]);
}
