//! Tasks: made, claimed, finished by their token, looked at, steered.

mod claim;
mod end;
mod shown;

pub use claim::{Looked, Scope, Task, WantedTasks, claim, due, find, focus, mark_alone_if_held, take_solo};
pub use end::{Columns, FINISH, Finished, TaskEnd, TaskWrite, finish_if_held, finish_in_transaction};
pub use shown::{Filter, Shown, list, show};

use crate::{json::Json, traceparent::Traceparent};
use deadpool_postgres::Object;
use std::time::Duration;
use tokio_postgres::{Error, GenericClient, Row, types::ToSql};
use uuid::Uuid;

/// How a worker names the task it holds; the token was made for this one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskRef {
    pub id: i64,
    pub token: Uuid,
}

/// What the database says a worker holds.
pub async fn owned(client: &Object, worker: &str) -> Result<Vec<TaskRef>, Error> {
    const SQL: &str = "SELECT t.id, t.token FROM musterd.tasks t
         WHERE t.worker = $1 AND t.state = 'running' AND t.token IS NOT NULL";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&worker]).await?;
    Ok(rows.iter().map(|row| TaskRef { id: row.get(0), token: row.get(1) }).collect())
}

/// A task that exists only in this transaction, held by it, for a look at what a procedure does.
pub async fn pretend(client: &impl GenericClient, task: &Task) -> Result<TaskRef, Error> {
    const SQL: &str = "INSERT INTO musterd.tasks (command, queue, payload, state, worker, token, claimed_at)
         VALUES ($1, $2, $3, 'running', 'rehearsal', $4, pg_catalog.now()) RETURNING id";
    let token = Uuid::new_v4();
    let row = client.query_one(SQL, &[&task.command, &task.queue, &task.payload, &token]).await?;
    Ok(TaskRef { id: row.get(0), token })
}

/// A task that another one made: command, payload, and whether it is its child or waits for its end.
#[derive(Clone, Debug)]
pub struct Made {
    pub command: String,
    pub payload: Json,
    pub child: bool,
}

/// What a task has made so far, in its order.
pub async fn made_by(client: &impl GenericClient, id: i64) -> Result<Vec<Made>, Error> {
    const SQL: &str = "SELECT t.command, t.payload, t.parent_id IS NOT NULL FROM musterd.tasks t
         WHERE t.parent_id = $1 OR t.id IN (SELECT w.task_id FROM musterd.task_waits w WHERE w.after_id = $1)
         ORDER BY t.id";
    let made = |row: &Row| Made { command: row.get(0), payload: row.get(1), child: row.get(2) };
    Ok(client.query(SQL, &[&id]).await?.iter().map(made).collect())
}

/// What an operator may do to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    Abort,
    Retry,
    Hold,
    Release,
}

/// Does it, and returns the state afterwards.
pub async fn steer(client: &impl GenericClient, id: i64, steer: Steer) -> Result<String, Error> {
    let sql = match steer {
        Steer::Abort => "SELECT musterd.abort($1)",
        Steer::Retry => "SELECT musterd.retry_task($1)",
        Steer::Hold => "SELECT musterd.hold($1)",
        Steer::Release => "SELECT musterd.release($1)",
    };
    Ok(client.query_one(sql, &[&id]).await?.get(0))
}

/// A task to be.
#[derive(Clone, Debug)]
pub struct NewTask {
    pub command: String,
    pub payload: Json,
    pub queue: Option<String>,
    pub priority: Option<i32>,
    pub delay: Option<Duration>,
    pub run_at: Option<jiff::Timestamp>,
    pub max_attempts: Option<i32>,
    pub timeout: Option<Duration>,
    pub dedup_key: Option<String>,
    pub dedup_replace: bool,
    pub idempotency_key: Option<String>,
    /// Tasks and batches to wait for.
    pub after: Vec<i64>,
    /// What the failure of a child means for the others: `wait` or `abort_siblings`.
    pub on_child_failure: String,
    pub traceparent: Option<Traceparent>,
}

/// Enqueues a task; the id may be that of an earlier one with the same key.
pub async fn enqueue(client: &impl GenericClient, task: &NewTask) -> Result<i64, Error> {
    const PLAIN: &str = "SELECT musterd.enqueue($1, $2, queue => $3, priority => $4, run_at => $5,
               delay => pg_catalog.make_interval(secs => $6::float8), max_attempts => $7,
               timeout => pg_catalog.make_interval(secs => $8::float8), dedup_key => $9, dedup_replace => $10,
               idempotency_key => $11, on_child_failure => $12, traceparent => $13)";
    const AFTER: &str = "SELECT musterd.enqueue_after($1, $2, $14, queue => $3, priority => $4, run_at => $5,
               delay => pg_catalog.make_interval(secs => $6::float8), max_attempts => $7,
               timeout => pg_catalog.make_interval(secs => $8::float8), dedup_key => $9, dedup_replace => $10,
               idempotency_key => $11, on_child_failure => $12, traceparent => $13)";
    let delay = task.delay.map(|delay| delay.as_secs_f64());
    let timeout = task.timeout.map(|timeout| timeout.as_secs_f64());
    let traceparent = task.traceparent.as_ref().map(Traceparent::as_str);
    let mut params: Vec<&(dyn ToSql + Sync)> = vec![
        &task.command,
        &task.payload,
        &task.queue,
        &task.priority,
        &task.run_at,
        &delay,
        &task.max_attempts,
        &timeout,
        &task.dedup_key,
        &task.dedup_replace,
        &task.idempotency_key,
        &task.on_child_failure,
        &traceparent,
    ];
    let sql = if task.after.is_empty() {
        PLAIN
    } else {
        params.push(&task.after);
        AFTER
    };
    Ok(client.query_one(sql, &params).await?.get(0))
}
