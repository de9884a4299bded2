//! What people page through: batches, and the rows of one. By key, never by offset, and never by a scan.

pub(super) mod reader;
mod sets;

use super::batches::Progress;
use crate::{error_group::ErrorGroup, json::Json};
use reader::Reader;
use serde::Serialize;
use tokio_postgres::{Client, Error};

/// Which batches.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub states: Option<Vec<String>>,
    pub command: Option<String>,
    pub queue: Option<String>,
    /// Only ids below this: the next page begins where the last one ended.
    pub before: Option<i64>,
    pub limit: i64,
}

/// The newest batches first.
pub async fn batches(client: &Client, filter: &Filter) -> Result<Vec<Progress>, Error> {
    // The page first: counts are summed for the batches on it, not for all there are.
    const SQL: &str = "WITH page AS MATERIALIZED (
            SELECT b.id
              FROM musterd.batches b
              JOIN musterd.task_records t ON t.id = b.id
             WHERE ($1::bigint IS NULL OR b.id < $1)
               AND ($2::text[] IS NULL
                    OR musterd.shown_state(t.state, CASE WHEN b.canary IS NULL THEN b.next_line ELSE 2 END, b.generation, b.aborting)::text = ANY ($2))
               AND ($3::text IS NULL OR b.command = $3)
               AND ($4::text IS NULL OR b.queue = $4)
             ORDER BY b.id DESC
             LIMIT $5)
        SELECT p.id, p.state::text, p.command, p.queue, p.priority, p.rows, p.queued, p.running, p.succeeded, p.failed,
               p.aborted, p.aborting, p.generation, p.parent_id, p.created_at, p.finished_at, p.outputs, p.keep::text, p.data_held,
               p.data_gone_at, p.record_until, p.outputs_gone, p.archive
          FROM page
          JOIN musterd.batch_progress p ON p.id = page.id
         ORDER BY p.id DESC";
    let Filter { states, command, queue, before, limit } = filter;
    let rows = client.query(SQL, &[before, states, command, queue, limit]).await?;
    Ok(rows.iter().map(Progress::read).collect())
}

/// The newest batches that have not ended, through the index of those.
pub async fn open_batches(client: &Client, limit: i64) -> Result<Vec<Progress>, Error> {
    const SQL: &str = "WITH page AS MATERIALIZED (
            SELECT b.id FROM musterd.batches b WHERE b.summarized_at IS NULL ORDER BY b.id DESC LIMIT $1)
        SELECT p.id, p.state::text, p.command, p.queue, p.priority, p.rows, p.queued, p.running, p.succeeded, p.failed,
               p.aborted, p.aborting, p.generation, p.parent_id, p.created_at, p.finished_at, p.outputs, p.keep::text, p.data_held,
               p.data_gone_at, p.record_until, p.outputs_gone, p.archive
          FROM page
          JOIN musterd.batch_progress p ON p.id = page.id
         ORDER BY p.id DESC";
    Ok(client.query(SQL, &[&limit]).await?.iter().map(Progress::read).collect())
}

/// Which rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    Queued,
    Running,
    Succeeded,
    Failed,
    /// Rows that failed with an error of this group.
    InGroup(ErrorGroup),
    /// Rows that failed in this generation, those that were run again since among them.
    FailedIn(i32),
    Aborted,
}

/// A row as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct RowView {
    pub line: i32,
    pub state: &'static str,
    /// The attempt that ended, is running or comes next; none before the first.
    pub attempt: Option<i32>,
    pub error: Option<String>,
    /// The group of its error, and the handler's own name for it.
    pub error_group: Option<ErrorGroup>,
    pub error_code: Option<String>,
    /// As it was submitted.
    pub input: Json,
    pub result: Option<Json>,
    pub finished_at: Option<jiff::Timestamp>,
    /// When the handler started the first of the rows that were written with this one.
    pub started_at: Option<jiff::Timestamp>,
    /// How long it ran for a row, on average over those.
    pub run_seconds: Option<f32>,
}

impl RowView {
    /// Roughly what it takes in memory.
    fn weight(&self) -> usize {
        let error = self.error.as_ref().map_or(0, String::len);
        self.input.len() + self.result.as_ref().map_or(0, Json::len) + error
    }
}

/// A page of rows, and the line with which the next one begins.
#[derive(Clone, Debug, Serialize)]
pub struct RowPage {
    pub batch: i64,
    pub rows: Vec<RowView>,
    pub next_from: Option<i32>,
}

/// Rows from line `from` on, in order: at most `limit`, and at most `most_bytes` of payloads (but one row at least).
pub async fn rows(
    client: &Client,
    batch: i64,
    which: Which,
    from: i32,
    limit: i64,
    most_bytes: usize,
) -> Result<RowPage, Error> {
    let mut reader = Reader::new(batch, which, from);
    let (mut rows, mut bytes, mut is_cut) = (Vec::new(), 0_usize, false);
    while !is_cut && let Some(left @ 1..) = limit.checked_sub(rows.len() as i64) {
        let Some(read) = reader.next_page(client, left, most_bytes).await? else { break };
        for row in read {
            bytes = bytes.saturating_add(row.weight());
            is_cut |= bytes > most_bytes && !rows.is_empty();
            if is_cut {
                break;
            }
            rows.push(row);
        }
    }
    let is_full = is_cut || rows.len() as i64 == limit;
    let next_from = rows.last().filter(|_| is_full).and_then(|last| last.line.checked_add(1));
    Ok(RowPage { batch, rows, next_from })
}
