//! Stores that refuse: one clear line, and the batch ends once it is mended.

use musterd::store::batches::Completion;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

use super::ground::*;
use crate::suite::objects::server::{BUCKET, S3Server, SECRET};
use crate::suite::support::audit::by_hand;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::wait::SOON;

/// Waits until the upload has failed more than once; the one line that says why.
async fn one_complaint(daemon: &Daemon) -> String {
    daemon.wait_for_log(PATIENCE, |line| line.contains("the upload failed again")).await;
    let lines: Vec<String> =
        daemon.log().into_iter().filter(|line| line.contains("outputs cannot be uploaded")).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    lines[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bucket_is_told_once_and_the_batch_ends_when_it_is_there() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let server = S3Server::start().await;
    let bucket = server.root.path().join(BUCKET);
    std::fs::remove_dir(&bucket).unwrap();
    let id = over(&client, 3, "a").await;
    let daemon = Daemon::builder(&db, &s3_toml(&server.endpoint, BUCKET, "AK", SECRET)).start();
    let line = one_complaint(&daemon).await;
    assert!(line.contains("does not exist") && line.contains("outputs.s3.bucket"), "{line}");
    assert_eq!(state(&client, id).await, "running");
    std::fs::create_dir(&bucket).unwrap();
    assert_eq!(ended(&client, id).await, "succeeded");
    daemon.wait_for_log(PATIENCE, |line| line.contains("outputs can be uploaded again")).await;
    let found =
        std::fs::read_to_string(bucket.join(folder(&client, id, "g1-r3").await).join("out.txt")).unwrap();
    assert_eq!(found, text(1..=3, "a"));
    assert_eq!(server.unfinished(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_secret_is_told_once_and_a_worker_with_the_right_one_ends_the_batch_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let server = S3Server::start().await;
    let id = over(&client, 3, "a").await;
    let daemon = Daemon::builder(&db, &s3_toml(&server.endpoint, BUCKET, "AK", "canary-guess")).start();
    let line = one_complaint(&daemon).await;
    assert!(line.contains("SignatureDoesNotMatch") && line.contains("outputs.s3.secret_key"), "{line}");
    assert!(!daemon.log().concat().contains("canary"));
    // Told to stop, it does not wait for what cannot be done.
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).await.success());
    assert_eq!(state(&client, id).await, "running");
    // The usual sweep is minutes away: a new worker looks when it starts.
    let _mended = Daemon::builder(&db, &s3_toml(&server.endpoint, BUCKET, "AK", SECRET)).start();
    assert_eq!(ended(&client, id).await, "succeeded");
}

/// FINDINGS 16: an abort is for good, whatever the store says; a batch that is not aborted waits for its files.
#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_batch_does_not_wait_for_a_store_that_refuses_its_files() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let server = S3Server::start().await;
    std::fs::remove_dir(server.root.path().join(BUCKET)).unwrap();
    let (waiting, aborted) = (over(&client, 3, "a").await, over(&client, 3, "a").await);
    let uncle = "SELECT musterd.enqueue_after('noop', '{}', ARRAY[$1::bigint])";
    let uncle: i64 = client.query_one(uncle, &[&aborted]).await.unwrap().get(0);
    client.execute("UPDATE musterd.batches SET on_done = 'noop' WHERE id = $1", &[&aborted]).await.unwrap();
    let toml = format!(
        "{}[completion]\nsweep_min = \"1s\"\nsweep_max = \"2s\"\n",
        s3_toml(&server.endpoint, BUCKET, "AK", SECRET)
    );
    let daemon = Daemon::builder(&db, &toml).start();
    one_complaint(&daemon).await;
    client.query_one("SELECT musterd.abort($1)", &[&aborted]).await.unwrap();
    assert_eq!(ended(&client, aborted).await, "aborted");
    assert_eq!(outputs(&client, aborted).await, serde_json::Value::Null);
    let counts = "SELECT succeeded, aborted FROM musterd.batches WHERE id = $1";
    let row = client.query_one(counts, &[&aborted]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (3, 0), "what was done is done");
    assert_eq!(ended(&client, uncle).await, "succeeded");
    let told = format!("SELECT id FROM musterd.tasks WHERE idempotency_key = 'batch/{aborted}/1/done'");
    assert_eq!(ended(&client, client.query_one(&told, &[]).await.unwrap().get(0)).await, "succeeded");
    assert_eq!(state(&client, waiting).await, "running", "it was not aborted");
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_once_and_the_batch_ends_when_there_is_room() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (toml, dir) = file_store();
    let id = over(&client, 60, &"z".repeat(100_000)).await;
    // A limit on the size of files stands for the disk: it can be lifted from outside.
    let daemon = Daemon::builder(&db, &toml).shell("trap '' XFSZ; ulimit -S -f 2048").start();
    let line = one_complaint(&daemon).await;
    assert!(line.contains("no space left") && line.contains("outputs.dir"), "{line}");
    assert_eq!(files_below(&dir), [""; 0], "what did not fit is gone");
    let pid = Pid::from_raw(daemon.pid() as i32);
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    assert_eq!(ended(&client, id).await, "succeeded");
    let found =
        std::fs::read_to_string(dir.join(folder(&client, id, "g1-r60").await).join("out.txt")).unwrap();
    assert!(found == text(1..=60, &"z".repeat(100_000)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_told_to_stop_does_not_wait_for_a_stalled_store() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let server = S3Server::start().await;
    let proxy = FaultProxy::start(server.endpoint.trim_start_matches("http://").parse().unwrap()).await;
    proxy.set(Fault::Blackhole);
    let id = over(&client, 3, "a").await;
    let toml = s3_toml(&format!("http://{}", proxy.address()), BUCKET, "AK", SECRET);
    let daemon = Daemon::builder(&db, &format!("{toml}\n[shutdown]\ngrace = \"100ms\"")).start();
    super::stalled(&client).await;
    daemon.signal(Signal::TERM);
    let status = daemon.wait_exit(SOON).await;
    assert!(status.success(), "nothing is owned, so nothing is wrong: {status}");
    assert_eq!(state(&client, id).await, "running", "the sweep of another worker ends it");
}

/// Its files would lack what is missing: they are not written, and it is told as of a batch without files.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_with_files_whose_lines_do_not_add_up_is_told() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (toml, dir) = file_store();
    let id = over(&client, 1_000, "x").await;
    by_hand(&client, "DELETE FROM musterd.outcomes WHERE first_line = 1").await;
    let completer = completer(&db, &toml);
    assert_eq!(completer.complete_with_outputs(id, false).await.unwrap(), Completion::Unbalanced);
    assert_eq!(completer.metrics.batches_unbalanced.get(), 1);
    assert_eq!(state(&client, id).await, "running");
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
}
