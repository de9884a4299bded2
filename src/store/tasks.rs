//! Tasks: made, claimed, finished by their token, looked at, steered.

mod claim;
mod end;
mod many;
mod own;
mod shown;

pub use claim::{
    Claim, Hint, Looked, Scope, Task, WantedTasks, claim, claim_solo, find, focus, mark_alone_if_held,
    next_due, unmark_alone,
};
pub use end::{Finish, Finished, Locked, TaskEnd, TaskWrite, finish_if_held, is_held};
pub use many::{EnqueuedMany, NewTasks, enqueue_groups, enqueue_many};
pub use own::{AS_OURSELVES, BEGIN, NOT_HELD, OWN_ID, OwnTasks};
pub use shown::{Filter, Shown, list, show};

use super::events;
use crate::{json::Json, traceparent::Traceparent};
use std::time::Duration;
use tokio_postgres::{Error, GenericClient, Row, types::ToSql};
use uuid::Uuid;

/// How a worker names the task it holds. The token was made for this one claim, which may be of several tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskRef {
    pub id: i64,
    pub token: Uuid,
}

/// A task that exists only in this transaction, held by it, for a look at what a procedure does.
pub async fn pretend(client: &impl GenericClient, task: &Task) -> Result<TaskRef, Error> {
    // For a time that never comes: it has no ticket.
    const INSERT: &str =
        "INSERT INTO musterd.task_records (command, queue, payload, state, run_at, not_before)
         VALUES ($1, $2, $3, 'queued', 'infinity', pg_catalog.now()) RETURNING id";
    const CLAIM: &str =
        "INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
         VALUES ($1, 'rehearsal', $2, $3, pg_catalog.int8multirange(pg_catalog.int8range($4::bigint, $4 + 1)), 1, 1, 0)";
    let token = Uuid::new_v4();
    let row = client.query_one(INSERT, &[&task.command, &task.queue, &task.payload]).await?;
    let id: i64 = row.get(0);
    client.execute(CLAIM, &[&token, &task.queue, &task.command, &id]).await?;
    Ok(TaskRef { id, token })
}

/// Tickets for queued tasks that have none and that no worker holds. Returns how many.
pub async fn sweep_tickets(client: &impl GenericClient) -> Result<u64, Error> {
    let row = client.query_one("SELECT musterd.sweep_tickets()", &[]).await?;
    Ok(row.get::<_, i32>(0) as u64)
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
    const SQL: &str = "SELECT t.command, t.payload, t.parent_id IS NOT NULL FROM musterd.task_records t
         WHERE t.parent_id = $1 OR t.id IN (SELECT w.task_id FROM musterd.task_waits w WHERE w.after_id = $1)
         ORDER BY t.id";
    let made = |row: &Row| Made { command: row.get(0), payload: row.get(1), child: row.get(2) };
    Ok(client.query(SQL, &[&id]).await?.iter().map(made).collect())
}

/// The result that the procedure of a task has stored so far.
pub async fn stored_result(client: &impl GenericClient, task: TaskRef) -> Result<Option<Json>, Error> {
    const SQL: &str = "SELECT k.results -> $2::text FROM musterd.task_claims k WHERE k.token = $1";
    Ok(client.query_one(SQL, &[&task.token, &task.id.to_string()]).await?.get(0))
}

/// What an operator may do to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    Abort,
    Retry,
    Hold,
    Release,
}

/// Does it, and returns the state afterwards. `by`: the name of the client that asks for it, for the event.
pub async fn steer(
    client: &impl GenericClient,
    id: i64,
    steer: Steer,
    by: Option<&str>,
) -> Result<String, Error> {
    let function = match steer {
        Steer::Abort => "abort",
        Steer::Retry => "retry_task",
        Steer::Hold => "hold",
        Steer::Release => "release",
    };
    let sql = format!("SELECT musterd.{function}($1) WHERE {}", events::client_is(2));
    Ok(client.query_one(&sql, &[&id, &by]).await?.get(0))
}

/// What may be asked for; the functions of the database refuse anything else.
pub const PRIORITIES: std::ops::RangeInclusive<i32> = -1_000_000..=1_000_000;
pub const MOST_ATTEMPTS: i32 = 1_000;
pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 86_400);

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
