//! Each way a store can be wrong gives its own error, which says what to do and keeps the secret.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use musterd::objects::{Config, ObjectError, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::key;
use super::server::{self, Holder, S3Server, SECRET, names};
use super::source::{MIB, Source, Then};
use crate::suite::support::wait::SOON;

/// The error of a write under `config`, after a look at how it speaks.
async fn refusal(config: &Config, advice: &str) -> ObjectError {
    let store = server::open(config);
    let error = store.put(&key("out.txt"), Bytes::from_static(b"x")).await.unwrap_err();
    let said = format!("{error} {error:?} {store:?}");
    assert!(error.to_string().contains(advice), "{error} does not name {advice}");
    assert!(!said.contains(SECRET), "the secret is in {said}");
    error
}

#[tokio::test]
async fn a_wrong_secret_or_key_is_told() {
    let server = S3Server::start().await;
    let mut config = server.config();
    config.s3.secret_key = format!("{SECRET}-mistyped").into();
    let error = refusal(&config, "outputs.s3.secret_key").await;
    assert!(matches!(&error, ObjectError::Credentials { code, .. } if code == "SignatureDoesNotMatch"));
    assert!(!error.is_transient());

    config.s3.access_key = "nobody".into();
    let error = refusal(&config, "outputs.s3.access_key").await;
    assert!(matches!(error, ObjectError::Credentials { .. } | ObjectError::Forbidden { .. }), "{error:?}");
}

#[tokio::test]
async fn a_missing_bucket_is_told_and_serves_once_it_is_made() {
    let server = S3Server::start().await;
    let mut config = server.config();
    config.s3.bucket = "not-yet".into();
    let error = refusal(&config, "outputs.s3.bucket").await;
    assert!(matches!(&error, ObjectError::NoSuchBucket { bucket, .. } if bucket == "not-yet"), "{error:?}");
    assert!(!error.is_transient());
    std::fs::create_dir(server.root.path().join("not-yet")).unwrap();
    server::open(&config).probe().await.unwrap();
}

#[tokio::test]
async fn an_endpoint_that_refuses_is_told() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = refusal(&server::config(&endpoint), &endpoint).await;
    assert!(matches!(error, ObjectError::Unreachable { .. }), "{error:?}");
    assert!(error.is_transient());
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_in_time() {
    let server = S3Server::start().await;
    let holder = Holder::before(&server).await;
    let mut config = server::config(&holder.endpoint);
    config.s3.timeout = Duration::from_secs(1);
    let error = timeout(SOON, refusal(&config, "outputs.s3.timeout")).await.unwrap();
    assert!(matches!(error, ObjectError::Timeout { .. }), "{error:?}");
    assert!(error.is_transient());
}

/// Answers every request with this status and a body of so many bytes, as far as it is taken; how much was.
async fn lavish(status: u16, bytes: u64) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let taken = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&taken);
    #[expect(clippy::disallowed_methods, reason = "ends with the runtime of its test")]
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let counter = Arc::clone(&counter);
            connections.spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { return };
                    head.push(byte);
                }
                let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {bytes}\r\n\r\n");
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                let piece = vec![b'x'; 1 << 16];
                for _ in 0..bytes / piece.len() as u64 {
                    if stream.write_all(&piece).await.is_err() {
                        return;
                    }
                    counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
                }
            });
        }
    });
    (endpoint, taken)
}

#[tokio::test]
async fn an_answer_without_measure_is_not_read_to_its_end() {
    let (endpoint, taken) = lavish(200, 256 * MIB).await;
    let store = server::open(&server::config(&endpoint));
    let error = timeout(SOON, store.read(&key("manifest.json"))).await.unwrap().unwrap_err();
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("more than 67108864 bytes"), "{error:?}");
    let taken = taken.load(Ordering::SeqCst);
    assert!(taken < 128 * MIB, "{taken} bytes were taken");
}

#[tokio::test]
async fn a_refusal_without_measure_is_not_read_to_its_end() {
    let (endpoint, taken) = lavish(403, 64 * MIB).await;
    let store = server::open(&server::config(&endpoint));
    let error = timeout(SOON, store.delete(&key("out.txt"))).await.unwrap().unwrap_err();
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("more than 65536 bytes"), "{error:?}");
    let taken = taken.load(Ordering::SeqCst);
    assert!(taken < 32 * MIB, "{taken} bytes were taken");
}

#[tokio::test]
async fn a_private_authority_is_trusted_only_when_named() {
    let server = S3Server::start_tls().await;
    let mut config = server.config();
    let error = refusal(&config, "outputs.s3.ca_file").await;
    assert!(matches!(error, ObjectError::Untrusted { .. }), "{error:?}");
    assert!(!error.is_transient());

    config.s3.ca_file = server.ca_file.clone();
    server::open(&config).probe().await.unwrap();
}

#[tokio::test]
async fn an_authority_file_that_is_none_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = server::config("https://127.0.0.1:1");
    config.s3.ca_file = dir.path().join("ca.pem");
    for content in [None, Some(""), Some("not a certificate")] {
        if let Some(content) = content {
            std::fs::write(&config.s3.ca_file, content).unwrap();
        }
        let error = Store::open_with(&config, |_| None).unwrap_err();
        assert!(matches!(error, ObjectError::Config { key: "outputs.s3.ca_file", .. }), "{error:?}");
    }
}

/// Nobody makes a directory in /sys, root included, which permissions alone would not stop.
#[tokio::test]
async fn a_directory_that_may_not_be_written_is_told() {
    let config = Config { dir: "/sys/musterd-outputs".into(), ..Config::default() };
    let error = refusal(&config, "outputs.dir").await;
    assert!(matches!(error, ObjectError::Denied { .. }), "{error:?}");
    assert!(!error.is_transient());
}

const SMALL_DISK: &str = "MUSTERD_TEST_SMALL_DISK";

/// In a process of its own, on a disk of 4 MiB that only it can see (or, where mounting is not allowed, under a
/// limit on the size of files).
#[test]
fn a_full_disk_is_told_and_serves_once_there_is_room() {
    let (dir, exe) = (tempfile::tempdir().unwrap(), std::env::current_exe().unwrap());
    let mounted = "mount -t tmpfs -o size=4m tmpfs \"$1\" && exec \"$0\" --exact \"$2\" --ignored";
    let limited = "trap '' XFSZ; ulimit -f 8192; exec \"$0\" --exact \"$2\" --ignored";
    let may_mount = |args: &[&str]| {
        let mut probe = Command::new("unshare");
        probe.args(args).args(["mount", "-t", "tmpfs", "tmpfs"]).arg(dir.path());
        probe.output().is_ok_and(|done| done.status.success())
    };
    let mut command = if may_mount(&["--mount"]) {
        unshared(&["--mount"], mounted)
    } else if may_mount(&["--mount", "--map-root-user"]) {
        unshared(&["--mount", "--map-root-user"], mounted)
    } else {
        let mut command = Command::new("sh");
        command.args(["-c", limited]);
        command
    };
    command
        .arg(exe)
        .arg(dir.path())
        .arg("suite::objects::faults::on_a_small_disk")
        .env(SMALL_DISK, dir.path());
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

fn unshared(args: &[&str], script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(args).args(["sh", "-c", script]);
    command
}

#[tokio::test]
#[ignore = "runs as a child of a_full_disk_is_told_and_serves_once_there_is_room"]
async fn on_a_small_disk() {
    let dir = std::env::var(SMALL_DISK).unwrap();
    let store = Store::open(&Config { dir: dir.clone().into(), ..Config::default() }).unwrap();
    let error = store.put_stream(&key("out.txt"), Source::new(6 * MIB, Then::End)).await.unwrap_err();
    assert!(matches!(error, ObjectError::DiskFull { .. }), "{error:?}");
    assert!(error.to_string().contains("outputs.dir") && !error.is_transient());
    store.wait_for_cleanup().await;
    assert_eq!(names(Path::new(&dir)), [""; 0], "the unfinished file still takes up the disk");
    store.put_stream(&key("out.txt"), Source::new(3 * MIB, Then::End)).await.unwrap();
}
