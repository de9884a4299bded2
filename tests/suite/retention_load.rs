//! What pruning costs a batch that runs, and whether the tables stop growing: minutes, so not among the usual tests.

use std::time::Instant;

use musterd::metrics::Metrics;
use musterd::objects;
use musterd::upkeep::retention::{Meter, Pass};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::suite::aged::{age, declare, pass};
use crate::suite::outputs::ground;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::store;
use crate::suite::support::worker::{ask, ended};

/// A batch of `noop` with this many rows, in full chunks.
async fn submit(client: &Client, rows: i32, hold: bool) -> i64 {
    let id: i64 = ask(client, "SELECT musterd.reserve_batch_id()").await;
    client
        .batch_execute(&format!(
            "BEGIN;
             INSERT INTO musterd.chunks (batch_id, first_line, last_line, inputs)
             SELECT {id}, c * 500 + 1, c * 500 + 500, string_agg(json_build_object('n', c * 500 + l, 'pad', md5(l::text))::text, E'\\n' ORDER BY l)
               FROM generate_series(0, {rows} / 500 - 1) c, generate_series(1, 500) l GROUP BY c;
             SELECT musterd.open_batch({id}, 'noop', p_rows => {rows}, p_hold => {hold});
             COMMIT"
        ))
        .await
        .unwrap();
    id
}

/// As if it had run to its end, long ago.
async fn end(client: &Client, id: i64, rows: i32) {
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = rows + 1, open = true WHERE id = {id};
             UPDATE musterd.task_records SET state = 'running' WHERE id = {id};
             INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results)
             SELECT {id}, c * 500 + 1, gen_random_uuid(), 1, 1, 1, int4multirange(int4range(c * 500 + 1, c * 500 + 501)), 500, 0,
                    repeat(E'1\\n', 499) || '1'
               FROM generate_series(0, {rows} / 500 - 1) c;
             SELECT musterd.complete_scope({id}, 1, {rows}, {rows}, 0)"
        ))
        .await
        .unwrap();
    age(client, id, 31).await;
}

/// Rows a second of a batch, from its release to its end.
async fn speed(client: &Client, rows: i32) -> f64 {
    let id = submit(client, rows, true).await;
    client.batch_execute("CHECKPOINT").await.unwrap();
    let began = Instant::now();
    client.batch_execute(&format!("SELECT musterd.release({id})")).await.unwrap();
    eprintln!("  batch {id} runs");
    ended(client, id).await;
    f64::from(rows) / began.elapsed().as_secs_f64()
}

const SIZE: &str = "SELECT pg_total_relation_size('musterd.chunks') + pg_total_relation_size('musterd.outcomes')
                         + pg_total_relation_size('musterd.batches') + pg_total_relation_size('musterd.task_records')";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes: make test-retention"]
async fn pruning_ten_million_rows_beside_a_batch_that_runs() {
    let (old, rows) = (100, 600_000);
    let db = TestDb::new().await;
    let client = db.client().await;
    // A worker declares its own policy when it starts: in this one nothing goes by itself.
    let daemon = Daemon::builder(&db, "[retention]\ndata = \"never\"\nrecords = \"never\"\n").start();
    daemon.wait_ready().await;
    for _ in 0..old {
        let id = submit(&client, 100_000, true).await;
        end(&client, id, 100_000).await;
    }
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    let (before, alone) = (ask::<i64>(&client, SIZE).await, speed(&client, rows).await);
    declare(&client, "").await;
    let stop = CancellationToken::new();
    let pruner = Pass {
        store: store(&db),
        objects: objects::Store::open(&ground::config(&db, "").outputs).unwrap(),
        metrics: Metrics::default(),
        rests: 9.0,
        walk_every: std::time::Duration::ZERO,
        stop: stop.clone(),
        meter: Meter::default(),
    };
    let began = Instant::now();
    let beside = async {
        let mut speeds = Vec::new();
        while pruner.meter.done() < 10_000_000 {
            speeds.push(speed(&client, rows).await);
        }
        speeds
    };
    let (gone, speeds) = tokio::join!(pruner.run(), beside);
    let (gone, took) = (gone.unwrap(), began.elapsed());
    let again = speed(&client, rows).await;
    client.batch_execute("VACUUM").await.unwrap();
    let after: i64 = ask(&client, SIZE).await;
    eprintln!(
        "alone {alone:.0} rows/s before and {again:.0} after; beside {speeds:.0?}; {} rows pruned in {took:.1?}; disk {before} to {after} bytes",
        gone.rows
    );
    assert_eq!(gone.rows, 10_000_000);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes: make test-retention"]
async fn tables_stop_growing_over_twenty_rounds() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let mut sizes = Vec::new();
    for _ in 0..20 {
        let id = submit(&client, 100_000, false).await;
        ended(&client, id).await;
        let full: i64 = ask(&client, SIZE).await;
        age(&client, id, 400).await;
        assert_eq!(pass(&db, "").await.records, 1);
        // What autovacuum does between rounds that are days apart.
        client.batch_execute("VACUUM").await.unwrap();
        sizes.push((full, ask::<i64>(&client, SIZE).await));
    }
    eprintln!("bytes after each run, and after its pruning: {sizes:?}");
    let full = |round: usize| sizes[round].0;
    assert!(full(19) <= full(2) + full(2) / 10, "{sizes:?}");
}
