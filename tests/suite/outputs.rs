//! Output files: what the rows say, exactly once, whatever happens on the way.

pub(crate) mod ground;
mod large;
mod late;
mod trouble;

use futures::FutureExt;
use musterd::flow::complete::CompleteError;
use musterd::handler::{Done, Failed, Outcome};
use musterd::objects::{Key, Store};
use musterd::store::batches::{Advisory, Completion, Look, ScopeEnd};
use musterd::store::outputs::Snapshot;
use musterd::store::{self, batches};
use sha2::{Digest, Sha256};
use tokio_postgres::Client;

use self::ground::*;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::services::{self, S3};
use crate::suite::support::wait::{eventually, within};

/// Several files, text of all kinds, rows that add nothing and rows that fail.
fn words(line: i32) -> Outcome {
    let text = match line % 7 {
        0 if line % 2 == 0 => return Outcome::Failed("every seventh".into()),
        0 => {
            let rejects = vec![
                ("rejects.txt".to_owned(), format!("{line} failed\n")),
                ("all.txt".to_owned(), "x\n".to_owned()),
            ];
            return Outcome::Failed(Failed { outputs: rejects, ..Failed::from("every seventh") });
        }
        1 => String::new(),
        2 => "ü \"quoted\" \\ and\ttabs\r\n".to_owned(),
        _ => format!("line {line}\n"),
    };
    let mut outputs = vec![("all.txt".to_owned(), text.clone())];
    if line % 3 == 0 {
        outputs.push(("third ü.csv".to_owned(), format!("{line},{}\n", "x".repeat(line as usize % 500))));
        outputs.push(("all.txt".to_owned(), "(third)\n".to_owned()));
    }
    if line % 11 == 5 {
        outputs.clear();
    }
    Outcome::Succeeded(Done { outputs, ..Done::default() })
}

async fn submit(client: &Client, command: &str, rows: i32) -> i64 {
    let submit =
        "SELECT musterd.submit_batch($1, ARRAY(SELECT to_jsonb(n) FROM generate_series(1, $2::int) n),
                                             max_failed => 1000000)";
    client.query_one(submit, &[&command, &rows]).await.unwrap().get(0)
}

/// Every file as the results have it: its name, its text, how many rows add to it.
async fn rebuilt(client: &Client, id: i64) -> Vec<(String, String, i64)> {
    let sql = "SELECT k.key, string_agg(k.value, '' ORDER BY r.line), count(*)
          FROM musterd.results r CROSS JOIN LATERAL jsonb_each_text(r.outputs) k
         WHERE r.batch_id = $1 GROUP BY k.key ORDER BY k.key COLLATE \"C\"";
    let rows = client.query(sql, &[&id]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// Asserts that the batch's outputs, its manifest and its files all say what the results say; what it refers to.
async fn agrees(client: &Client, store: &Store, id: i64) -> serde_json::Value {
    let outputs = outputs(client, id).await;
    let key = Key::new(outputs["manifest"].as_str().unwrap()).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&store.read(&key).await.unwrap()).unwrap();
    assert_eq!(manifest["files"], outputs["files"]);
    assert_eq!((&manifest["batch"], &manifest["generation"]), (&id.into(), &outputs["generation"]));
    let expected = rebuilt(client, id).await;
    let files = manifest["files"].as_array().unwrap();
    assert_eq!(files.len(), expected.len(), "{manifest}");
    for (file, (name, text, rows)) in files.iter().zip(&expected) {
        let found = store.read(&Key::new(file["key"].as_str().unwrap()).unwrap()).await.unwrap();
        assert_eq!(file["name"], name.as_str());
        assert!(found == text.as_bytes(), "{name} is not what the rows say");
        assert_eq!(file["sha256"], hex::encode(Sha256::digest(text)), "{name}");
        assert_eq!((&file["bytes"], &file["rows"]), (&text.len().into(), &(*rows).into()), "{name}");
    }
    outputs
}

#[tokio::test(flavor = "multi_thread")]
async fn every_file_is_what_the_rows_say_in_both_stores() {
    for (toml, dir) in [file_store(), s3_store()] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let worker = Worker::start(&db, &toml, "words", |call| {
            let line = call.line;
            async move { words(line) }.boxed()
        })
        .await;
        let id = submit(&client, "words", 2_500).await;
        assert_eq!(ended(&client, id).await, "succeeded");
        let store = Store::open(&config(&db, &toml).outputs).unwrap();
        let outputs = agrees(&client, &store, id).await;
        let folder = folder(&client, id, "g1-r2500").await;
        assert_eq!(outputs["manifest"], format!("{folder}/manifest.json"));
        let expected =
            ["all.txt", "manifest.json", "rejects.txt", "third ü.csv"].map(|name| format!("{folder}/{name}"));
        assert_eq!(files_below(&dir), expected, "and nothing else");
        worker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_longer_than_a_part_and_many_pages_comes_whole() {
    let (toml, _) = s3_store();
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 5_000, &"y".repeat(4_000)).await;
    let completer = completer(&db, &toml);
    assert_eq!(completer.complete_with_outputs(id, false).await.unwrap(), Completion::Completed);
    let outputs = agrees(&client, &completer.uploader.objects, id).await;
    assert!(outputs["bytes"].as_u64().unwrap() > 16 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_outputs_uploads_nothing() {
    let (toml, dir) = file_store();
    std::fs::remove_dir(&dir).unwrap();
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker =
        Worker::start(&db, &toml, "words", |_| async { Outcome::Succeeded(Done::default()) }.boxed()).await;
    let id = submit(&client, "words", 100).await;
    assert_eq!(ended(&client, id).await, "succeeded");
    assert_eq!(outputs(&client, id).await, serde_json::Value::Null);
    assert!(!dir.exists(), "not even the directory is made");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_cannot_be_a_files_fails_its_own_row_only() {
    let (toml, _) = file_store();
    let db = TestDb::new().await;
    let client = db.client().await;
    const NAMES: [&str; 8] = ["ok.txt", "", "../up", "a/b", "manifest.json", ".hidden", "a\nb", "\u{0}"];
    let worker = Worker::start(&db, &toml, "names", |call| {
        let name = NAMES[(call.line - 1) as usize % NAMES.len()].to_owned();
        let outputs = vec![("ok.txt".to_owned(), "good\n".to_owned()), (name, "bad\n".to_owned())];
        async move { Outcome::Succeeded(Done { outputs, ..Done::default() }) }.boxed()
    })
    .await;
    let id = submit(&client, "names", 8).await;
    assert_eq!(ended(&client, id).await, "succeeded", "up to a million may fail");
    let sql =
        "SELECT line, error FROM musterd.results WHERE batch_id = $1 AND state = 'failed' ORDER BY line";
    let failed: Vec<(i32, String)> =
        client.query(sql, &[&id]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(failed.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7, 8]);
    for (line, error) in &failed {
        let named = format!("{:?} cannot name an output file: ", NAMES[*line as usize - 1]);
        assert!(error.starts_with(&named), "{error}");
    }
    let store = Store::open(&config(&db, &toml).outputs).unwrap();
    let outputs = agrees(&client, &store, id).await;
    assert_eq!(outputs["files"][0]["bytes"], 9, "one row, both its pieces in order");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_is_of_the_moment_in_which_the_batch_was_closed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    let store = store::Store::open(&config(&db, "").database).unwrap();
    let mut reading = store.uploads.get().await.unwrap();
    let snapshot = Snapshot::begin(&mut reading).await.unwrap();
    let Some(Look::Closed(closed)) = snapshot.look(id).await.unwrap() else { panic!("it is over") };
    assert_eq!((closed.rows, closed.succeeded, closed.outputs), (3, 3, true));

    // More rows come, run and end before anything is read.
    let append = "SELECT musterd.append_rows($1, ARRAY['4', '5']::jsonb[])";
    client.query_one(append, &[&id]).await.unwrap();
    end_lines(&client, id, 4, 5, "a").await;

    let files = snapshot.files(id).await.unwrap();
    assert_eq!((files.len(), files[0].first, files[0].last), (1, 1, 3));
    let pieces: Vec<bytes::Bytes> =
        futures::TryStreamExt::try_collect(snapshot.text(id, &files[0])).await.unwrap();
    assert_eq!(pieces.concat(), text(1..=3, "a").as_bytes());
    drop(snapshot);
    let mut writing = store.general.get().await.unwrap();
    let summary = musterd::json::Json::from_text("{}");
    let end = ScopeEnd { id, closed: Some(&closed), outputs: Some(&summary) };
    let answer = batches::complete(&mut writing, &[end], Advisory::Ask).await.unwrap();
    assert_eq!(answer, [(id, Completion::Stale)], "the count and the files are of an older batch");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_does_not_end_without_its_files() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    let complete = "SELECT musterd.complete_scope($1, 1, 3, 3, 0)";
    let answer: String = client.query_one(complete, &[&id]).await.unwrap().get(0);
    assert_eq!(answer, "stale", "whoever ends it in SQL has uploaded nothing");
    let completer = completer(&db, &file_store().0);
    let answers = completer.complete_all(vec![id]).await;
    assert!(matches!(answers[..], [(_, Ok(Completion::NeedsUpload))]), "{answers:?}");
    assert_eq!(state(&client, id).await, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_an_aborted_batch_are_of_the_rows_that_ended() {
    let (toml, dir) = file_store();
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = submit(&client, "noop", 10).await;
    end_lines(&client, id, 1, 4, "a").await;
    client.query_one("SELECT musterd.abort($1)", &[&id]).await.unwrap();
    let completer = completer(&db, &toml);
    assert_eq!(completer.complete_with_outputs(id, false).await.unwrap(), Completion::Completed);
    assert_eq!(state(&client, id).await, "aborted");
    agrees(&client, &completer.uploader.objects, id).await;
    let found =
        std::fs::read_to_string(dir.join(folder(&client, id, "g1-r10-d4").await).join("out.txt")).unwrap();
    assert_eq!(found, text(1..=4, "a"));
}

/// A completer whose S3 server can be held back, and the store without that.
async fn behind_a_proxy() -> (String, String, FaultProxy) {
    let (direct, _) = s3_store();
    let upstream = services::s3().endpoint().trim_start_matches("http://").parse().unwrap();
    let proxy = FaultProxy::start(upstream).await;
    let held = direct.replace(&services::s3().endpoint(), &format!("http://{}", proxy.address()));
    assert_ne!(direct, held);
    assert!(direct.contains(S3::ACCESS_KEY));
    (direct, held, proxy)
}

/// Waits until a session that reads outputs is in its transaction and has nothing to do.
async fn stalled(client: &Client) -> i32 {
    let sql = "SELECT pid FROM pg_stat_activity
         WHERE datname = current_database() AND application_name = 'musterd outputs' AND state = 'idle in transaction'
           AND query LIKE '%outputs%' AND state_change < clock_timestamp() - interval '200 ms'";
    eventually(PATIENCE, "the upload stands still", async || {
        client.query_opt(sql, &[]).await.unwrap().map(|row| row.get(0))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_store_holds_no_lock() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    let (_, toml, proxy) = behind_a_proxy().await;
    proxy.set(Fault::Blackhole);
    let completer = completer(&db, &toml);
    let completing = completer.complete_with_outputs(id, false);
    let looking = async {
        let pid = stalled(&client).await;
        let locks = "SELECT mode || ' on ' || COALESCE(relation::regclass::text, locktype) FROM pg_locks
             WHERE pid = $1 AND mode <> 'AccessShareLock' AND locktype <> 'virtualxid'";
        let locks: Vec<String> =
            client.query(locks, &[&pid]).await.unwrap().iter().map(|row| row.get(0)).collect();
        assert_eq!(locks, ["ExclusiveLock on advisory"], "other workers see that it is at it");
        let advisory = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database =
                            (SELECT oid FROM pg_database WHERE datname = current_database())";
        assert_eq!(client.query_one(advisory, &[]).await.unwrap().get::<_, i64>(0), 1);
        let end = "SELECT pg_try_advisory_xact_lock(hashtextextended('musterd.scope:' || $1::bigint, 0))";
        assert!(
            client.query_one(end, &[&id]).await.unwrap().get::<_, bool>(0),
            "the end of the batch is free"
        );
        // Nobody waits: the batch can be held, released and locked as if nothing were going on.
        let nowait = "SELECT id FROM musterd.batches WHERE id = $1 FOR UPDATE NOWAIT";
        client.query_one(nowait, &[&id]).await.unwrap();
        client.query_one("SELECT musterd.hold($1)", &[&id]).await.unwrap();
        client.query_one("SELECT musterd.release($1)", &[&id]).await.unwrap();
        proxy.set(Fault::None);
    };
    let (completed, ()) = within(PATIENCE, async { tokio::join!(completing, looking) }).await;
    assert_eq!(completed.unwrap(), Completion::Completed);
    assert_eq!(state(&client, id).await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completer_that_was_overtaken_changes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    let (direct, held, proxy) = behind_a_proxy().await;
    proxy.set(Fault::Blackhole);
    let (slow, fast) = (completer(&db, &held), completer(&db, &direct));
    let late = slow.complete_with_outputs(id, false);
    let overtaking = async {
        stalled(&client).await;
        client.query_one("SELECT musterd.append_rows($1, ARRAY['4', '5']::jsonb[])", &[&id]).await.unwrap();
        end_lines(&client, id, 4, 5, "a").await;
        // As long as it believes that the other one will do it, it does not upload, too.
        let left = fast.complete_with_outputs(id, false).await.unwrap_err();
        assert!(matches!(&left, CompleteError::Outputs { source, .. } if source.is_busy()), "{left}");
        assert_eq!(fast.complete_with_outputs(id, true).await.unwrap(), Completion::Completed);
        let outputs = agrees(&client, &fast.uploader.objects, id).await;
        proxy.set(Fault::None);
        outputs
    };
    let (answer, outputs) = within(PATIENCE, async { tokio::join!(late, overtaking) }).await;
    assert_eq!(answer.unwrap(), Completion::Ended);
    assert_eq!(agrees(&client, &fast.uploader.objects, id).await, outputs);
    // What it uploaded all the same is gone again.
    let orphan = Key::new(format!("{}/out.txt", folder(&client, id, "g1-r3").await)).unwrap();
    assert!(fast.uploader.objects.read(&orphan).await.is_err());
}
