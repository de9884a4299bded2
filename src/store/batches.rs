//! Batches: counted, finished, looked at.

use super::moment;
use crate::json::Json;
use deadpool_postgres::Object;
use serde::Serialize;
use tokio_postgres::{Client, Error, GenericClient, Row};

/// A batch in which nothing can change any more, counted from its results in the same snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    pub id: i64,
    pub generation: i32,
    pub rows: i32,
    pub succeeded: i32,
    pub failed: i32,
    /// Some rows added text to output files.
    pub outputs: bool,
}

/// What one look at a scope found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Over, and not finished yet.
    Closed(Closed),
    /// A task with children: the completing transaction does its own counting.
    Parent,
    /// Still going on, or finished already.
    Nothing,
}

/// Whether a scope is over. One statement, one snapshot: a batch that is closed in it stays closed, and its count
/// right, unless its generation or its number of rows changes.
///
/// The range of lines holds for every result. It is there for the planner: with it a count goes through the keys, and
/// the ten results of one batch are not looked for among all results of all batches, with all their text.
pub async fn look(client: &impl GenericClient, id: i64) -> Result<Look, Error> {
    const SQL: &str = "WITH b AS MATERIALIZED (
            SELECT b.id, b.generation, b.rows
              FROM musterd.batches b
             WHERE b.id = $1 AND b.summarized_at IS NULL
               AND (b.aborting OR (b.open AND b.next_line > b.rows))
               AND NOT EXISTS (SELECT FROM musterd.blocks k
                                WHERE k.batch_id = b.id AND (k.worker IS NOT NULL OR NOT b.aborting)))
        SELECT b.id, b.generation, b.rows, s.succeeded, f.failed,
               EXISTS (SELECT FROM musterd.tallies y WHERE y.batch_id BETWEEN b.id AND b.id AND y.outputs) AS outputs,
               false AS parent
          FROM b
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(*)::int AS failed
                 FROM musterd.results r
                WHERE r.batch_id = b.id AND r.line BETWEEN 1 AND b.rows AND r.state = 'failed') f
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(*)::int - f.failed AS succeeded
                 FROM musterd.results r WHERE r.batch_id = b.id AND r.line BETWEEN 1 AND b.rows) s
        UNION ALL
        SELECT t.id, 0, 0, 0, 0, false, true
          FROM musterd.tasks t
         WHERE t.id = $1 AND t.state = 'waiting'";
    Ok(match client.query_opt(SQL, &[&id]).await? {
        None => Look::Nothing,
        Some(row) if row.get("parent") => Look::Parent,
        Some(row) => Look::Closed(Closed {
            id: row.get("id"),
            generation: row.get("generation"),
            rows: row.get("rows"),
            succeeded: row.get("succeeded"),
            failed: row.get("failed"),
            outputs: row.get("outputs"),
        }),
    })
}

/// The answer of the completing transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// This call finished the scope.
    Completed,
    /// Another worker holds the scope's lock: it may be looking at an older state. Try again.
    Locked,
    /// The count was of another state of the batch. Count again.
    Stale,
    /// Not over.
    Open,
    /// Finished before.
    Ended,
    Missing,
    /// Over, but its files have to be uploaded first.
    NeedsUpload,
}

/// Finishes a scope, exactly once, in a transaction of its own.
pub async fn complete(
    client: &mut Object,
    id: i64,
    closed: Option<&Closed>,
    outputs: Option<&Json>,
) -> Result<Completion, Error> {
    const SQL: &str = "SELECT musterd.complete_scope($1, $2, $3, $4, $5, $6)";
    let statement = client.prepare_cached(SQL).await?;
    let transaction = client
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
        .start()
        .await?;
    let (generation, rows) = (closed.map(|c| c.generation), closed.map(|c| c.rows));
    let (succeeded, failed) = (closed.map(|c| c.succeeded), closed.map(|c| c.failed));
    let row =
        transaction.query_one(&statement, &[&id, &generation, &rows, &succeeded, &failed, &outputs]).await?;
    let answer = match row.get::<_, &str>(0) {
        "completed" => Completion::Completed,
        "locked" => Completion::Locked,
        "stale" => Completion::Stale,
        "open" => Completion::Open,
        "ended" => Completion::Ended,
        _ => Completion::Missing,
    };
    match answer {
        // Open, too: a parent that is not over may have aborted its children.
        Completion::Completed | Completion::Open => transaction.commit().await?,
        // Nothing was changed: no empty transaction is committed.
        _ => transaction.rollback().await?,
    }
    Ok(answer)
}

/// Of these scopes, those that are over and not finished, and those that have used up their budget of failures.
pub async fn worth_a_look(client: &Object, ids: &[i64]) -> Result<(Vec<Over>, Vec<OverBudget>), Error> {
    const SQL: &str = "SELECT b.id, NULL::text AS budget,
               EXISTS (SELECT FROM musterd.tallies y WHERE y.batch_id BETWEEN b.id AND b.id AND y.outputs) AS outputs
          FROM musterd.batches b
         WHERE b.id = ANY ($1) AND b.summarized_at IS NULL AND (b.aborting OR (b.open AND b.next_line > b.rows))
           AND NOT EXISTS (SELECT FROM musterd.blocks k
                            WHERE k.batch_id = b.id AND (k.worker IS NOT NULL OR NOT b.aborting))
        UNION ALL
        SELECT p.id, NULL, false FROM musterd.tasks p
         WHERE p.id = ANY ($1) AND p.state = 'waiting'
           AND (p.aborting OR p.on_child_failure = 'abort_siblings'
                OR NOT EXISTS (SELECT FROM musterd.tasks c
                                WHERE c.parent_id = p.id AND c.state IN ('held', 'scheduled', 'queued', 'running', 'waiting')))
        UNION ALL
        SELECT b.id, b.on_budget, false
          FROM musterd.batches b
         WHERE b.id = ANY ($1) AND b.open AND b.on_budget IS NOT NULL
           -- With nothing left to stop it is over.
           AND (b.next_line <= b.rows OR EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id))
           AND (SELECT COALESCE(pg_catalog.sum(t.failed), 0) FROM musterd.tallies t WHERE t.batch_id = b.id)
               > COALESCE(pg_catalog.floor(b.rows * b.max_failed_percent::numeric / 100), b.max_failed)";
    let statement = client.prepare_cached(SQL).await?;
    let (mut over, mut spent) = (Vec::new(), Vec::new());
    for row in client.query(&statement, &[&ids]).await? {
        let id: i64 = row.get(0);
        match row.get::<_, Option<&str>>(1) {
            None => over.push(Over { id, outputs: row.get(2) }),
            Some("abort") => spent.push(OverBudget { id, action: BudgetAction::Abort }),
            Some(_) => spent.push(OverBudget { id, action: BudgetAction::Hold }),
        }
    }
    Ok((over, spent))
}

/// A scope that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    pub id: i64,
    /// Its end needs an upload.
    pub outputs: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverBudget {
    pub id: i64,
    pub action: BudgetAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetAction {
    Hold,
    Abort,
}

/// Does to a batch what it asked for once too many of its rows had failed.
pub async fn apply_budget(client: &Object, over: OverBudget) -> Result<(), Error> {
    let sql = match over.action {
        BudgetAction::Hold => "SELECT musterd.hold($1)",
        BudgetAction::Abort => "SELECT musterd.abort($1)",
    };
    client.query(sql, &[&over.id]).await.map(|_| ())
}

/// Every scope that is over and was not finished: what the sweep is for.
pub async fn unfinished(client: &Object) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT b.id
          FROM musterd.batches b
         WHERE b.summarized_at IS NULL AND (b.aborting OR (b.open AND b.next_line > b.rows))
           AND NOT EXISTS (SELECT FROM musterd.blocks k
                            WHERE k.batch_id = b.id AND (k.worker IS NOT NULL OR NOT b.aborting))
        UNION ALL
        SELECT p.id
          FROM musterd.tasks p
         WHERE p.state = 'waiting'
           AND NOT EXISTS (SELECT FROM musterd.tasks c
                            WHERE c.parent_id = p.id AND c.state NOT IN ('succeeded', 'failed', 'aborted'))";
    let rows = client.query(SQL, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A batch as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Progress {
    pub id: i64,
    pub state: String,
    pub command: String,
    pub queue: String,
    pub priority: i32,
    pub rows: i32,
    pub queued: i32,
    pub running: i32,
    pub succeeded: i32,
    pub failed: i32,
    pub aborted: i32,
    /// Abort was asked for; it ends when no worker holds a block of it.
    pub aborting: bool,
    pub generation: i32,
    pub parent_id: Option<i64>,
    pub created_at: jiff::Timestamp,
    pub finished_at: Option<jiff::Timestamp>,
    pub outputs: Option<Json>,
}

impl Progress {
    pub(super) fn read(row: &Row) -> Self {
        let mut progress = Self {
            id: row.get("id"),
            state: row.get("state"),
            command: row.get("command"),
            queue: row.get("queue"),
            priority: row.get("priority"),
            rows: row.get("rows"),
            queued: row.get("queued"),
            running: row.get("running"),
            succeeded: row.get("succeeded"),
            failed: row.get("failed"),
            aborted: row.get("aborted"),
            aborting: row.get("aborting"),
            generation: row.get("generation"),
            parent_id: row.get("parent_id"),
            created_at: moment::of(row, "created_at"),
            finished_at: moment::maybe(row, "finished_at"),
            outputs: row.get("outputs"),
        };
        // The table remembers that it was asked for; a batch that has ended is on its way nowhere.
        progress.aborting &= !progress.is_over();
        progress
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state.as_str(), "succeeded" | "failed" | "aborted")
    }

    pub fn done(&self) -> i32 {
        self.succeeded + self.failed + self.aborted
    }
}

/// State and counts, from tallies while the batch runs: the cost does not depend on its rows.
pub async fn progress(client: &impl GenericClient, id: i64) -> Result<Option<Progress>, Error> {
    const SQL: &str =
        "SELECT id, state::text, command, queue, priority, rows, queued, running, succeeded, failed, aborted,
               aborting, generation, parent_id, created_at, finished_at, outputs
          FROM musterd.batch_progress WHERE id = $1";
    Ok(client.query_opt(SQL, &[&id]).await?.map(|row| Progress::read(&row)))
}

/// The parent of a task that has one.
pub async fn parent_of(client: &Object, id: i64) -> Result<Option<i64>, Error> {
    let row = client.query_opt("SELECT parent_id FROM musterd.tasks WHERE id = $1", &[&id]).await?;
    Ok(row.and_then(|row| row.get(0)))
}

/// Batches and tasks of `ids` that were aborted: for a worker that may have missed the notification.
pub async fn aborting(client: &Client, ids: &[i64]) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT b.id FROM musterd.batches b WHERE b.id = ANY ($1) AND b.aborting
        UNION ALL
        SELECT t.id FROM musterd.tasks t WHERE t.id = ANY ($1) AND (t.state = 'aborted' OR t.aborting)";
    Ok(client.query(SQL, &[&ids]).await?.iter().map(|row| row.get(0)).collect())
}
