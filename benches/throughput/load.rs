//! A batch of rows to work on, and what a measurement of it gives.

use crate::ground::{Database, Ground, Transactions, Wal, connect};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Lines of a block, everywhere: what the shipped configuration has.
pub(crate) const BLOCK: i32 = 500;

/// One way of working through the rows, measured once.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) rows_per_second: f64,
    pub(crate) wal_bytes_per_row: f64,
    pub(crate) transactions_per_1000_rows: f64,
    /// Processor time of PostgreSQL's sessions, in microseconds.
    pub(crate) server_cpu_us_per_row: f64,
}

/// Before the clock starts.
pub(crate) struct Start {
    wal: Wal,
    transactions: Transactions,
    processor_time: f64,
    at: Instant,
}

impl Start {
    pub(crate) async fn now(ground: &Ground, database: &Database) -> Result<Self> {
        ground.settle().await?;
        let transactions = ground.transactions(database).await?;
        let (wal, processor_time) = (ground.wal().await?, ground.processor_time()?);
        Ok(Self { wal, transactions, processor_time, at: Instant::now() })
    }

    /// After the clock has stopped; `took` when it was another clock than ours.
    pub(crate) async fn end(
        self,
        ground: &Ground,
        database: &Database,
        rows: i32,
        took: Duration,
        wal: Wal,
    ) -> Result<Measured> {
        let (before, after) = (self.transactions, ground.transactions(database).await?);
        ensure!(after.deadlocks == 0, "{} deadlocks", after.deadlocks);
        let transactions = after.committed + after.rolled_back - before.committed - before.rolled_back;
        let rows = f64::from(rows);
        Ok(Measured {
            rows_per_second: rows / took.as_secs_f64(),
            wal_bytes_per_row: wal.bytes_since(self.wal) / rows,
            transactions_per_1000_rows: transactions as f64 * 1000.0 / rows,
            server_cpu_us_per_row: (ground.processor_time()? - self.processor_time) * 1e6 / rows,
        })
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.at.elapsed()
    }
}

/// A held batch of `noop` rows; its id.
pub(crate) async fn load_batch(database: &Database, rows: i32) -> Result<i64> {
    let client = connect(&database.url).await?;
    let id: i64 = client.query_one("SELECT musterd.reserve_batch_id()", &[]).await?.get(0);
    // As a submit cuts them: 500 lines a chunk.
    let insert = "INSERT INTO musterd.chunks (batch_id, first_line, last_line, inputs)
                  SELECT $1, min(n), max(n), string_agg(format('{\"n\": %s}', n), E'\\n' ORDER BY n)
                    FROM generate_series(1, $2::int) n GROUP BY (n - 1) / 500";
    client.execute(insert, &[&id, &rows]).await?;
    let open = "SELECT musterd.open_batch(p_id => $1, p_command => 'noop', p_rows => $2, p_hold => true)";
    client.query_one(open, &[&id, &rows]).await?;
    client.close().await;
    Ok(id)
}

/// The figures count only if every row has its result.
pub(crate) async fn check_results(database: &Database, rows: i32) -> Result<()> {
    let client = connect(&database.url).await?;
    let sql = "SELECT (SELECT count(*) FROM musterd.results WHERE state = 'succeeded'),
                      (SELECT sum(succeeded) FROM musterd.outcomes), (SELECT count(*) FROM musterd.blocks)";
    let row = client.query_one(sql, &[]).await?;
    client.close().await;
    let (results, tallied, blocks): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    ensure!(
        results == i64::from(rows) && tallied == results && blocks == 0,
        "{rows} rows, but {results} results, {tallied} tallied and {blocks} blocks left"
    );
    Ok(())
}
