//! One run of a worker: from the release of what waits to the end of the last batch.
//!
//! All it asks is public: the command line, SQL functions, views and metrics. So it measures every version alike.

use super::{
    binary::Binary,
    files,
    load::{Measured, Start},
    scrape, server,
    worker::Worker,
};
use crate::ground::{Database, Ground, connect};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::time::Duration;

/// What waits in the database for the worker.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) rows: i32,
    pub(crate) batches: i32,
    /// A call of an SQL function that lets the worker begin.
    pub(crate) release: String,
    /// How every row ends.
    pub(crate) ends: Ends,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    Succeeded,
    Failed,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Run {
    #[serde(flatten)]
    pub(crate) measured: Measured,
    pub(crate) batches_per_second: f64,
    pub(crate) peak_memory_bytes: f64,
    /// Processor time of the worker with its start, in microseconds.
    pub(crate) cpu_us_per_row: f64,
    /// Processor time of the worker's sessions between release and end, in microseconds.
    pub(crate) session_cpu_us_per_row: f64,
    /// From an outcome to its commit.
    pub(crate) update_latency_seconds: Quantiles,
    pub(crate) outcomes_per_flush: f64,
    pub(crate) flushes_per_second: f64,
    pub(crate) rollbacks: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
}

/// A run that takes longer than this has gone wrong.
const RUN_LIMIT: Duration = Duration::from_secs(20 * 60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A batch of `rows` for `command`, in a database of its own.
pub(crate) async fn run_one_batch(
    ground: &Ground,
    musterd: &Binary,
    rows: i32,
    command: &str,
    ends: Ends,
    settings: &[&str],
) -> Result<Run> {
    let database = ground.database().await?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("small.ndjson");
    files::write_small(&file, rows)?;
    let batch = musterd.submit(&database, &file, command).await?;
    let work = Work { rows, batches: 1, release: format!("musterd.release({batch})"), ends };
    let run = run(ground, musterd, &database, &work, settings).await?;
    ground.drop_database(database).await?;
    Ok(run)
}

pub(crate) async fn run(
    ground: &Ground,
    musterd: &Binary,
    database: &Database,
    work: &Work,
    settings: &[&str],
) -> Result<Run> {
    let start = Start::now(ground, database).await?;
    let worker = Worker::start(musterd, database, settings).await?;
    // The worker is idle and connected: what follows is the walk of the rows and nothing else.
    let before = server::session_times(database).await?;
    let released = release(database, work).await?;
    tokio::time::timeout(RUN_LIMIT, until_done(&worker, work))
        .await
        .context("musterd did not finish in time")??;
    let wal = ground.wal().await?;
    let sessions = server::session_times(database).await?.since(&before);
    let took = Duration::from_secs_f64(last_end(database).await? - released);
    let metrics = worker.metrics().await?;
    let (peak_memory_bytes, processor_time) = (worker.peak_memory()?, worker.processor_time()?);
    worker.stop().await?;
    let measured = start.end(ground, database, work.rows, took, wal).await?;
    check(database, work).await?;

    let latency =
        |q| scrape::quantile(&metrics, "musterd_batcher_update_latency_seconds", q).unwrap_or(f64::NAN);
    let number = |name| scrape::value(&metrics, name).unwrap_or(f64::NAN);
    let flushes = number("musterd_batcher_flush_size_count");
    let rows = f64::from(work.rows);
    Ok(Run {
        measured,
        batches_per_second: f64::from(work.batches) / took.as_secs_f64(),
        peak_memory_bytes,
        cpu_us_per_row: processor_time * 1e6 / rows,
        session_cpu_us_per_row: sessions * 1e6 / rows,
        update_latency_seconds: Quantiles { p50: latency(0.5), p95: latency(0.95), p99: latency(0.99) },
        outcomes_per_flush: number("musterd_batcher_flush_size_sum") / flushes,
        flushes_per_second: flushes / took.as_secs_f64(),
        rollbacks: number("musterd_batcher_rollbacks_total"),
    })
}

/// Lets the worker begin; when that was, by the server's clock.
async fn release(database: &Database, work: &Work) -> Result<f64> {
    let client = connect(&database.url).await?;
    let sql = format!("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 FROM {}", work.release);
    let row = client.query_one(&sql, &[]).await?;
    client.close().await;
    Ok(row.get(0))
}

async fn until_done(worker: &Worker, work: &Work) -> Result<()> {
    let all = Some(f64::from(work.batches));
    while scrape::value(&worker.metrics().await?, "musterd_batches_completed_total") != all {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

/// When the last batch ended, by the server's clock.
async fn last_end(database: &Database) -> Result<f64> {
    let client = connect(&database.url).await?;
    let sql = "SELECT EXTRACT(EPOCH FROM max(finished_at))::float8 FROM musterd.batch_progress";
    let row = client.query_one(sql, &[]).await?;
    client.close().await;
    Ok(row.get(0))
}

/// The figures count only if every row has its outcome, every batch its end, and nothing is left over.
async fn check(database: &Database, work: &Work) -> Result<()> {
    let client = connect(&database.url).await?;
    let state = match work.ends {
        Ends::Succeeded => "succeeded",
        Ends::Failed => "failed",
    };
    let sql = format!(
        "SELECT (SELECT count(*) FROM musterd.results WHERE state = '{state}'),
                (SELECT sum({state})::bigint FROM musterd.batch_progress WHERE state = '{state}'),
                (SELECT count(*) FROM musterd.batch_progress WHERE state = '{state}'),
                (SELECT count(*) FROM musterd.blocks)"
    );
    let row = client.query_one(&sql, &[]).await?;
    client.close().await;
    let found: [Option<i64>; 4] = [row.get(0), row.get(1), row.get(2), row.get(3)];
    let rows = Some(i64::from(work.rows));
    ensure!(
        found == [rows, rows, Some(i64::from(work.batches)), Some(0)],
        "{work:?}, but results, rows of ended batches, ended batches and blocks left are {found:?}"
    );
    Ok(())
}
