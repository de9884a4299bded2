//! How long the end takes to come; the bounds are wide, the figures are printed.

use crate::suite::support::database::TestDb;
use crate::suite::support::worker::{Script, Worker, ask, end_of, submit};

/// The milliseconds of all batches, sorted.
async fn milliseconds(client: &tokio_postgres::Client, from: &str) -> Vec<f64> {
    let sql = format!(
        "SELECT array_agg(ms ORDER BY ms) FROM (
             SELECT 1000 * extract(epoch FROM t.finished_at - {from})::float8 AS ms
               FROM musterd.tasks t JOIN musterd.batches b ON b.id = t.id) x"
    );
    ask(client, &sql).await
}

fn show(what: &str, sorted: &[f64]) -> (f64, f64) {
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share).round() as usize];
    println!("{what}: median {:.1} ms, p99 {:.1} ms, most {:.1} ms", at(0.5), at(0.99), at(1.0));
    (at(0.5), at(0.99))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_row_ends_at_once_and_nobody_waits_for_a_poll_or_a_full_batcher() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The shipped intervals: a poll of 1 s, a flush after 5 s, a sweep after minutes.
    let _worker = Worker::start_exactly(&db, "", &[("work", Script::succeeding())]).await;
    // The first one may come before the worker listens.
    let first = submit(&client, "work", 1, "").await;
    end_of(&client, first).await;
    client.batch_execute("DELETE FROM musterd.batches").await.unwrap();
    for _ in 0..100 {
        let batch = submit(&client, "work", 1, "").await;
        assert_eq!(end_of(&client, batch).await.0, "succeeded");
    }
    let (median, _) =
        show("a lone row, from submit to the end of its batch", &milliseconds(&client, "t.created_at").await);
    assert!(median < 1_000.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_done_when_its_last_row_is() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::succeeding();
    let mut workers = Vec::new();
    for _ in 0..2 {
        workers.push(Worker::start_exactly(&db, "", &[("work", script.clone())]).await);
    }
    for size in 1..=100 {
        let batch = submit(&client, "work", size, "").await;
        end_of(&client, batch).await;
    }
    let last_row = "(SELECT max(r.finished_at) FROM musterd.results r WHERE r.batch_id = t.id)";
    let (median, _) =
        show("from the last row to the end of its batch", &milliseconds(&client, last_row).await);
    assert!(median < 1_000.0);
}
