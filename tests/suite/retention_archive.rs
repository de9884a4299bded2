//! Archives: what is written before the rows go, and that it is enough to run the batch again.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::suite::aged::{age, declare, ended, pass, tuples};
use crate::suite::batch_cli::json_of;
use crate::suite::outputs::ground::{ended as outputs_ended, file_store, files_below, over, s3_store};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::worker::ask;

/// The lines of an archive.
fn unpacked(file: &Path) -> Vec<Value> {
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(file).unwrap()).read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_archived_deleted_and_restored_gives_the_same_results() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (outputs, dir) = file_store();
    let daemon = Daemon::builder(&db, &format!("{outputs}[retention]\narchive = true\n")).start();
    daemon.wait_ready().await;
    let input = daemon.config().dir().join("input.ndjson");
    let lines: String =
        (1..=1_200).map(|n| format!("{{\"n\": {n}, \"exact\": 1.10, \"ü\": [\"\\u0001\"]}}\n")).collect();
    std::fs::write(&input, lines).unwrap();
    let submit = ["submit", input.to_str().unwrap(), "--command", "echo"];
    let batch = json_of(daemon.config(), &submit).await["id"].as_i64().unwrap();
    assert_eq!(outputs_ended(&client, batch).await, "succeeded");
    let results = async |id: i64| {
        rows(&client, &format!("SELECT line, state, input, result FROM musterd.batch_rows({id})")).await
    };
    let before = results(batch).await;
    age(&client, batch, 31).await;
    let gone = pass(&db, &outputs).await;
    assert_eq!((gone.archived, gone.batches, gone.rows, gone.trouble), (1, 1, 1_200, None));
    assert_eq!(tuples(&client, batch).await, "0 0 0 0");

    let shown = json_of(daemon.config(), &["batch", "show", &batch.to_string()]).await;
    let archive = PathBuf::from(shown["archive"]["location"].as_str().unwrap());
    assert!(archive.starts_with(&dir), "{}", archive.display());
    let packed = std::fs::read(&archive).unwrap();
    assert_eq!(shown["archive"]["sha256"], hex::encode(Sha256::digest(&packed)));
    assert_eq!(
        (&shown["archive"]["rows"], &shown["archive"]["bytes"]),
        (&json!(1_200), &json!(packed.len()))
    );
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(archive.with_file_name("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["batch"]["command"], &manifest["file"]["rows"]), (&json!("echo"), &json!(1_200)));
    assert_eq!(manifest["file"]["key"], shown["archive"]["key"]);
    let said = refusal(&client, &format!("SELECT musterd.redrive({batch})")).await;
    assert!(said.starts_with("MU410"), "{said}");

    let lines = unpacked(&archive);
    assert_eq!(
        (lines.len(), &lines[0]["_state"], &lines[0]["_line"]),
        (1_200, &json!("succeeded"), &json!(1))
    );
    let plain = daemon.config().dir().join("restored.ndjson");
    let mut file = std::fs::File::create(&plain).unwrap();
    std::io::copy(&mut GzDecoder::new(packed.as_slice()), &mut file).unwrap();
    let restore = ["submit", plain.to_str().unwrap(), "--exported", "--command", "echo"];
    let restored = json_of(daemon.config(), &restore).await["id"].as_i64().unwrap();
    assert_ne!(restored, batch);
    assert_eq!(outputs_ended(&client, restored).await, "succeeded");
    assert_eq!(results(restored).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn data_stays_while_its_archive_cannot_be_written() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "archive = true").await;
    let (lacking, whole) = (ended(&client, "work", 9, "").await, ended(&client, "work", 9, "").await);
    age(&client, lacking, 31).await;
    age(&client, whole, 31).await;
    // Nothing refuses a call that brings no archive but the function itself.
    assert_eq!(value(&client, &format!("SELECT musterd.prune_batch({whole}, 1)")).await, "f");
    // A batch that lacks rows is not archived, and keeps what it has; the others go.
    crate::suite::support::audit::by_hand(
        &client,
        &format!("UPDATE musterd.batches SET rows = 10, succeeded = 7 WHERE id = {lacking}"),
    )
    .await;
    let (outputs, dir) = file_store();
    let gone = pass(&db, &outputs).await;
    assert_eq!((gone.archived, gone.batches), (1, 1));
    let trouble = gone.trouble.unwrap();
    assert!(
        trouble.contains(&format!("batch {lacking} could not be archived"))
            && trouble.contains("9 of its 10 rows"),
        "{trouble}"
    );
    assert_eq!(tuples(&client, lacking).await, "1 7 3 0");
    assert_eq!(tuples(&client, whole).await, "0 0 0 0");
    let files = files_below(&dir);
    assert!(
        files.len() == 2 && files.iter().all(|file| file.starts_with(&format!("archive/{whole}-"))),
        "{files:?}"
    );
    // A store that takes nothing: the same.
    let other = ended(&client, "work", 3, "").await;
    age(&client, other, 31).await;
    let blocked = dir.join("blocked");
    std::fs::write(&blocked, "a file where a directory is meant").unwrap();
    let gone = pass(&db, &format!("[outputs]\ndir = {:?}\n", blocked.join("x").display().to_string())).await;
    assert_eq!((gone.archived, gone.batches), (0, 0));
    assert_eq!(tuples(&client, other).await, "1 3 1 0");
    let why = "SELECT trouble IS NOT NULL FROM musterd.retention";
    assert!(ask::<bool>(&client, why).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn output_files_go_when_asked_on_both_stores() {
    for (toml, dir) in [file_store(), s3_store()] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let daemon = Daemon::builder(&db, &toml).start();
        daemon.wait_ready().await;
        let (kept, going) = (over(&client, 600, "x").await, over(&client, 600, "y").await);
        for id in [kept, going] {
            client.execute("SELECT pg_notify('musterd_check', $1::bigint::text)", &[&id]).await.unwrap();
            assert_eq!(outputs_ended(&client, id).await, "succeeded");
        }
        let of = |id: i64| move |file: &String| file.starts_with(&format!("batches/{id}-"));
        let before = files_below(&dir);
        assert_eq!(
            before.iter().filter(|file| of(kept)(file)).count(),
            before.iter().filter(|file| of(going)(file)).count()
        );
        // They stay unless it is said.
        age(&client, kept, 31).await;
        pass(&db, &toml).await;
        assert_eq!(files_below(&dir), before);
        declare(&client, "outputs = true").await;
        age(&client, going, 31).await;
        assert_eq!(pass(&db, &toml).await.trouble, None);
        let after = files_below(&dir);
        assert_eq!(after, before.iter().filter(|file| !of(going)(file)).cloned().collect::<Vec<_>>());
        assert_eq!(rows(&client, "SELECT outputs_gone FROM musterd.batches ORDER BY id").await, ["f", "t"]);
    }
}
