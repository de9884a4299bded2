//! Errors in groups: of one batch, and of all batches since a time. Counted from the failures by index, never kept.

use crate::error_group;
use serde::Serialize;
use tokio_postgres::{Error, GenericClient, Row};

/// The failed rows of a batch that have their error in common.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    pub group: String,
    pub count: i64,
    /// Of all rows that failed, from 0 to 1.
    pub share: f64,
    pub first_line: i32,
    pub last_line: i32,
    /// The most that one of them had.
    pub attempts: i32,
    /// The handler's own name for this kind of failure.
    pub code: Option<String>,
    /// What the errors have in common.
    pub pattern: String,
    /// The error of the first line.
    pub sample: String,
}

/// Failed rows of the batches of a command that have their error in common.
#[derive(Clone, Debug, Serialize)]
pub struct Common {
    pub command: String,
    pub group: String,
    pub count: i64,
    pub share: f64,
    pub batches: i64,
    pub first_batch: i64,
    pub last_batch: i64,
    pub code: Option<String>,
    pub pattern: String,
    /// Of the newest batch.
    pub sample: String,
}

/// The largest groups of a batch, at most `most`; of one generation, or of the failures as they are.
pub async fn of_batch(
    client: &impl GenericClient,
    batch: i64,
    generation: Option<i32>,
    most: i32,
) -> Result<Vec<Group>, Error> {
    const SQL: &str = "SELECT error_group, count, share, first_line, last_line, attempts, error_code, COALESCE(sample, '') AS sample
          FROM musterd.batch_errors($1, $2, $3)";
    let read = |row: &Row| Group {
        group: row.get("error_group"),
        count: row.get("count"),
        share: row.get("share"),
        first_line: row.get("first_line"),
        last_line: row.get("last_line"),
        attempts: row.get("attempts"),
        code: row.get("error_code"),
        pattern: error_group::pattern(row.get("sample")),
        sample: row.get("sample"),
    };
    Ok(client.query(SQL, &[&batch, &generation, &most]).await?.iter().map(read).collect())
}

/// The largest groups of all batches, or of those of one command, that failed since then.
pub async fn since(
    client: &impl GenericClient,
    seconds: f64,
    command: Option<&str>,
    most: i32,
) -> Result<Vec<Common>, Error> {
    const SQL: &str =
        "SELECT command, error_group, count, share, batches, first_batch, last_batch, error_code,
               COALESCE(sample, '') AS sample
          FROM musterd.errors(pg_catalog.now() - pg_catalog.make_interval(secs => $1::float8), $2, $3)";
    let read = |row: &Row| Common {
        command: row.get("command"),
        group: row.get("error_group"),
        count: row.get("count"),
        share: row.get("share"),
        batches: row.get("batches"),
        first_batch: row.get("first_batch"),
        last_batch: row.get("last_batch"),
        code: row.get("error_code"),
        pattern: error_group::pattern(row.get("sample")),
        sample: row.get("sample"),
    };
    Ok(client.query(SQL, &[&seconds, &command, &most]).await?.iter().map(read).collect())
}
