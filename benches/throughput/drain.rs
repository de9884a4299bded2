//! A full queue of tasks: filled while it is paused, then drained by a worker from the resume to the last end.
//!
//! All it uses is public: SQL functions, the relation `musterd.tasks` and metrics. So it measures every version alike.

use super::{
    binary::Binary,
    load::{Measured, Start},
    scrape,
    worker::Worker,
};
use crate::ground::{Database, Ground, connect};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::{fmt::Write, time::Duration};
use tokio_postgres::Client;

/// How tasks come into the queue. Storage may treat the two differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enqueue {
    /// `INSERT … SELECT`, thousands in a statement.
    SetWise,
    /// A call of `musterd.enqueue` for each.
    OneByOne,
}

/// Tasks of one way, measured once.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Speed {
    pub(crate) tasks_per_second: f64,
    pub(crate) wal_bytes_per_task: f64,
    pub(crate) transactions_per_1000_tasks: f64,
    /// Processor time of PostgreSQL's sessions, in microseconds.
    pub(crate) server_cpu_us_per_task: f64,
}

impl From<Measured> for Speed {
    fn from(measured: Measured) -> Self {
        Self {
            tasks_per_second: measured.rows_per_second,
            wal_bytes_per_task: measured.wal_bytes_per_row,
            transactions_per_1000_tasks: measured.transactions_per_1000_rows,
            server_cpu_us_per_task: measured.server_cpu_us_per_row,
        }
    }
}

/// Tasks of one statement that inserts them.
const INSERTED_AT_ONCE: i32 = 5_000;
/// Single calls of one transaction; only the set-up is faster for it.
const CALLS_OF_A_TRANSACTION: i32 = 1_000;
/// A drain that takes longer than this has gone wrong.
const DRAIN_LIMIT: Duration = Duration::from_secs(20 * 60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Pauses the queue `default` and puts `tasks` of `command` into it.
pub(crate) async fn fill(database: &Database, command: &str, tasks: i32, how: Enqueue) -> Result<()> {
    let client = connect(&database.url).await?;
    client.query_one("SELECT musterd.pause_queue('default')", &[]).await?;
    match how {
        Enqueue::SetWise => insert(&client, command, tasks).await?,
        Enqueue::OneByOne => call(&client, command, tasks).await?,
    }
    client.close().await;
    Ok(())
}

async fn insert(client: &Client, command: &str, tasks: i32) -> Result<()> {
    let sql = "INSERT INTO musterd.tasks (command, payload)
               SELECT $1, jsonb_build_object('n', n) FROM generate_series($2::int, $3::int) n";
    for (first, last) in pieces(tasks, INSERTED_AT_ONCE) {
        client.execute(sql, &[&command, &first, &last]).await?;
    }
    Ok(())
}

/// One statement a task; the text of many of them is sent at once.
async fn call(client: &Client, command: &str, tasks: i32) -> Result<()> {
    for (first, last) in pieces(tasks, CALLS_OF_A_TRANSACTION) {
        let mut text = "BEGIN;".to_owned();
        for n in first..=last {
            write!(text, "SELECT musterd.enqueue('{command}', '{{\"n\": {n}}}');")?;
        }
        text.push_str("COMMIT");
        client.batch_execute(&text).await?;
    }
    Ok(())
}

/// The first and the last number of each piece of `1..=all`.
fn pieces(all: i32, size: i32) -> impl Iterator<Item = (i32, i32)> {
    (1..=all).step_by(size.unsigned_abs() as usize).map(move |first| (first, all.min(first + size - 1)))
}

/// A new worker drains what `fill` has put into the queue of `database`.
pub(crate) async fn drain(
    ground: &Ground,
    musterd: &Binary,
    database: &Database,
    tasks: i32,
    settings: &[&str],
) -> Result<Speed> {
    let start = Start::now(ground, database).await?;
    let worker = Worker::start(musterd, database, settings).await?;
    let took = resume_and_wait(database, &worker, tasks).await?;
    let wal = ground.wal().await?;
    worker.stop().await?;
    let measured = start.end(ground, database, tasks, took, wal).await?;
    check(database, tasks).await?;
    Ok(measured.into())
}

/// From the resume to the end of the last task, by the server's clock. `ended` is how many tasks this worker has ended then.
pub(crate) async fn resume_and_wait(database: &Database, worker: &Worker, ended: i32) -> Result<Duration> {
    let client = connect(&database.url).await?;
    let sql = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 FROM musterd.resume_queue('default')";
    let resumed: f64 = client.query_one(sql, &[]).await?.get(0);
    until_ended(worker, ended).await?;
    let sql = "SELECT EXTRACT(EPOCH FROM max(finished_at))::float8 FROM musterd.tasks";
    let last_end: f64 = client.query_one(sql, &[]).await?.get(0);
    client.close().await;
    Ok(Duration::from_secs_f64(last_end - resumed))
}

/// Waits until the worker has ended so many tasks since its start.
pub(crate) async fn until_ended(worker: &Worker, tasks: i32) -> Result<()> {
    let all = f64::from(tasks);
    let wait = async {
        while ended(&worker.metrics().await?) < all {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(DRAIN_LIMIT, wait).await.context("musterd did not end the tasks in time")?
}

/// The series appears with the first task that ends.
fn ended(metrics: &str) -> f64 {
    scrape::value(metrics, "musterd_tasks_total{state=\"succeeded\"}").unwrap_or(0.0)
}

/// The figures count only if every task has succeeded and there is no other.
pub(crate) async fn check(database: &Database, tasks: i32) -> Result<()> {
    let client = connect(&database.url).await?;
    let sql = "SELECT count(*), count(*) FILTER (WHERE state = 'succeeded') FROM musterd.tasks";
    let row = client.query_one(sql, &[]).await?;
    client.close().await;
    let found: [i64; 2] = [row.get(0), row.get(1)];
    ensure!(
        found == [i64::from(tasks); 2],
        "{tasks} tasks, but those in the database and those that succeeded are {found:?}"
    );
    Ok(())
}
