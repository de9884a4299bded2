//! What became of the attempts of tasks, written by their token.

use super::TaskRef;
use crate::{
    failpoint,
    json::Json,
    state::State,
    store::trip::{self, COMMIT},
};
use deadpool_postgres::Object;
use std::{collections::HashMap, time::Duration};
use tokio_postgres::{Error, Row, types::ToSql};
use uuid::Uuid;

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
    Failed {
        error: String,
        result: Option<Json>,
    },
    Retry {
        error: String,
        wait: Duration,
    },
    /// Not run, or not to its end: no attempt is charged.
    GiveBack,
    /// The trouble of the database or of the handler, not the task's: later, no attempt charged. What took the connection down with it counts
    /// as a crash.
    Postponed {
        error: String,
        wait: Duration,
        crashed: bool,
    },
}

impl TaskEnd {
    /// With nothing but the text of an error.
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed { error: error.into(), result: None }
    }
}

/// What really became of a task that was still held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    pub state: State,
    /// The scope that may be over now.
    pub scope: Option<i64>,
}

/// What a write of outcomes came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finish {
    /// Those that were still held, by id.
    pub finished: HashMap<i64, Finished>,
    /// Uncles to check after the commit.
    pub uncles: Vec<i64>,
}

/// How a write treats tasks that another transaction has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locked {
    /// Waits for them, as long as the transaction's `lock_timeout` says.
    Wait,
    /// Leaves them as they are, and still held.
    PassBy,
}

/// One row of arrays: hundreds of rows would cost more than what they say.
const FINISH: &str = "SELECT pg_catalog.array_agg(f.task_id), pg_catalog.array_agg(f.task_state::text), pg_catalog.array_agg(f.scope_id)
      FROM musterd.finish_tasks(ARRAY (
           SELECT ROW (u.id, u.token, u.outcome, u.result, u.error, u.wait, u.spawn, u.after)::musterd.task_outcome
             FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::text[]),
                             pg_catalog.unnest($4::jsonb[]), pg_catalog.unnest($5::text[]), pg_catalog.unnest($6::float8[]),
                             pg_catalog.unnest($7::jsonb[]), pg_catalog.unnest($8::jsonb[]))
                  AS u (id, token, outcome, result, error, wait, spawn, after)), $9) f";

/// Writes the outcomes of those tasks that are still held with their token, in a transaction of its own, in one round trip.
pub async fn finish_if_held(client: &Object, writes: &[TaskWrite], locked: Locked) -> Result<Finish, Error> {
    let columns = Columns::of(writes);
    let statement = client.prepare_cached(FINISH).await?;
    let pass_by = locked == Locked::PassBy;
    let params = columns.params(&pass_by);
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '300ms'";
    let end = async {
        failpoint!("tasks.before_commit", client);
        client.batch_execute(COMMIT).await
    };
    let answer = trip::run(client, BEGIN, client.query_one(&statement, &params), end).await?;
    failpoint!("tasks.committed", client);
    Ok(read(&answer))
}

/// Whether a task is held with this token.
pub async fn is_held(client: &Object, task: TaskRef) -> Result<bool, Error> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.claimed_tasks(ARRAY[$1::uuid]) c WHERE c.id = $2)";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query_one(&statement, &[&task.token, &task.id]).await?.get(0))
}

/// What a statement that writes outcomes answers: tasks, their states and their scopes; where there is no task, an uncle.
pub(super) fn read(answer: &Row) -> Finish {
    let column = |place| answer.get::<_, Option<Vec<Option<i64>>>>(place).unwrap_or_default();
    let (ids, scopes) = (column(0), column(2));
    let states = answer.get::<_, Option<Vec<Option<State>>>>(1).unwrap_or_default();
    let mut finish = Finish { finished: HashMap::with_capacity(ids.len()), uncles: Vec::new() };
    for ((id, state), scope) in ids.into_iter().zip(states).zip(scopes) {
        match (id, state) {
            (Some(id), Some(state)) => {
                finish.finished.insert(id, Finished { state, scope });
            }
            _ => finish.uncles.extend(scope),
        }
    }
    finish
}

/// The writes as one array per column, for `unnest`.
#[derive(Debug, Default)]
struct Columns<'a> {
    id: Vec<i64>,
    token: Vec<Uuid>,
    outcome: Vec<&'static str>,
    result: Vec<Option<&'a Json>>,
    error: Vec<Option<&'a str>>,
    wait: Vec<f64>,
    spawn: Vec<Option<&'a Json>>,
    after: Vec<Option<&'a Json>>,
}

impl<'a> Columns<'a> {
    fn params<'p>(&'p self, pass_by: &'p bool) -> Vec<&'p (dyn ToSql + Sync)> {
        vec![
            &self.id,
            &self.token,
            &self.outcome,
            &self.result,
            &self.error,
            &self.wait,
            &self.spawn,
            &self.after,
            pass_by,
        ]
    }

    fn of(writes: &'a [TaskWrite]) -> Self {
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
                TaskEnd::Failed { error: reason, result: given } => {
                    (error, result) = (Some(reason.as_str()), given.as_ref());
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
