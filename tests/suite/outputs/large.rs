//! A million rows, a gigabyte of outputs, both stores: how much memory the worker takes. Minutes, so not among the tests of CI.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::ground::{file_store, outputs, s3_store, state};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;

const ROWS: usize = 1_000_000;
/// One row's text, as JSON and with the end of its line in the file.
const ROW_BYTES: usize = 1_024;
const MOST_MEMORY: u64 = 200;
const LIMIT: Duration = Duration::from_secs(40 * 60);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes and several gigabytes of disk: make test-outputs"]
async fn a_million_rows_with_a_gigabyte_of_outputs_take_little_memory() {
    for (store, toml) in [("file", file_store().0), ("s3", s3_store().0)] {
        let db = TestDb::new().await;
        let toml = format!("{toml}[handlers.noop]\noutput = \"out.txt\"\n");
        let daemon = Daemon::builder(&db, &toml).log("info").start();
        daemon.wait_ready().await;
        let began = Instant::now();
        let id = submit(&daemon).await;
        let submitted = began.elapsed();
        let client = db.client().await;
        eventually(LIMIT, "the batch has ended", async || {
            assert!(!daemon.has_ended(), "the worker ended");
            let state = state(&client, id).await;
            (state == "succeeded").then_some(())
        })
        .await;
        let files = outputs(&client, id).await;
        let text = files.to_string();
        assert!(text.contains(&format!(":{}", ROWS * ROW_BYTES)), "{text}");
        let (_, most) = daemon.memory();
        println!(
            "{store}: {ROWS} rows, {} MiB of outputs, submitted in {submitted:.0?}, ended after {:.0?}, at most {most} MiB of memory",
            (ROWS * ROW_BYTES) >> 20,
            began.elapsed()
        );
        assert!(most < MOST_MEMORY, "{store}: {most} MiB");
    }
}

/// By the command, from a pipe: nobody holds a gigabyte.
async fn submit(daemon: &Daemon) -> i64 {
    let mut command =
        daemon.config().command(&["submit", "-", "--command", "noop", "--format", "ndjson", "--json"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = std::io::BufWriter::new(child.stdin.take().unwrap());
    let output = tokio::task::spawn_blocking(move || {
        // Two quotes and the end of the line beside it.
        let row = format!("\"{}\"\n", "x".repeat(ROW_BYTES - 3));
        for _ in 0..ROWS {
            input.write_all(row.as_bytes()).unwrap();
        }
        drop(input);
        child.wait_with_output().unwrap()
    });
    let output = output.await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    said["id"].as_i64().unwrap()
}
