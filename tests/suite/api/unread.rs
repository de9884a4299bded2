//! Clients that ask and then do not read: they are cut off, hold nothing in the database, and keep no writer out.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};

use super::caller::{Caller, NDJSON, PATIENCE};
use super::follow::event;
use super::start;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::ask;

const SUBMIT: &str = "/v1/batches?command=noop&hold=true";

/// A batch whose export is larger than all buffers between the daemon and a client.
async fn large_batch(caller: &Caller) -> Value {
    let row = format!("\"{}\"\n", "x".repeat(10_000));
    caller.post(SUBMIT, &[NDJSON], &row.repeat(3_000)).await.json(201)["id"].clone()
}

/// Asks, over a connection that takes very little at a time.
async fn ask_narrowly(daemon: &Daemon, path: &str) -> TcpStream {
    ask_narrowly_as(daemon, path, "").await
}

/// The same with more lines in the head.
async fn ask_narrowly_as(daemon: &Daemon, path: &str, headers: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(1).unwrap();
    let port = daemon.config().http_port();
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// The status of an answer of which no more is read.
async fn status(stream: TcpStream) -> String {
    let mut line = String::new();
    within(PATIENCE, BufReader::new(stream).read_line(&mut line)).await.unwrap();
    line.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_do_not_read_hold_no_snapshot_and_no_writers_place() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, "[http]\nrate_limit = 0\nbody_timeout = \"1h\"").await;
    let path = format!("/v1/batches/{}/export?format=ndjson", large_batch(&caller).await);
    let mut readers = Vec::new();
    for _ in 0..4 {
        let reader = ask_narrowly(&daemon, &path).await;
        // Its export is under way.
        within(PATIENCE, reader.readable()).await.unwrap();
        readers.push(reader);
    }
    caller.get(&path).await.problem(503, "busy");
    caller.post(SUBMIT, &[NDJSON], "1\n2\n").await.json(201);
    let client = db.client().await;
    let held = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'musterd api'
        AND (xact_start IS NOT NULL OR backend_xmin IS NOT NULL OR wait_event = 'ClientWrite')";
    eventually(PATIENCE, "no session has a transaction or writes to us", async || {
        (ask::<i64>(&client, held).await == 0).then_some(())
    })
    .await;
    caller.get(&path).await.problem(503, "busy");
    drop(readers);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_with_one_token_take_no_place_of_another_token() {
    const SLOW: &str = "slow-canary-0123456789";
    const OTHER: &str = "other-canary-0123456789";
    const WRITER: &str = "writer-canary-0123456789";
    let (db, dir) = (TestDb::new().await, run::new_dir("slots"));
    let (read, write) = (dir.join("read"), dir.join("write"));
    std::fs::write(&read, format!("slow:{SLOW}\nother:{OTHER}\n")).unwrap();
    std::fs::write(&write, format!("writer:{WRITER}\n")).unwrap();
    let toml = format!(
        "[http]\nrate_limit = 0\nbody_timeout = \"1h\"\nmax_downloads = 4\nmax_followers = 4\nmax_uploads = 1\n\
         read_tokens_file = {:?}\nwrite_tokens_file = {:?}",
        read.display().to_string(),
        write.display().to_string()
    );
    let (daemon, caller) = start(&db, &toml).await;
    let (slow, other, writer) =
        (caller.with_token(SLOW), caller.with_token(OTHER), caller.with_token(WRITER));
    // The only token that may write has every place of the writers.
    let batch = large_batch(&writer).await;
    for (path, most) in [("export?format=ndjson", 2), ("events", 2)] {
        let path = format!("/v1/batches/{batch}/{path}");
        let mut readers = Vec::new();
        for _ in 0..most {
            let authorization = format!("authorization: Bearer {SLOW}\r\n");
            let reader = ask_narrowly_as(&daemon, &path, &authorization).await;
            // It is being answered.
            within(PATIENCE, reader.readable()).await.unwrap();
            readers.push(reader);
        }
        slow.get(&path).await.problem(503, "busy");
        let answer = status(other.begin("GET", &path, &[], Some(0)).await).await;
        assert_eq!(answer, "HTTP/1.1 200 OK", "{path}");
        drop(readers);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_takes_nothing_is_cut_off_and_its_place_is_free() {
    let db = TestDb::new().await;
    let toml = "[http]\nrate_limit = 0\nbody_timeout = \"1s\"\nmax_downloads = 1";
    let (daemon, caller) = start(&db, toml).await;
    let path = format!("/v1/batches/{}/export?format=ndjson", large_batch(&caller).await);
    let mut reader = ask_narrowly(&daemon, &path).await;
    within(PATIENCE, reader.readable()).await.unwrap();
    let whole = eventually(PATIENCE, "the place is free", async || {
        let answer = caller.get(&path).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(whole.body.lines().count(), 3_000);
    let mut taken = Vec::new();
    // Reset or closed: either way it does not look like a whole export.
    let _ = within(PATIENCE, reader.read_to_end(&mut taken)).await;
    assert!(!taken.ends_with(b"0\r\n\r\n") && taken.len() < 20_000_000, "{} bytes", taken.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_takes_a_little_for_ever_is_cut_off() {
    let db = TestDb::new().await;
    let toml = "[http]\nrate_limit = 0\ndownload_timeout = \"1s\"\nmax_downloads = 1";
    let (daemon, caller) = start(&db, toml).await;
    let path = format!("/v1/batches/{}/export?format=ndjson", large_batch(&caller).await);
    let mut reader = ask_narrowly(&daemon, &path).await;
    within(PATIENCE, reader.readable()).await.unwrap();
    // 30 MB would take it twenty minutes. What is in the system's buffers still comes when the daemon has cut it off.
    let reading = async {
        let (mut some, mut pause) = ([0; 512], tokio::time::interval(Duration::from_millis(20)));
        while reader.read(&mut some).await.is_ok_and(|bytes| bytes > 0) {
            pause.tick().await;
        }
        std::future::pending::<()>().await;
    };
    let free = eventually(PATIENCE, "the place is free", async || {
        let status = status(caller.begin("GET", &path, &[], Some(0)).await).await;
        (status == "HTTP/1.1 200 OK").then_some(())
    });
    tokio::select! {
        () = free => {}
        () = reading => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_does_not_read_is_cut_off() {
    let db = TestDb::new().await;
    let toml = "[http]\nrate_limit = 0\nbody_timeout = \"1s\"\nmax_followers = 1";
    let (daemon, caller) = start(&db, toml).await;
    let id = caller.post(SUBMIT, &[NDJSON], "1").await.json(201)["id"].clone();
    let path = format!("/v1/batches/{id}/events");
    let follower = ask_narrowly(&daemon, &path).await;
    within(PATIENCE, follower.readable()).await.unwrap();
    eventually(PATIENCE, "the place is free", async || {
        // Every change is an event for it.
        caller.post(&format!("/v1/batches/{id}/append"), &[NDJSON], "1").await.json(200);
        let status = status(caller.begin("GET", &path, &[], Some(0)).await).await;
        (status == "HTTP/1.1 200 OK").then_some(())
    })
    .await;
    drop(follower);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_follower_stays_for_ever() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0\ndownload_timeout = \"1s\"").await;
    let id = caller.post(SUBMIT, &[NDJSON], "1").await.json(201)["id"].clone();
    let follower = caller.begin("GET", &format!("/v1/batches/{id}/events"), &[], Some(0)).await;
    let mut follower = BufReader::new(follower);
    assert_eq!(event(&mut follower).await.0, "progress");
    let mut rest = String::new();
    within(PATIENCE, follower.read_to_string(&mut rest)).await.unwrap();
    assert!(rest.ends_with("0\r\n\r\n") && !rest.contains("event: end"), "{rest}");
}
