//! Many tasks of one command: groups of payloads, as they are read, in one transaction.

use crate::{
    json::Json,
    store::submissions::{ReadFailure, SubmissionError, Whole, better_reason},
    traceparent::Traceparent,
};
use serde::Serialize;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_postgres::{Client, Error, GenericClient, IsolationLevel};

/// What tasks have in common that differ in their payloads only.
#[derive(Clone, Debug)]
pub struct NewTasks {
    pub command: String,
    pub queue: Option<String>,
    pub priority: Option<i32>,
    pub delay: Option<Duration>,
    pub run_at: Option<jiff::Timestamp>,
    pub max_attempts: Option<i32>,
    pub timeout: Option<Duration>,
    /// What the failure of a child means for the others: `wait` or `abort_siblings`.
    pub on_child_failure: String,
    pub traceparent: Option<Traceparent>,
}

/// What became of a stream of payloads. Their ids rise in the order of the payloads; between two of them may be ids of
/// other producers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EnqueuedMany {
    pub tasks: u64,
    pub first_id: Option<i64>,
    pub last_id: Option<i64>,
}

fn failed(operation: &'static str) -> impl Fn(Error) -> SubmissionError {
    move |source| SubmissionError::Query { operation, source }
}

/// Enqueues every group that comes: all or nothing. `read` ends when the last of them was made, with how many payloads they
/// hold or the reason why there is nothing to enqueue after all.
pub async fn enqueue_groups<E: ReadFailure>(
    client: &mut Client,
    task: &NewTasks,
    groups: mpsc::Receiver<Vec<Json>>,
    read: impl Future<Output = Result<Whole, E>>,
) -> Result<EnqueuedMany, E> {
    // The source may pause between two groups for longer than a transaction of ours may otherwise be idle.
    const PATIENT: &str = "SET LOCAL idle_in_transaction_session_timeout = 0";
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .start()
        .await
        .map_err(failed("begin to enqueue"))?;
    transaction.batch_execute(PATIENT).await.map_err(failed("begin to enqueue"))?;
    let added = add_groups(&transaction, task, groups).await;
    let (_, enqueued) = better_reason(read.await, added)?;
    transaction.commit().await.map_err(failed("commit the tasks"))?;
    Ok(enqueued)
}

async fn add_groups(
    client: &impl GenericClient,
    task: &NewTasks,
    mut groups: mpsc::Receiver<Vec<Json>>,
) -> Result<EnqueuedMany, SubmissionError> {
    let mut enqueued = EnqueuedMany::default();
    while let Some(group) = groups.recv().await {
        let ids = enqueue_many(client, task, &group).await.map_err(failed("enqueue the tasks"))?;
        enqueued.tasks += ids.len() as u64;
        enqueued.first_id = enqueued.first_id.or(ids.first().copied());
        enqueued.last_id = ids.last().copied().or(enqueued.last_id);
    }
    Ok(enqueued)
}

/// Enqueues a task for each payload, in one statement; their ids in the order of the payloads.
pub async fn enqueue_many(
    client: &impl GenericClient,
    task: &NewTasks,
    payloads: &[Json],
) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT musterd.enqueue_many($1, $2, queue => $3, priority => $4, run_at => $5,
               delay => pg_catalog.make_interval(secs => $6::float8), max_attempts => $7,
               timeout => pg_catalog.make_interval(secs => $8::float8), on_child_failure => $9, traceparent => $10)";
    let delay = task.delay.map(|delay| delay.as_secs_f64());
    let timeout = task.timeout.map(|timeout| timeout.as_secs_f64());
    let traceparent = task.traceparent.as_ref().map(Traceparent::as_str);
    let rows = client
        .query(
            SQL,
            &[
                &task.command,
                &payloads,
                &task.queue,
                &task.priority,
                &task.run_at,
                &delay,
                &task.max_attempts,
                &timeout,
                &task.on_child_failure,
                &traceparent,
            ],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
