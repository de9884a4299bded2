//! What people page through: batches, and the rows of one. By key, never by offset, and never by a scan.

use super::{batches::Progress, moment, page};
use crate::json::Json;
use serde::Serialize;
use tokio_postgres::{Client, Error, Row, types::ToSql};

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
              JOIN musterd.tasks t ON t.id = b.id
             WHERE ($1::bigint IS NULL OR b.id < $1)
               AND ($2::text[] IS NULL OR $2 @> ARRAY[
                    CASE WHEN t.state = 'running' AND b.next_line = 1 AND b.generation = 1 AND NOT b.aborting
                         THEN 'queued' ELSE t.state::text END])
               AND ($3::text IS NULL OR b.command = $3)
               AND ($4::text IS NULL OR b.queue = $4)
             ORDER BY b.id DESC
             LIMIT $5)
        SELECT p.id, p.state::text, p.command, p.queue, p.priority, p.rows, p.queued, p.running, p.succeeded, p.failed,
               p.aborted, p.aborting, p.generation, p.parent_id, p.created_at, p.finished_at, p.outputs
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
               p.aborted, p.aborting, p.generation, p.parent_id, p.created_at, p.finished_at, p.outputs
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
    Aborted,
}

/// A row as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct RowView {
    pub line: i32,
    pub state: String,
    /// The attempt that ended, is running or comes next; none before the first.
    pub attempt: Option<i32>,
    pub error: Option<String>,
    pub input: Json,
    pub result: Option<Json>,
    pub finished_at: Option<jiff::Timestamp>,
}

impl RowView {
    fn read(row: &Row) -> Self {
        Self {
            line: row.get("line"),
            state: row.get("state"),
            attempt: row.get("attempt"),
            error: row.get("error"),
            input: row.get("input"),
            result: row.get("result"),
            finished_at: moment::maybe(row, "finished_at"),
        }
    }

    /// Roughly what it takes in memory.
    fn weight(&self) -> usize {
        let error = self.error.as_ref().map_or(0, String::len);
        self.input.len() + self.result.as_ref().map_or(0, Json::len) + error
    }
}

/// Lines have no gaps, so a page of all rows is a range of them.
const ALL: &str = "SELECT line, state::text, attempt, error, input, result, finished_at
      FROM musterd.batch_rows
     WHERE batch_id = $1 AND line BETWEEN $2 AND $2 - 1 + LEAST($3::bigint, 2147483647 - $2)
     ORDER BY line";
const SUCCEEDED: &str = "WITH page AS MATERIALIZED (
        SELECT r.* FROM musterd.results r
         WHERE r.batch_id = $1 AND r.line >= $2 AND r.state = 'succeeded' ORDER BY r.line LIMIT $3)
    SELECT r.line, r.state::text, r.attempt, r.error, i.input, r.result, r.finished_at
      FROM page r JOIN musterd.rows i ON i.batch_id = r.batch_id AND i.line = r.line
     ORDER BY r.line";
const FAILED: &str = "WITH page AS MATERIALIZED (
        SELECT r.* FROM musterd.results r
         WHERE r.batch_id = $1 AND r.line >= $2 AND r.state = 'failed' ORDER BY r.line LIMIT $3)
    SELECT r.line, r.state::text, r.attempt, r.error, i.input, r.result, r.finished_at
      FROM page r JOIN musterd.rows i ON i.batch_id = r.batch_id AND i.line = r.line
     ORDER BY r.line";
const QUEUED: &str = include_str!("sql/queued_rows.sql");
const RUNNING: &str =
    "SELECT o.line, 'running' AS state, k.attempt, NULL::text AS error, o.input, NULL::jsonb AS result,
           NULL::timestamptz AS finished_at
      FROM musterd.blocks k
     CROSS JOIN LATERAL (
           SELECT i.line, i.input FROM musterd.rows i
            WHERE i.batch_id = k.batch_id AND i.line BETWEEN GREATEST(k.first_line, $2) AND k.last_line
              AND (k.lines IS NULL OR i.line = ANY (k.lines))
              AND NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = i.batch_id AND r.line = i.line)
            ORDER BY i.line LIMIT $3) o
     WHERE k.batch_id = $1 AND k.worker IS NOT NULL AND k.last_line >= $2
     ORDER BY o.line LIMIT $3";
const ABORTED: &str = "SELECT i.line, 'aborted' AS state, NULL::int AS attempt, NULL::text AS error, i.input,
           NULL::jsonb AS result, NULL::timestamptz AS finished_at
      FROM musterd.rows i
     WHERE i.batch_id = $1 AND i.line >= $2
       AND NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = i.batch_id AND r.line = i.line)
       AND EXISTS (SELECT FROM musterd.batches b WHERE b.id = $1 AND b.summarized_at IS NOT NULL)
     ORDER BY i.line LIMIT $3";

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
    let sql = match which {
        Which::All => ALL,
        Which::Queued => QUEUED,
        Which::Running => RUNNING,
        Which::Succeeded => SUCCEEDED,
        Which::Failed => FAILED,
        Which::Aborted => ABORTED,
    };
    let parameters: [&(dyn ToSql + Sync); 3] = [&batch, &from, &limit];
    let found = client.query_raw(sql, parameters).await?;
    let page = page::gather(found, most_bytes, RowView::read, RowView::weight).await?;
    let is_full = page.is_cut || page.items.len() as i64 == limit;
    let next_from = page.items.last().filter(|_| is_full).and_then(|last| last.line.checked_add(1));
    Ok(RowPage { batch, rows: page.items, next_from })
}
