//! FINDINGS S7: inputs that cannot be read fail their own rows, and keep no other from being run.

use std::collections::BTreeSet;

use musterd::lines::Lines;
use musterd::store::pages::{self, ChunkCache};
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, closing_with_retry, session, success, write, written};
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::worker::{Script, Worker, ask, end_of};

/// A batch whose chunks of 500 lines lie outside of their tuples.
async fn submit_toasted(client: &Client, rows: i32, options: &str) -> i64 {
    client.batch_execute("ALTER TABLE musterd.chunks ALTER inputs SET STORAGE EXTERNAL").await.unwrap();
    let submit = format!(
        "SELECT musterd.submit_batch('work', ARRAY(SELECT to_jsonb(md5(g::text)) FROM generate_series(1, {rows}) g), {options})"
    );
    ask(client, &submit).await
}

/// Damages the chunk that begins with line `first`, as a disk does: its text is gone from the TOAST table.
async fn damage(client: &Client, first: i32) {
    let toast: String = ask(
        client,
        "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'musterd.chunks'::regclass",
    )
    .await;
    let value = format!(
        "SELECT chunk_id::bigint FROM {toast}
          WHERE chunk_seq = 0 AND substr(chunk_data, 2, 32) = convert_to(md5('{first}'), 'UTF8')"
    );
    let value: i64 = ask(client, &value).await;
    let be = |kind: char| format!("UPDATE pg_class SET relkind = '{kind}' WHERE oid = '{toast}'::regclass");
    // PostgreSQL refuses every write to a TOAST table, so it becomes an ordinary table for a moment.
    let delete = format!(
        "SET allow_system_table_mods = on; BEGIN; {}; DELETE FROM {toast} WHERE chunk_id = {value}; {}; COMMIT",
        be('r'),
        be('t')
    );
    client.batch_execute(&delete).await.unwrap();
    // A deleted value can be read until it is cleaned up.
    let read = format!("SELECT md5(inputs) FROM musterd.chunks WHERE first_line = {first}");
    eventually(SOON, "the chunk cannot be read", async || {
        client.batch_execute("VACUUM musterd.chunks").await.unwrap();
        let error = client.query(&read, &[]).await.err()?;
        assert_eq!(error.code().map(|state| state.code()), Some("XX001"), "{error:?}");
        Some(())
    })
    .await;
}

async fn failed(client: &Client, batch: i64) -> (BTreeSet<i32>, BTreeSet<String>) {
    let sql = "SELECT line, error FROM musterd.failures WHERE batch_id = $1";
    let rows = client.query(sql, &[&batch]).await.unwrap();
    (rows.iter().map(|row| row.get(0)).collect(), rows.iter().map(|row| row.get(1)).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_cannot_be_read_fails_its_own_lines_and_no_others() {
    for block_size in [300, 1_700] {
        let db = TestDb::new().await;
        let client = db.client().await;
        // Chunks of 500 lines; blocks that lie within one, and blocks that lie across two or more.
        let batch = submit_toasted(&client, 2_300, "max_failed => 500").await;
        damage(&client, 501).await;
        let script = Script::succeeding();
        let toml = format!("[queues.default]\nfibers = 2\nblock_size = {block_size}");
        let worker = Worker::start(&db, &toml, &[("work", script.clone())]).await;
        assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 1_800, 500, 0), "{block_size}");
        let (lines, errors) = failed(&client, batch).await;
        assert_eq!(lines, (501..=1_000).collect());
        let told = |error: &String| {
            error.starts_with("its input cannot be read: ") && error.contains("for toast value")
        };
        assert!(errors.iter().all(told), "{errors:?}");
        assert!(script.runs().values().all(|runs| *runs == 1));
        assert!(worker.stop().await.is_clean());
    }
}

/// Lines that are tried again lie scattered, and are cut out of their chunks one by one.
#[tokio::test(flavor = "multi_thread")]
async fn scattered_lines_of_readable_chunks_do_not_suffer_for_others() {
    let db = TestDb::new().await;
    let (client, claimer) = (db.client().await, session(&db).await);
    let batch = submit_toasted(&client, 2_000, "max_failed => 5, max_attempts => 2").await;
    let block = carve(&claimer, 1, 2_000).await.remove(0);
    // Every hundredth line wants another try: a block of twenty lines over four chunks, of which the third is damaged since.
    let again: Vec<i32> = (1..=20).map(|n| n * 100).collect();
    let first = (1..=2_000).filter(|line| line % 100 != 0);
    assert_eq!(write(&claimer, success(&block, first, closing_with_retry(&again))).await, written(1_980));
    damage(&client, 1_001).await;
    let script = Script::succeeding();
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 1_995, 5, 0));
    assert_eq!(failed(&client, batch).await.0, [1_100, 1_200, 1_300, 1_400, 1_500].into());
    assert_eq!(script.calls().len(), 15);
    assert!(worker.stop().await.is_clean());
}

/// The same by the statements themselves: a page never fails for a chunk behind its first.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_one_piece_needs_the_first_chunk_only() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    submit_toasted(&client, 2_000, "max_failed => 5").await;
    let block = carve(&worker, 1, 2_000).await.remove(0);
    damage(&client, 1_001).await;
    for wanted in [
        Lines::span(1, 2_000),
        [7, 1_200].into_iter().collect(),
        [7, 400, 1_200, 1_900].into_iter().collect(),
    ] {
        let page = pages::read(&worker, &ChunkCache::default(), &block, &wanted, 1).await;
        let page = page.unwrap_or_else(|error| panic!("{wanted}: {error:?}"));
        assert!(
            page.lines().first() == wanted.first() && page.lines().last() <= Some(500),
            "{wanted}: {}",
            page.lines()
        );
        assert!(page.rows().iter().all(|row| row.input.len() == 34));
    }
    let damaged: Lines = [1_200, 1_900].into_iter().collect();
    assert!(pages::read(&worker, &ChunkCache::default(), &block, &damaged, 1).await.is_err());
}
