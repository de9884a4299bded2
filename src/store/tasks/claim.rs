//! Tasks are claimed here.

use super::TaskRef;
use crate::{
    json::Json,
    store::query::{QueryError, failed},
};
use deadpool_postgres::Object;
use std::time::Duration;
use tokio_postgres::Row;
use uuid::Uuid;

/// A task this worker holds.
#[derive(Clone, Debug)]
pub struct Task {
    pub reference: TaskRef,
    pub parent: Option<i64>,
    pub queue: String,
    pub command: String,
    pub payload: Json,
    /// The try that begins with this claim, from 1.
    pub attempt: i32,
    pub max_attempts: Option<i32>,
    /// How often a process or a connection died while it ran.
    pub crashes: i32,
    /// Those of them that only this task can be blamed for.
    pub solo_crashes: i32,
    /// It runs with nothing beside it.
    pub is_solo: bool,
    pub timeout: Option<Duration>,
    pub traceparent: Option<String>,
    /// Seconds from being due to this claim.
    pub waited: Option<f64>,
}

/// What a claim wants.
#[derive(Debug)]
pub struct WantedTasks<'a> {
    pub queue: &'a str,
    pub worker: &'a str,
    /// Made before the statement is sent: one for all tasks of the claim and one for suspects among them; or, of durable commands,
    /// one for every task.
    pub tokens: &'a [Uuid],
    pub commands: &'a [String],
    /// The most tasks to claim, by command.
    pub most: &'a [i32],
    /// Those of the commands whose claims must outlive a crash of the server.
    pub durable: &'a [String],
    pub scope: Scope,
    pub ignore_priority: bool,
    /// No tasks that are behind rows of these commands.
    pub behind_rows: Option<&'a [String]>,
    /// The most tasks when rows of the same priority wait.
    pub beside: i32,
    pub hint: Hint,
}

/// Where the last full claim ended. The next one begins behind it: what was claimed leaves dead entries in the index, which cannot be
/// cleaned away while some transaction of the database is old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    priority: i32,
    ticket: i64,
}

impl Hint {
    pub const START: Self = Self { priority: i32::MIN, ticket: 0 };
}

/// What a claim brought.
#[derive(Debug, Default)]
pub struct Claim {
    pub tasks: Vec<Task>,
    /// There are tasks, and other claims have them locked at this moment.
    pub busy: bool,
    pub end: Option<Hint>,
}

/// Which tasks a queue looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of them: a parallel queue.
    Any,
    /// Those without a parent: a structured queue with no scope to work on.
    TopLevel,
    /// The children of this one.
    Of(i64),
}

impl Scope {
    /// As the claims take it: null for any.
    pub fn parameter(self) -> Option<i64> {
        match self {
            Self::Any => None,
            Self::TopLevel => Some(0),
            Self::Of(id) => Some(id),
        }
    }
}

/// The columns of `musterd.claimed_task` in the order in which [`Task::read`] reads them: by place, which a claim of hundreds notices.
macro_rules! claimed {
    ($from:literal) => {
        concat!(
            "SELECT c.id, c.token, c.parent_id, c.queue, c.command, c.payload, c.attempt, c.max_attempts, c.crashes, c.solo_crashes,
                    c.is_solo, c.timeout_ms, c.traceparent, c.waited, c.priority, c.ticket FROM ",
            $from,
            " c"
        )
    };
}
const PRIORITY: usize = 14;
const TICKET: usize = 15;

/// Claims due tasks of a queue, all of one command.
pub async fn claim(client: &Object, wanted: &WantedTasks<'_>) -> Result<Claim, QueryError> {
    const SQL: &str = claimed!("musterd.claim_tasks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)");
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare claiming tasks"))?;
    let rows = client
        .query(
            &statement,
            &[
                &wanted.queue,
                &wanted.worker,
                &wanted.tokens,
                &wanted.commands,
                &wanted.most,
                &wanted.durable,
                &wanted.scope.parameter(),
                &wanted.ignore_priority,
                &wanted.behind_rows,
                &wanted.beside,
                &wanted.hint.priority,
                &wanted.hint.ticket,
            ],
        )
        .await
        .map_err(failed("claim tasks"))?;
    let mut claim = Claim::default();
    for row in &rows {
        match row.get::<_, Option<i64>>(0) {
            Some(_) => claim.tasks.push(Task::read(row)),
            None => claim.busy = true,
        }
    }
    claim.end = rows.last().and_then(|row| {
        Some(Hint {
            priority: row.get::<_, Option<i32>>(PRIORITY)?,
            ticket: row.get::<_, Option<i64>>(TICKET)?,
        })
    });
    Ok(claim)
}

/// Claims a task that is to run alone, if there is one and this worker has none yet.
pub async fn claim_solo(
    client: &Object,
    queue: &str,
    worker: &str,
    token: Uuid,
    commands: &[String],
) -> Result<Option<Task>, QueryError> {
    const SQL: &str = claimed!("musterd.claim_solo_task($1, $2, $3, $4)");
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare claiming a solitary task"))?;
    let row = client
        .query_opt(&statement, &[&queue, &worker, &token, &commands])
        .await
        .map_err(failed("claim a solitary task"))?;
    Ok(row.as_ref().map(Task::read))
}

/// Seconds until the next ticket of a queue is due that is not ready yet.
pub async fn next_due(client: &Object, queue: &str) -> Result<Option<f64>, QueryError> {
    const SQL: &str =
        "SELECT EXTRACT(EPOCH FROM pg_catalog.min(k.due_at) - pg_catalog.clock_timestamp())::float8
          FROM musterd.task_tickets k WHERE k.queue = $1 AND NOT k.ready";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare asking when a task is due"))?;
    Ok(client.query_one(&statement, &[&queue]).await.map_err(failed("ask when a task is due"))?.get(0))
}

/// From now on a death of this process is the task's doing. False: another worker has it.
pub async fn mark_alone_if_held(client: &Object, task: TaskRef) -> Result<bool, QueryError> {
    const SQL: &str =
        "UPDATE musterd.task_claims SET alone_at = pg_catalog.clock_timestamp() WHERE token = $1";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare marking a task"))?;
    let marked = client.execute(&statement, &[&task.token]).await;
    Ok(marked.map_err(failed("mark a task as alone"))? == 1)
}

/// Others run beside it from now on. False: another worker has it.
pub async fn unmark_alone(client: &Object, task: TaskRef) -> Result<bool, QueryError> {
    const SQL: &str = "UPDATE musterd.task_claims SET alone_at = NULL WHERE token = $1";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare unmarking a task"))?;
    let unmarked = client.execute(&statement, &[&task.token]).await;
    Ok(unmarked.map_err(failed("unmark a task as alone"))? == 1)
}

/// The tasks that are held with these tokens: of a claim whose reply was lost.
pub async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Task>, QueryError> {
    const SQL: &str = claimed!("musterd.claimed_tasks($1)");
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding tasks"))?;
    let rows = client.query(&statement, &[&tokens]).await.map_err(failed("find tasks by token"))?;
    Ok(rows.iter().map(Task::read).collect())
}

impl Task {
    fn read(row: &Row) -> Self {
        let milliseconds: Option<i64> = row.get(11);
        Self {
            reference: TaskRef { id: row.get(0), token: row.get(1) },
            parent: row.get(2),
            queue: row.get(3),
            command: row.get(4),
            payload: row.get(5),
            attempt: row.get(6),
            max_attempts: row.get(7),
            crashes: row.get(8),
            solo_crashes: row.get(9),
            is_solo: row.get(10),
            timeout: milliseconds.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(1).max(1))),
            traceparent: row.get(12),
            waited: row.get(13),
        }
    }
}

/// What a structured queue looks at to find its scope.
#[derive(Clone, Copy, Debug)]
pub struct Looked<'a> {
    pub queue: &'a str,
    pub commands: &'a [String],
    pub row_commands: &'a [String],
    /// What has waited longest is next, so that nothing waits for ever.
    pub any_priority: bool,
    /// Whether top-level tasks may come before batches.
    pub tasks: bool,
}

/// The scope a structured queue works on; `None`: top-level tasks are next.
pub async fn focus(client: &Object, looked: &Looked<'_>) -> Result<Option<i64>, QueryError> {
    const SQL: &str = "SELECT musterd.focus($1, $2, $3, $4, $5)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding the scope"))?;
    let Looked { queue, commands, row_commands, any_priority, tasks } = looked;
    let row = client.query_one(&statement, &[queue, commands, row_commands, any_priority, tasks]).await;
    Ok(row.map_err(failed("find the scope to work on"))?.get(0))
}
