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
    /// Those of them that nobody else can be blamed for.
    pub solo_crashes: i32,
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
    /// One for every task, made before the statement is sent.
    pub tokens: &'a [Uuid],
    pub commands: &'a [String],
    pub scope: Scope,
    pub ignore_priority: bool,
    /// No tasks that are behind rows of these commands.
    pub behind_rows: Option<&'a [String]>,
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

    /// A text of its own for each, so that each has the index it needs.
    fn condition(self) -> &'static str {
        match self {
            Self::Any => "",
            Self::TopLevel => "AND t.parent_id IS NULL",
            Self::Of(_) => "AND t.parent_id = $5",
        }
    }
}

const CLAIM: &str = include_str!("../sql/claim_tasks.sql");

/// Claims due tasks of a queue.
pub async fn claim(client: &Object, wanted: &WantedTasks<'_>) -> Result<Vec<Task>, QueryError> {
    let order = if wanted.ignore_priority { "" } else { "t.priority," };
    let sql = CLAIM
        .replace("/*order*/", order)
        .replace("/*scope*/", wanted.scope.condition())
        .replace("/*count*/", &wanted.tokens.len().to_string());
    let statement = client.prepare_cached(&sql).await.map_err(failed("prepare claiming tasks"))?;
    let rows = client
        .query(
            &statement,
            &[
                &wanted.queue,
                &wanted.worker,
                &wanted.tokens,
                &wanted.commands,
                &wanted.scope.parameter(),
                &wanted.behind_rows,
            ],
        )
        .await
        .map_err(failed("claim tasks"))?;
    Ok(rows.iter().map(Task::read).collect())
}

/// Takes a task that is to run alone, if there is one and this worker has none yet.
pub async fn take_solo(client: &Object, wanted: &WantedTasks<'_>) -> Result<Option<Task>, QueryError> {
    const SQL: &str = include_str!("../sql/take_solo_task.sql");
    let Some(token) = wanted.tokens.first() else { return Ok(None) };
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare taking a solitary task"))?;
    let row = client
        .query_opt(&statement, &[&wanted.queue, &wanted.worker, token, &wanted.commands])
        .await
        .map_err(failed("take a solitary task"))?;
    Ok(row.as_ref().map(Task::read))
}

/// From now on a death of this process is the task's doing. False: somebody else has it.
pub async fn mark_alone_if_held(client: &Object, task: TaskRef) -> Result<bool, QueryError> {
    const SQL: &str = "UPDATE musterd.tasks SET alone_at = pg_catalog.clock_timestamp()
         WHERE id = $1 AND token = $2 AND state = 'running'";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare marking a task"))?;
    let marked = client.execute(&statement, &[&task.id, &task.token]).await;
    Ok(marked.map_err(failed("mark a task as alone"))? == 1)
}

/// The tasks that hold these tokens: of a claim whose reply was lost.
pub async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Task>, QueryError> {
    const SQL: &str =
        "SELECT id, token, parent_id, queue, command, payload, attempt, max_attempts, crashes, solo_crashes,
               traceparent, (EXTRACT(EPOCH FROM timeout) * 1000)::bigint AS timeout_ms, NULL::float8 AS waited
          FROM musterd.tasks WHERE worker IS NOT NULL AND state = 'running' AND token = ANY ($1)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding tasks"))?;
    let rows = client.query(&statement, &[&tokens]).await.map_err(failed("find tasks by token"))?;
    Ok(rows.iter().map(Task::read).collect())
}

impl Task {
    /// Two processes died with it: it runs with nothing beside it.
    pub fn is_solo(&self) -> bool {
        self.crashes >= 2
    }

    fn read(row: &Row) -> Self {
        let milliseconds: Option<i64> = row.get("timeout_ms");
        Self {
            reference: TaskRef { id: row.get("id"), token: row.get("token") },
            parent: row.get("parent_id"),
            queue: row.get("queue"),
            command: row.get("command"),
            payload: row.get("payload"),
            attempt: row.get("attempt"),
            max_attempts: row.get("max_attempts"),
            crashes: row.get("crashes"),
            solo_crashes: row.get("solo_crashes"),
            timeout: milliseconds.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(1).max(1))),
            traceparent: row.get("traceparent"),
            waited: row.get("waited"),
        }
    }
}

/// Whether a queue has tasks to claim; those whose time has come are made claimable first.
pub async fn due(client: &Object, queue: &str) -> Result<bool, QueryError> {
    const PROMOTE: &str = "UPDATE musterd.tasks t SET state = 'queued'
         WHERE t.id = ANY (ARRAY (
               SELECT d.id FROM musterd.tasks d
                WHERE d.queue = $1 AND d.state = 'scheduled' AND d.run_at <= pg_catalog.now()
                ORDER BY d.run_at LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED))
           AND t.state = 'scheduled'";
    const LOOK: &str =
        "SELECT EXISTS (SELECT FROM musterd.tasks t WHERE t.queue = $1 AND t.state = 'queued'),
               EXISTS (SELECT FROM musterd.tasks t
                        WHERE t.queue = $1 AND t.state = 'scheduled' AND t.run_at <= pg_catalog.now())";
    let look = client.prepare_cached(LOOK).await.map_err(failed("prepare looking for tasks"))?;
    let row = client.query_one(&look, &[&queue]).await.map_err(failed("look for tasks"))?;
    let (queued, scheduled): (bool, bool) = (row.get(0), row.get(1));
    if scheduled {
        let promote =
            client.prepare_cached(PROMOTE).await.map_err(failed("prepare the tasks whose time came"))?;
        client.execute(&promote, &[&queue]).await.map_err(failed("make tasks claimable whose time came"))?;
    }
    Ok(queued || scheduled)
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
