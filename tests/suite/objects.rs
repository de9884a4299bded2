//! Output stores: both keep the same promises, so both go through the same tests.

mod faults;
mod memory;
pub(crate) mod server;
mod source;

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use musterd::objects::{Config, Key, ObjectError, Store};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::sync::Notify;

use self::server::{BUCKET, Holder, S3Server, names};
use self::source::{MIB, Source, Then, byte_at};

/// A store and what a test may look at behind its back.
struct Bench {
    store: Store,
    /// Where the store's objects lie as files.
    dir: PathBuf,
    server: Option<S3Server>,
    _dir: Option<TempDir>,
}

async fn benches() -> [Bench; 2] {
    let server = S3Server::start().await;
    let (store, dir) = (server.store(), server.root.path().join(BUCKET).join("pre fix"));
    [file_bench(), Bench { store, dir, server: Some(server), _dir: None }]
}

fn file_bench() -> Bench {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("made/on demand");
    let store = Store::open(&Config { dir: dir.clone(), ..Config::default() }).unwrap();
    Bench { store, dir, server: None, _dir: Some(root) }
}

impl Bench {
    /// Asserts that beside `expected` nothing is stored: no object, no unfinished write.
    fn holds_only(&self, expected: &[&str]) {
        assert_eq!(names(&self.dir), expected, "{:?}", self.store);
        if let Some(server) = &self.server {
            assert_eq!(server.unfinished(), [""; 0]);
        }
    }

    /// Asserts that a write is under way: what a later `holds_only` proves to be gone.
    fn has_unfinished(&self) {
        let found = match &self.server {
            Some(server) => server.unfinished(),
            None => names(&self.dir).into_iter().filter(|name| name.starts_with(".musterd-tmp-")).collect(),
        };
        assert!(!found.is_empty(), "{:?} shows no write under way", self.store);
    }
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

#[tokio::test]
async fn small_objects_come_back_are_replaced_and_go() {
    for bench in benches().await {
        let (store, key) = (&bench.store, key("manifest.json"));
        for content in [&b"first, and longer"[..], b"second", b""] {
            let stored = store.put(&key, Bytes::from_static(content)).await.unwrap();
            assert_eq!(stored.bytes, content.len() as u64);
            assert_eq!(store.read(&key).await.unwrap(), content);
        }
        store.delete(&key).await.unwrap();
        let read = store.read(&key).await;
        assert!(matches!(read, Err(ObjectError::NotFound { .. })), "{read:?}");
        assert!(matches!(store.get_stream(&key).await, Err(ObjectError::NotFound { .. })));
        store.delete(&key).await.unwrap();
        bench.holds_only(&[]);
    }
}

#[tokio::test]
async fn odd_keys_name_what_they_say() {
    let odd = [
        "dir/ü b+c.txt",
        "100% & more?/x#y;z=1.csv",
        "日本 語/é.ndjson",
        "a:b@c$d'(e)*!,[f]~`^|{g}.txt",
        "%2e%2e/back\\slash \"quoted\" <tag>",
        " leading and trailing ",
    ];
    for bench in benches().await {
        for text in odd {
            bench.store.put(&key(text), Bytes::from(text)).await.unwrap();
        }
        for text in odd {
            assert_eq!(bench.store.read(&key(text)).await.unwrap(), text);
            assert!(bench.dir.join(text).is_file(), "{text:?} is stored under another name");
            assert!(bench.store.location(&key(text)).ends_with(text));
        }
    }
}

#[tokio::test]
async fn large_streams_come_back_whole_under_any_key() {
    let length = 19 * MIB + 123;
    for bench in benches().await {
        let (store, key) = (&bench.store, key("ü b+c/large file.txt"));
        let stored = store.put_stream(&key, Source::new(length, Then::End)).await.unwrap();
        assert_eq!(stored.bytes, length);
        let (mut reader, mut buffer, mut place) =
            (store.get_stream(&key).await.unwrap(), vec![0; 1 << 16], 0);
        loop {
            let count = reader.read(&mut buffer).await.unwrap();
            if count == 0 {
                break;
            }
            let wrong = buffer[..count].iter().zip(place..).find(|(byte, place)| **byte != byte_at(*place));
            assert_eq!(wrong, None);
            place += count as u64;
        }
        assert_eq!(place, length);
    }
}

/// A whole part and nothing after it is the case that a loop over parts gets wrong.
#[tokio::test]
async fn a_stream_of_exactly_one_part_is_stored() {
    for bench in benches().await {
        let stored = bench.store.put_stream(&key("one"), Source::new(8 * MIB, Then::End)).await.unwrap();
        assert_eq!(stored.bytes, 8 * MIB);
        assert_eq!(bench.store.read(&key("one")).await.unwrap().len() as u64, 8 * MIB);
        bench.holds_only(&["one"]);
    }
}

#[tokio::test]
async fn a_cancelled_write_leaves_what_was_there_and_nothing_else() {
    for bench in benches().await {
        let (store, key, reached) = (&bench.store, key("out.txt"), Arc::new(Notify::new()));
        store.put(&key, Bytes::from_static(b"before")).await.unwrap();
        {
            let mut write = pin!(store.put_stream(&key, Source::new(12 * MIB, Then::Stall(reached.clone()))));
            tokio::select! {
                result = &mut write => panic!("ended: {result:?}"),
                () = reached.notified() => bench.has_unfinished(),
            }
        }
        store.wait_for_cleanup().await;
        bench.holds_only(&["out.txt"]);
        assert_eq!(store.read(&key).await.unwrap(), &b"before"[..]);
    }
}

#[tokio::test]
async fn a_write_whose_source_fails_leaves_what_was_there_and_nothing_else() {
    for bench in benches().await {
        let (store, key) = (&bench.store, key("out.txt"));
        store.put(&key, Bytes::from_static(b"before")).await.unwrap();
        for length in [MIB, 20 * MIB] {
            let result = store.put_stream(&key, Source::new(length, Then::Fail)).await;
            assert!(matches!(result, Err(ObjectError::Source { .. })), "{result:?}");
            store.wait_for_cleanup().await;
            bench.holds_only(&["out.txt"]);
        }
        assert_eq!(store.read(&key).await.unwrap(), &b"before"[..]);
    }
}

/// The upload exists on the server and its id is in an answer nobody heard: it must be aborted all the same.
#[tokio::test]
async fn a_write_cancelled_while_its_upload_begins_leaves_nothing() {
    let server = S3Server::start().await;
    let holder = Holder::before(&server).await;
    let store = server::open(&server::config(&holder.endpoint));
    let (key, source) = (key("out.txt"), Source::new(20 * MIB, Then::End));
    tokio::select! {
        result = store.put_stream(&key, source) => panic!("ended: {result:?}"),
        () = holder.holds_an_answer() => {}
    }
    assert_ne!(server.unfinished(), [""; 0]);
    holder.let_go();
    store.wait_for_cleanup().await;
    assert_eq!(server.unfinished(), [""; 0]);
}

#[tokio::test]
async fn a_probe_passes_and_leaves_nothing() {
    for bench in benches().await {
        bench.store.probe().await.unwrap();
        bench.holds_only(&[]);
    }
}

#[tokio::test]
async fn what_a_killed_process_left_is_removed_by_a_later_write() {
    let bench = file_bench();
    bench.store.put(&key("one"), Bytes::new()).await.unwrap();
    let (old, young) = (bench.dir.join(".musterd-tmp-old"), bench.dir.join(".musterd-tmp-young"));
    std::fs::write(&young, "of a living process").unwrap();
    let file = std::fs::File::create(&old).unwrap();
    file.set_modified(std::time::SystemTime::now() - std::time::Duration::from_hours(25)).unwrap();
    bench.store.put(&key("one"), Bytes::new()).await.unwrap();
    assert!(!old.exists());
    assert!(young.exists());
}
