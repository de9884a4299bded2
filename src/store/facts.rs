//! What all blocks of a batch share: its context, its limits, and how many of its rows may fail.

use super::query::{QueryError, failed};
use crate::json::Json;
use deadpool_postgres::Object;
use std::time::Duration;
use uuid::Uuid;

/// Read once per batch and worker.
#[derive(Debug)]
pub struct BatchFacts {
    pub context: Json,
    pub max_attempts: Option<i32>,
    pub row_timeout: Option<Duration>,
    pub traceparent: Option<String>,
    /// The batch is to stop when more of its rows have failed than it allows.
    pub has_budget: bool,
}

/// `None` when the batch does not exist any more.
pub async fn read(client: &Object, batch: i64, uid: Uuid) -> Result<Option<BatchFacts>, QueryError> {
    const SQL: &str = "SELECT t.payload, b.max_attempts,
               (EXTRACT(EPOCH FROM b.row_timeout) * 1000)::bigint, t.traceparent, b.on_budget IS NOT NULL
          FROM musterd.batches b JOIN musterd.task_records t ON t.id = b.id WHERE b.id = $1 AND b.uid = $2";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare reading a batch"))?;
    let row = client.query_opt(&statement, &[&batch, &uid]).await.map_err(failed("read a batch"))?;
    Ok(row.map(|row| BatchFacts {
        context: row.get(0),
        max_attempts: row.get(1),
        row_timeout: row
            .get::<_, Option<i64>>(2)
            .map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(1).max(1))),
        traceparent: row.get(3),
        has_budget: row.get(4),
    }))
}

/// What the database says about the budget of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// It may go on: so many rows may fail, and so many have.
    Within { may_fail: i64, has_failed: i64 },
    /// The batch gives out no more rows: it was stopped now or before.
    Stopped,
    /// Its canary has ended and was judged now: the rest runs, or it is held.
    Canary,
    /// Another transaction has the batch locked: ask again.
    Busy,
}

/// Stops the batch if its budget is spent. Decided under its lock, without waiting for it.
pub async fn check_budget(client: &Object, batch: i64) -> Result<Budget, QueryError> {
    const SQL: &str = "SELECT verdict, may_fail, has_failed FROM musterd.check_budget($1)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare checking a budget"))?;
    let row = client.query_one(&statement, &[&batch]).await.map_err(failed("check the budget of a batch"))?;
    Ok(match row.get(0) {
        "within" => {
            let number = |index: usize| row.get::<_, Option<i64>>(index);
            Budget::Within {
                may_fail: number(1).unwrap_or(i64::MAX),
                has_failed: number(2).unwrap_or_default(),
            }
        }
        "busy" => Budget::Busy,
        "canary" => Budget::Canary,
        _ => Budget::Stopped,
    })
}
