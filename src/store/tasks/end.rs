//! What became of the attempts of tasks, written by their token.

use super::TaskRef;
use crate::{failpoint, json::Json};
use deadpool_postgres::Object;
use std::{collections::HashMap, time::Duration};
use tokio_postgres::{Error, GenericClient};
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
