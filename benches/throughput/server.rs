//! What the server itself says of a database: the size of its tables and the work of its sessions.

use crate::ground::{Database, Ground, connect};
use anyhow::{Context, Result};
use std::collections::HashMap;

/// Bytes on disk of everything in the schema `musterd`, indexes and TOAST included, after a checkpoint.
pub(crate) async fn size(ground: &Ground, database: &Database) -> Result<f64> {
    size_of(ground, database, "musterd").await
}

/// The same for another schema.
pub(crate) async fn size_of(ground: &Ground, database: &Database, schema: &str) -> Result<f64> {
    ground.settle().await?;
    let client = connect(&database.url).await?;
    let sql = "SELECT COALESCE(sum(pg_total_relation_size(c.oid)), 0)::bigint
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = $1 AND c.relkind IN ('r', 'm')";
    let bytes: i64 = client.query_one(sql, &[&schema]).await?.get(0);
    client.close().await;
    Ok(bytes as f64)
}

/// Processor time of the sessions of a database that are connected, by process, in seconds.
pub(crate) struct SessionTimes(HashMap<i32, f64>);

impl SessionTimes {
    /// What the sessions have used since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> f64 {
        self.0.iter().map(|(pid, time)| time - earlier.0.get(pid).unwrap_or(&0.0)).sum()
    }
}

pub(crate) async fn session_times(database: &Database) -> Result<SessionTimes> {
    let client = connect(&database.url).await?;
    let sql = "SELECT pid FROM pg_stat_activity
                WHERE datname = $1 AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
    let pids: Vec<i32> = client.query(sql, &[&database.name]).await?.iter().map(|row| row.get(0)).collect();
    client.close().await;
    // A session that has ended between the query and this line is left out.
    Ok(SessionTimes(pids.into_iter().filter_map(|pid| Some((pid, time_on_processor(pid).ok()?))).collect()))
}

/// In nanoseconds in the file, so that short runs can be compared; a session is a process with one thread.
fn time_on_processor(pid: i32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
    let nanoseconds: f64 = text.split(' ').next().context("an empty file")?.parse()?;
    Ok(nanoseconds / 1e9)
}
