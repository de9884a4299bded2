//! Submitting a file, as NDJSON and as CSV, beside a raw COPY of the same rows.
//!
//! The COPY is a strong form: one binary stream that was encoded before the clock starts, into a table with nothing but
//! its primary key. `musterd submit` is the whole command, from the start of its process to its end.

use super::{
    binary::Binary,
    files,
    load::{Measured, Start},
    server,
};
use crate::ground::{Database, Ground, connect, processor_times};
use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::SinkExt;
use serde::Serialize;
use std::path::Path;

/// The three ways of one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Submits {
    pub(crate) raw_copy: Stored,
    pub(crate) ndjson: Stored,
    pub(crate) csv: Stored,
}

/// Rows that were stored once.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Stored {
    #[serde(flatten)]
    pub(crate) measured: Measured,
    pub(crate) disk_bytes_per_row: f64,
    /// Processor time of the client process, in microseconds; zero for the COPY, whose client is the benchmark.
    pub(crate) client_cpu_us_per_row: f64,
}

const TABLE: &str = "CREATE SCHEMA raw;
    CREATE TABLE raw.rows (batch_id bigint, line int, input jsonb, PRIMARY KEY (batch_id, line))";
const COPY: &str = "COPY raw.rows (batch_id, line, input) FROM STDIN (FORMAT binary)";

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, rows: i32) -> Result<Submits> {
    let dir = tempfile::tempdir()?;
    let (ndjson, csv) = (dir.path().join("customers.ndjson"), dir.path().join("customers.csv"));
    files::write_ndjson(&ndjson, rows)?;
    files::write_csv(&csv, rows)?;
    Ok(Submits {
        raw_copy: copied(ground, rows).await?,
        ndjson: submitted(ground, musterd, &ndjson, rows).await?,
        csv: submitted(ground, musterd, &csv, rows).await?,
    })
}

/// `musterd submit` of `file` into a database of its own.
async fn submitted(ground: &Ground, musterd: &Binary, file: &Path, rows: i32) -> Result<Stored> {
    let database = ground.database().await?;
    let (stored, _) = submit(ground, musterd, &database, file, rows).await?;
    ground.drop_database(database).await?;
    Ok(stored)
}

/// `musterd submit` of `file` into `database` as a held batch of `noop`; its id.
pub(crate) async fn submit(
    ground: &Ground,
    musterd: &Binary,
    database: &Database,
    file: &Path,
    rows: i32,
) -> Result<(Stored, i64)> {
    let size = server::size(ground, database).await?;
    let start = Start::now(ground, database).await?;
    let client_time = ended_children()?;
    let batch = musterd.submit(database, file, "noop").await?;
    let (took, wal) = (start.elapsed(), ground.wal().await?);
    let client_time = ended_children()? - client_time;
    let measured = start.end(ground, database, rows, took, wal).await?;
    check(database, "SELECT count(*) FROM musterd.rows", rows).await?;
    let grown = server::size(ground, database).await? - size;
    let stored = Stored {
        measured,
        disk_bytes_per_row: grown / f64::from(rows),
        client_cpu_us_per_row: client_time * 1e6 / f64::from(rows),
    };
    Ok((stored, batch))
}

async fn copied(ground: &Ground, rows: i32) -> Result<Stored> {
    let database = ground.database().await?;
    let pieces = files::copy_stream(rows);
    let client = connect(&database.url).await?;
    client.batch_execute(TABLE).await?;
    client.close().await;
    let size = server::size_of(ground, &database, "raw").await?;
    let start = Start::now(ground, &database).await?;
    copy(&database, pieces).await?;
    let (took, wal) = (start.elapsed(), ground.wal().await?);
    let measured = start.end(ground, &database, rows, took, wal).await?;
    check(&database, "SELECT count(*) FROM raw.rows", rows).await?;
    let grown = server::size_of(ground, &database, "raw").await? - size;
    ground.drop_database(database).await?;
    Ok(Stored { measured, disk_bytes_per_row: grown / f64::from(rows), client_cpu_us_per_row: 0.0 })
}

async fn copy(database: &Database, pieces: Vec<Bytes>) -> Result<()> {
    let client = connect(&database.url).await?;
    let mut sink = std::pin::pin!(client.copy_in::<_, Bytes>(COPY).await?);
    for piece in pieces {
        sink.feed(piece).await?;
    }
    sink.close().await?;
    client.close().await;
    Ok(())
}

async fn check(database: &Database, count: &str, rows: i32) -> Result<()> {
    let client = connect(&database.url).await?;
    let found: i64 = client.query_one(count, &[]).await?.get(0);
    client.close().await;
    ensure!(found == i64::from(rows), "{rows} rows were sent, but {found} are stored");
    Ok(())
}

/// Processor time of this process's children that have ended, in seconds.
fn ended_children() -> Result<f64> {
    let [_, _, user, system] = processor_times(std::process::id())?;
    Ok(user + system)
}
