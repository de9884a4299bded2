//! Clients that take their time, by the hundred: none holds a connection for ever, and none keeps the others out.

use futures::FutureExt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::caller::{Caller, JSON, NDJSON, PATIENCE, chunk, finish};
use super::follow::event;
use super::start;
use super::upload::under_way;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually, within};

/// This process has a socket for each, beside those of the tests that run with it.
fn make_room_for_sockets() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
}

async fn connect(daemon: &Daemon, said: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", daemon.config().http_port())).await.unwrap();
    stream.write_all(said.as_bytes()).await.unwrap();
    stream
}

/// Sockets the daemon has open.
fn sockets(daemon: &Daemon) -> usize {
    let files = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

/// The health is told, and the API answers.
async fn everybody_is_answered(caller: &Caller) {
    for path in ["/livez", "/readyz", "/metrics", "/v1/openapi.json"] {
        assert_eq!(caller.get(path).await.status, 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_connections_that_never_ask_keep_nobody_out_and_cut_nobody_off() {
    make_room_for_sockets();
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, "").await;
    let held =
        caller.post("/v1/batches?command=noop&hold=true", &[NDJSON], "1").await.json(201)["id"].clone();
    let follow = caller.begin("GET", &format!("/v1/batches/{held}/events"), &[], Some(0)).await;
    let mut follow = BufReader::new(follow);
    assert_eq!(event(&mut follow).await.0, "progress");
    let mut upload = caller.begin("POST", "/v1/batches?command=noop&hold=true", &[NDJSON], None).await;
    chunk(&mut upload, "1\n".repeat(100_000).as_bytes()).await;
    under_way(&db).await;

    let before = sockets(&daemon);
    let mut waiting = Vec::new();
    for said in ["", "GET /livez HTTP/1.1\r\nhost: here\r\nx-slow: "] {
        for _ in 0..250 {
            waiting.push(connect(&daemon, said).await);
        }
        everybody_is_answered(&caller).await;
    }
    eventually(SOON, "those who waited longest are gone", async || {
        (sockets(&daemon) < before + 300).then_some(())
    })
    .await;

    caller.post(&format!("/v1/batches/{held}/release"), &[], "").await.json(200);
    while event(&mut follow).await.0 != "end" {}
    upload.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(finish(upload).await.json(201)["rows"], 100_000);
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_ask_is_hung_up_on() {
    let db = TestDb::new().await;
    let (daemon, _) = start(&db, "").await;
    let whole = "GET /livez HTTP/1.1\r\nhost: here\r\n\r\n";
    for (said, heard) in [("", ""), (&whole[..30], ""), (whole, "HTTP/1.1 200 OK\r\n")] {
        let mut stream = connect(&daemon, said).await;
        let mut answer = Vec::new();
        // Cut off or ended in good order, it ends.
        let _ = within(SOON, stream.read_to_end(&mut answer)).await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with(heard) && answer.is_empty() == heard.is_empty(), "{said:?}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_do_not_come_to_their_end_are_counted_and_health_is_not_among_them() {
    const AT_A_TIME: usize = 256 + 4;
    make_room_for_sockets();
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0\nbody_timeout = \"1h\"").await;
    let mut asking = Vec::new();
    for _ in 0..AT_A_TIME + 10 {
        asking.push(caller.begin("POST", "/v1/tasks", &[JSON], Some(18)).await);
    }
    let is_told = |stream: &TcpStream| stream.peek(&mut [0]).now_or_never().is_some();
    eventually(PATIENCE, "those who are too many are told", async || {
        (asking.iter().filter(|stream| is_told(stream)).count() == 10).then_some(())
    })
    .await;
    for path in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(caller.get(path).await.status, 200, "{path}");
    }
    let (told, mut open): (Vec<TcpStream>, Vec<TcpStream>) = asking.into_iter().partition(is_told);
    for stream in told {
        finish(stream).await.problem(503, "busy");
    }
    let mut one = open.pop().unwrap();
    one.write_all(b"{\"command\":\"noop\"}").await.unwrap();
    finish(one).await.json(201);
    eventually(PATIENCE, "there is room for one", async || {
        (caller.get("/v1/openapi.json").await.status == 200).then_some(())
    })
    .await;
}
