//! Tasks: claimed, finished by their token, looked at.

use super::{
    moment,
    page::{self, Page},
};
use crate::{failpoint, json::Json, traceparent::Traceparent};
use deadpool_postgres::Object;
use serde::Serialize;
use std::{collections::HashMap, time::Duration};
use tokio_postgres::{Error, GenericClient, Row, types::ToSql};
use uuid::Uuid;

/// How a worker names the task it holds; the token was made for this one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskRef {
    pub id: i64,
    pub token: Uuid,
}

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

const CLAIM: &str = include_str!("sql/claim_tasks.sql");

/// Claims due tasks of a queue.
pub async fn claim(client: &Object, wanted: &WantedTasks<'_>) -> Result<Vec<Task>, Error> {
    let order = if wanted.ignore_priority { "" } else { "t.priority," };
    let sql = CLAIM
        .replace("/*order*/", order)
        .replace("/*scope*/", wanted.scope.condition())
        .replace("/*count*/", &wanted.tokens.len().to_string());
    let statement = client.prepare_cached(&sql).await?;
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
        .await?;
    Ok(rows.iter().map(Task::read).collect())
}

/// Takes a task that is to run alone, if there is one and this worker has none yet.
pub async fn take_solo(client: &Object, wanted: &WantedTasks<'_>) -> Result<Option<Task>, Error> {
    const SQL: &str = include_str!("sql/take_solo_task.sql");
    let Some(token) = wanted.tokens.first() else { return Ok(None) };
    let statement = client.prepare_cached(SQL).await?;
    let row = client.query_opt(&statement, &[&wanted.queue, &wanted.worker, token, &wanted.commands]).await?;
    Ok(row.as_ref().map(Task::read))
}

/// From now on a death of this process is the task's doing. False: somebody else has it.
pub async fn mark_alone_if_held(client: &Object, task: TaskRef) -> Result<bool, Error> {
    const SQL: &str = "UPDATE musterd.tasks SET alone_at = pg_catalog.clock_timestamp()
         WHERE id = $1 AND token = $2 AND state = 'running'";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.execute(&statement, &[&task.id, &task.token]).await? == 1)
}

/// The tasks that hold these tokens: of a claim whose reply was lost.
pub async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Task>, Error> {
    const SQL: &str =
        "SELECT id, token, parent_id, queue, command, payload, attempt, max_attempts, crashes, solo_crashes,
               traceparent, (EXTRACT(EPOCH FROM timeout) * 1000)::bigint AS timeout_ms, NULL::float8 AS waited
          FROM musterd.tasks WHERE worker IS NOT NULL AND state = 'running' AND token = ANY ($1)";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query(&statement, &[&tokens]).await?.iter().map(Task::read).collect())
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

/// What the database says a worker holds.
pub async fn owned(client: &Object, worker: &str) -> Result<Vec<TaskRef>, Error> {
    const SQL: &str = "SELECT t.id, t.token FROM musterd.tasks t
         WHERE t.worker = $1 AND t.state = 'running' AND t.token IS NOT NULL";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&worker]).await?;
    Ok(rows.iter().map(|row| TaskRef { id: row.get(0), token: row.get(1) }).collect())
}

/// Whether a queue has tasks to claim; those whose time has come are made claimable first.
pub async fn due(client: &Object, queue: &str) -> Result<bool, Error> {
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
    let look = client.prepare_cached(LOOK).await?;
    let row = client.query_one(&look, &[&queue]).await?;
    let (queued, scheduled): (bool, bool) = (row.get(0), row.get(1));
    if scheduled {
        let promote = client.prepare_cached(PROMOTE).await?;
        client.execute(&promote, &[&queue]).await?;
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
pub async fn focus(client: &Object, looked: &Looked<'_>) -> Result<Option<i64>, Error> {
    let statement = client.prepare_cached("SELECT musterd.focus($1, $2, $3, $4, $5)").await?;
    let Looked { queue, commands, row_commands, any_priority, tasks } = looked;
    Ok(client.query_one(&statement, &[queue, commands, row_commands, any_priority, tasks]).await?.get(0))
}

/// What became of one attempt of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskWrite {
    pub task: TaskRef,
    pub parent: Option<i64>,
    pub end: TaskEnd,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TaskEnd {
    Succeeded {
        result: Option<Json>,
        /// A JSON array of children, or of siblings when a child spawns.
        spawn: Option<Json>,
        /// A JSON array of uncles.
        after: Option<Json>,
    },
    Failed(String),
    Retry {
        error: String,
        wait: Duration,
    },
    /// Not run, or not to its end: no attempt is charged.
    GiveBack,
    /// The database's trouble, not the task's: later, no attempt charged. What took the connection down with it counts
    /// as a crash.
    Postponed {
        error: String,
        wait: Duration,
        crashed: bool,
    },
}

/// What really became of a task that was still held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    pub state: String,
    /// The scope that may be over now.
    pub scope: Option<i64>,
}

/// The statement that writes outcomes, for whoever has a transaction of its own around it.
pub const FINISH: &str = "SELECT f.task_id, f.task_state::text, f.scope_id
      FROM musterd.finish_tasks(ARRAY (
           SELECT ROW (u.id, u.token, u.outcome, u.result, u.error, u.wait, u.spawn, u.after)::musterd.task_outcome
             FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::text[]),
                             pg_catalog.unnest($4::jsonb[]), pg_catalog.unnest($5::text[]), pg_catalog.unnest($6::float8[]),
                             pg_catalog.unnest($7::jsonb[]), pg_catalog.unnest($8::jsonb[]))
                  AS u (id, token, outcome, result, error, wait, spawn, after))) f";

/// Writes the outcomes of those tasks that are still held with their token; returns them by id.
pub async fn finish_if_held(
    client: &impl GenericClient,
    writes: &[TaskWrite],
) -> Result<HashMap<i64, Finished>, Error> {
    let columns = Columns::of(writes);
    let rows = client
        .query(
            FINISH,
            &[
                &columns.id,
                &columns.token,
                &columns.outcome,
                &columns.result,
                &columns.error,
                &columns.wait,
                &columns.spawn,
                &columns.after,
            ],
        )
        .await?;
    Ok(rows.iter().map(|row| (row.get(0), Finished { state: row.get(1), scope: row.get(2) })).collect())
}

/// [`finish_if_held`] in a transaction of its own, isolation stated.
pub async fn finish_in_transaction(
    client: &Object,
    writes: &[TaskWrite],
) -> Result<HashMap<i64, Finished>, Error> {
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    let finished = finish_if_held(&***client, writes).await?;
    failpoint!("tasks.before_commit");
    client.batch_execute("COMMIT").await?;
    failpoint!("tasks.committed");
    Ok(finished)
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

/// The writes as one array per column, for `unnest`.
#[derive(Debug, Default)]
pub struct Columns<'a> {
    pub id: Vec<i64>,
    pub token: Vec<Uuid>,
    pub outcome: Vec<&'static str>,
    pub result: Vec<Option<&'a Json>>,
    pub error: Vec<Option<&'a str>>,
    pub wait: Vec<f64>,
    pub spawn: Vec<Option<&'a Json>>,
    pub after: Vec<Option<&'a Json>>,
}

impl<'a> Columns<'a> {
    pub fn of(writes: &'a [TaskWrite]) -> Self {
        let mut columns = Self::default();
        for write in writes {
            columns.id.push(write.task.id);
            columns.token.push(write.task.token);
            let (mut result, mut error, mut wait, mut spawn, mut after) = (None, None, 0.0, None, None);
            columns.outcome.push(match &write.end {
                TaskEnd::Succeeded { result: given, spawn: children, after: uncles } => {
                    (result, spawn, after) = (given.as_ref(), children.as_ref(), uncles.as_ref());
                    "succeeded"
                }
                TaskEnd::Failed(reason) => {
                    error = Some(reason.as_str());
                    "failed"
                }
                TaskEnd::Retry { error: reason, wait: seconds } => {
                    (error, wait) = (Some(reason.as_str()), seconds.as_secs_f64());
                    "retry"
                }
                TaskEnd::GiveBack => "give_back",
                TaskEnd::Postponed { error: reason, wait: seconds, crashed } => {
                    (error, wait) = (Some(reason.as_str()), seconds.as_secs_f64());
                    if *crashed { "crashed" } else { "give_back" }
                }
            });
            columns.result.push(result);
            columns.error.push(error);
            columns.wait.push(wait);
            columns.spawn.push(spawn);
            columns.after.push(after);
        }
        columns
    }
}

/// A task as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    pub id: i64,
    pub state: String,
    pub parent_id: Option<i64>,
    pub queue: String,
    pub command: String,
    pub priority: i32,
    pub attempt: i32,
    pub max_attempts: Option<i32>,
    pub crashes: i32,
    pub run_at: Option<jiff::Timestamp>,
    pub created_at: jiff::Timestamp,
    pub finished_at: Option<jiff::Timestamp>,
    pub worker: Option<String>,
    pub dedup_key: Option<String>,
    pub idempotency_key: Option<String>,
    pub children: i64,
    pub open_children: i64,
    /// Ids this task waits for.
    pub after: Vec<i64>,
    pub payload: Json,
    pub result: Option<Json>,
    pub error: Option<String>,
}

impl Shown {
    fn read(row: &Row) -> Self {
        Self {
            id: row.get("id"),
            state: row.get("state"),
            parent_id: row.get("parent_id"),
            queue: row.get("queue"),
            command: row.get("command"),
            priority: row.get("priority"),
            attempt: row.get("attempt"),
            max_attempts: row.get("max_attempts"),
            crashes: row.get("crashes"),
            run_at: moment::maybe(row, "run_at"),
            created_at: moment::of(row, "created_at"),
            finished_at: moment::maybe(row, "finished_at"),
            worker: row.get("worker"),
            dedup_key: row.get("dedup_key"),
            idempotency_key: row.get("idempotency_key"),
            children: row.get("children"),
            open_children: row.get("open_children"),
            after: row.get("after"),
            payload: row.get("payload"),
            result: row.get("result"),
            error: row.get("error"),
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state.as_str(), "succeeded" | "failed" | "aborted")
    }

    /// Roughly what it takes in memory.
    fn weight(&self) -> usize {
        let error = self.error.as_ref().map_or(0, String::len);
        self.payload.len() + self.result.as_ref().map_or(0, Json::len) + error
    }
}

const SHOWN: &str = "SELECT t.id, t.state::text AS state, t.parent_id, t.queue, t.command, t.priority, t.attempt, t.max_attempts,
           t.crashes, NULLIF(t.run_at, 'infinity') AS run_at, t.created_at, t.finished_at, t.worker, t.dedup_key,
           t.idempotency_key, t.payload, t.result, t.error,
           (SELECT pg_catalog.count(*) FROM musterd.tasks c WHERE c.parent_id = t.id) AS children,
           (SELECT pg_catalog.count(*) FROM musterd.tasks c
             WHERE c.parent_id = t.id AND c.state NOT IN ('succeeded', 'failed', 'aborted')) AS open_children,
           ARRAY (SELECT w.after_id FROM musterd.task_waits w WHERE w.task_id = t.id ORDER BY w.after_id) AS after
      FROM musterd.tasks t";

pub async fn show(client: &impl GenericClient, id: i64) -> Result<Option<Shown>, Error> {
    let row = client.query_opt(&format!("{SHOWN} WHERE t.id = $1"), &[&id]).await?;
    Ok(row.map(|row| Shown::read(&row)))
}

/// Which tasks a list shows.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub state: Option<String>,
    pub command: Option<String>,
    pub queue: Option<String>,
    pub parent: Option<i64>,
    /// Only ids below this one: the next page.
    pub before: Option<i64>,
    pub limit: i64,
}

/// Newest first; a page costs the same wherever it is. At most `most_bytes` of payloads, but one task at least.
pub async fn list(
    client: &impl GenericClient,
    filter: &Filter,
    most_bytes: usize,
) -> Result<Page<Shown>, Error> {
    let sql = format!(
        "{SHOWN} WHERE ($1::text IS NULL OR t.state = $1::musterd.state) AND ($2::text IS NULL OR t.command = $2)
           AND ($3::text IS NULL OR t.queue = $3) AND ($4::bigint IS NULL OR t.parent_id = $4)
           AND ($5::bigint IS NULL OR t.id < $5)
           AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)
         ORDER BY t.id DESC LIMIT $6"
    );
    let parameters: [&(dyn ToSql + Sync); 6] =
        [&filter.state, &filter.command, &filter.queue, &filter.parent, &filter.before, &filter.limit];
    let found = client.query_raw(&sql, parameters).await?;
    page::gather(found, most_bytes, Shown::read, Shown::weight).await
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
