//! Following a batch by server-sent events.

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;

use super::caller::{NDJSON, PATIENCE};
use super::start;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{eventually, within};

/// The next event: its name and its data.
pub(super) async fn event(stream: &mut BufReader<TcpStream>) -> (String, Value) {
    let mut name = String::new();
    loop {
        let mut line = String::new();
        let read = within(PATIENCE, stream.read_line(&mut line)).await.unwrap();
        assert!(read > 0, "the stream ended");
        if let Some(word) = line.strip_prefix("event: ") {
            name = word.trim().to_owned();
        } else if let Some(data) = line.strip_prefix("data: ") {
            return (name, serde_json::from_str(data).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_told_as_it_happens_until_the_batch_has_ended() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nmax_followers = 1").await;
    let id =
        caller.post("/v1/batches?command=noop&hold=true", &[NDJSON], "1\n2\n3").await.json(201)["id"].clone();
    let path = format!("/v1/batches/{id}/events");
    let mut stream = BufReader::new(caller.begin("GET", &path, &[], Some(0)).await);
    let (name, progress) = event(&mut stream).await;
    assert_eq!((&*name, &progress["state"], &progress["queued"]), ("progress", &"held".into(), &3.into()));
    let busy = caller.get(&path).await;
    busy.problem(503, "busy");

    caller.post(&format!("/v1/batches/{id}/release"), &[], "").await.json(200);
    let mut last = event(&mut stream).await;
    while last.0 != "end" {
        assert_eq!(last.0, "progress");
        last = event(&mut stream).await;
    }
    assert_eq!((&last.1["state"], &last.1["succeeded"]), (&"succeeded".into(), &3.into()));
    let mut rest = String::new();
    while within(PATIENCE, stream.read_line(&mut rest)).await.unwrap() > 0 {}
    assert!(!rest.contains("event:"), "nothing comes after the end: {rest}");

    // Whoever comes later gets the end at once, and a place that was given up is free again.
    let answer = eventually(PATIENCE, "the place is free", async || {
        let answer = caller.get(&path).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    assert!(answer.body.starts_with("event: end\n"), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_does_not_hold_up_the_end_of_the_daemon() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, "").await;
    let id = caller.post("/v1/batches?command=noop&hold=true", &[NDJSON], "1").await.json(201)["id"].clone();
    let mut stream =
        BufReader::new(caller.begin("GET", &format!("/v1/batches/{id}/events"), &[], Some(0)).await);
    event(&mut stream).await;
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait_exit(PATIENCE).await.code(), Some(0));
}
