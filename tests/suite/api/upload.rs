//! Uploads: any size in the same memory, all rows or none, whatever becomes of the client.

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::caller::{Caller, NDJSON, PATIENCE, chunk, finish};
use super::start;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::ask;

const SUBMIT: &str = "/v1/batches?command=noop&hold=true";

/// Rows of about 200 bytes.
fn rows(first: usize, count: usize) -> String {
    wide_rows(first, count, 200)
}

fn wide_rows(first: usize, count: usize, bytes: usize) -> String {
    let filler = "x".repeat(bytes);
    (first..first + count).map(|n| format!("{{\"n\":{n},\"filler\":\"{filler}\"}}\n")).collect()
}

/// Sends so many rows of so many bytes, in pieces.
async fn upload(caller: &Caller, count: usize, bytes: usize) -> serde_json::Value {
    const PIECE: usize = 1000;
    let mut stream = caller.begin("POST", SUBMIT, &[NDJSON], None).await;
    for first in (0..count).step_by(PIECE) {
        chunk(&mut stream, wide_rows(first, PIECE.min(count - first), bytes).as_bytes()).await;
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    finish(stream).await.json(201)
}

/// Uploads few rows and then many; what the daemon took for the many beyond the few, in MiB.
async fn growth(daemon: &Daemon, caller: &Caller, few: usize, many: usize, bytes: usize) -> u64 {
    upload(caller, few, bytes).await;
    let (_, before) = daemon.memory();
    let submitted = upload(caller, many, bytes).await;
    assert_eq!(submitted["rows"], many);
    let (_, after) = daemon.memory();
    println!("peak memory: {before} MiB after {few} rows, {after} MiB after {many} rows");
    after - before
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_of_any_size_takes_the_same_memory() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, "").await;
    // Fifty megabytes; whoever gathers them first needs more than that.
    let grown = growth(&daemon, &caller, 2_000, 50_000, 1_000).await;
    assert!(grown < 24, "{grown} MiB");
    assert_eq!(ask::<i64>(&db.client().await, "SELECT count(*) FROM musterd.rows").await, 52_000);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a million rows take a while: cargo test --all-features --test suite -- --ignored --nocapture a_million_rows"]
async fn a_million_rows_take_no_more_memory_than_ten_thousand() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").log("info").start();
    daemon.wait_ready().await;
    Caller::of(&daemon).warm_up().await;
    let grown = growth(&daemon, &Caller::of(&daemon), 10_000, 1_000_000, 200).await;
    assert!(grown < 24, "{grown} MiB");
}

/// No batch, no rows, and no transaction of the API left open.
pub(super) async fn nothing_is_left(db: &TestDb) {
    let client = db.client().await;
    let open = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'musterd api' AND xact_start IS NOT NULL";
    eventually(PATIENCE, "the transaction is rolled back", async || {
        (ask::<i64>(&client, open).await == 0).then_some(())
    })
    .await;
    for table in ["musterd.batches", "musterd.tasks", "musterd.rows"] {
        assert_eq!(ask::<i64>(&client, &format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
}

/// Waits until rows of the upload have reached the database's transaction.
pub(super) async fn under_way(db: &TestDb) {
    let client = db.client().await;
    let copying = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'musterd api' AND query LIKE 'COPY%' AND state = 'active'";
    eventually(PATIENCE, "the rows are being copied", async || {
        (ask::<i64>(&client, copying).await == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_leaves_nothing_behind() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "[http]\nrate_limit = 0\nmax_uploads = 2").await;
    let key = ("idempotency-key", "once");
    // More often than there are slots: each is given back.
    for length in [None, Some(50_000_000), None, Some(50_000_000)] {
        let mut stream = caller.begin("POST", SUBMIT, &[NDJSON, key], length).await;
        for first in (0..5_000).step_by(1000) {
            let rows = rows(first, 1000);
            match length {
                None => chunk(&mut stream, rows.as_bytes()).await,
                Some(_) => stream.write_all(rows.as_bytes()).await.unwrap(),
            }
        }
        under_way(&db).await;
        hang_up(stream);
        nothing_is_left(&db).await;
    }
    // The slot is free and the key is, too.
    let submitted = eventually(PATIENCE, "there is room again", async || {
        let answer = caller.post(SUBMIT, &[NDJSON, key], "1\n").await;
        (answer.status != 503).then_some(answer)
    })
    .await;
    assert_eq!(submitted.json(201)["rows"], 1);
}

/// Closes at once, as a process that is killed does.
pub(super) fn hang_up(stream: TcpStream) {
    drop(stream);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_last_row_refuses_all_of_them_and_the_client_hears_why() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let body = format!("{}{{\"n\": oops}}\n{}", rows(0, 20_000), rows(0, 20_000));
    let problem = caller.post(SUBMIT, &[NDJSON], &body).await.problem(422, "invalid_rows");
    assert!(problem["detail"].as_str().unwrap().contains("line 20001"), "{problem}");
    nothing_is_left(&db).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_breaks_off_adds_nothing() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    let id = caller.post(SUBMIT, &[NDJSON], "1\n2\n").await.json(201)["id"].clone();
    let path = format!("/v1/batches/{id}/append");
    let mut stream = caller.begin("POST", &path, &[NDJSON], None).await;
    chunk(&mut stream, rows(0, 3000).as_bytes()).await;
    under_way(&db).await;
    hang_up(stream);
    let appended = caller.post(&path, &[NDJSON], "3\n").await.json(200);
    assert_eq!(appended["rows"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_body_is_an_empty_batch_whatever_its_type() {
    let db = TestDb::new().await;
    let (_daemon, caller) = start(&db, "").await;
    for media_type in ["application/x-ndjson", "application/json", "text/csv", "text/tab-separated-values"] {
        let answer = caller.post(SUBMIT, &[("content-type", media_type)], "").await;
        assert_eq!(answer.json(201)["rows"], 0, "{media_type}");
    }
}
