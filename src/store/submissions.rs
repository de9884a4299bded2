//! Batches coming in: an id, the chunks of rows by COPY, then task and batch, in one transaction.

mod order;

pub use order::{Appended, Canary, MaxFailed, OnBudget, Order, Submitted, Whole};

use crate::traceparent::Traceparent;
use bytes::Bytes;
use futures::{SinkExt, pin_mut};
use tokio::sync::mpsc;
use tokio_postgres::{Client, Error, IsolationLevel, Transaction, error::SqlState, types::ToSql};

#[derive(Debug, thiserror::Error)]
pub enum SubmissionError {
    #[error("could not {operation}")]
    Query { operation: &'static str, source: Error },
    #[error(
        "the idempotency key {key:?} belongs to batch {id}, which was submitted with other rows or options: \
         use another key, or submit exactly the same again"
    )]
    Conflict { key: String, id: i64 },
    #[error("{message}{hint}")]
    Refused { message: String, hint: String },
}

/// Why what was to be submitted was not read to its end.
pub trait ReadFailure: From<SubmissionError> {
    /// Whether the writing ended first, so that its own error is the reason.
    fn is_cut_off(&self) -> bool;
}

fn failed(operation: &'static str) -> impl Fn(Error) -> SubmissionError {
    move |source| match source.as_db_error() {
        // Our own functions raise with words meant for the user.
        Some(db)
            if [
                SqlState::CHECK_VIOLATION,
                SqlState::UNIQUE_VIOLATION,
                SqlState::NO_DATA_FOUND,
                SqlState::INVALID_PARAMETER_VALUE,
            ]
            .contains(db.code()) =>
        {
            let hint = db.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
            SubmissionError::Refused { message: db.message().to_owned(), hint }
        }
        _ => SubmissionError::Query { operation, source },
    }
}

/// A batch that an idempotency key stands for.
#[derive(Debug)]
pub struct Known {
    pub id: i64,
    request_hash: Option<Vec<u8>>,
}

/// A key stands for something of its own command only.
pub async fn find(client: &Client, command: &str, key: &str) -> Result<Option<Known>, SubmissionError> {
    const SQL: &str =
        "SELECT id, request_hash FROM musterd.task_records WHERE command = $1 AND idempotency_key = $2";
    let row =
        client.query_opt(SQL, &[&command, &key]).await.map_err(failed("look up the idempotency key"))?;
    Ok(row.map(|row| Known { id: row.get(0), request_hash: row.get(1) }))
}

/// The same request again is answered with the same batch; another one is a mistake of the caller.
pub fn same_or_conflict(known: &Known, order: &Order, hash: Option<[u8; 32]>) -> Result<(), SubmissionError> {
    if hash.is_some() && known.request_hash.as_deref() == hash.as_ref().map(<[u8; 32]>::as_slice) {
        return Ok(());
    }
    Err(SubmissionError::Conflict { key: order.idempotency_key.clone().unwrap_or_default(), id: known.id })
}

/// An id, so that rows can be written before the batch they belong to.
pub async fn reserve(client: &Client) -> Result<i64, SubmissionError> {
    let row = client.query_one("SELECT musterd.reserve_batch_id()", &[]).await;
    Ok(row.map_err(failed("reserve a batch id"))?.get(0))
}

/// Copies the chunks in and opens the batch: all or nothing. `messages` are what COPY is sent; `read` ends when the last of
/// them was made, with what they hold or the reason why there is nothing to submit after all.
pub async fn copy_in<E: ReadFailure>(
    client: &mut Client,
    id: i64,
    order: &Order,
    messages: mpsc::Receiver<Bytes>,
    read: impl Future<Output = Result<Whole, E>>,
) -> Result<Submitted, E> {
    const CHUNKS: &str =
        "COPY musterd.chunks (batch_id, first_line, last_line, inputs) FROM STDIN (FORMAT binary)";
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .start()
        .await
        .map_err(failed("begin the submission"))?;
    let copied = copy(&transaction, CHUNKS, messages).await;
    let (whole, ()) = better_reason(read.await, copied)?;
    let opened = open(&transaction, id, order, &whole).await?;
    if opened == id {
        transaction.commit().await.map_err(failed("commit the submission"))?;
    } else {
        // Another submission was first with this key; its rows are these rows.
        transaction.rollback().await.map_err(failed("roll the repeated submission back"))?;
    }
    Ok(Submitted { id: opened, rows: whole.rows, repeated: opened != id })
}

/// Copies the chunks in beside the batch and then adds them to it: all or nothing. The batch is locked for the second
/// step only, so that a slow file does not stop its claims.
pub async fn copy_onto<E: ReadFailure>(
    client: &mut Client,
    id: i64,
    idempotency_key: Option<&str>,
    messages: mpsc::Receiver<Bytes>,
    read: impl Future<Output = Result<Whole, E>>,
) -> Result<Appended, E> {
    // Stored as it is: compressed here, it would keep the compression of a temporary table.
    const STAGE: &str =
        "CREATE TEMPORARY TABLE musterd_append (first_line int, last_line int, inputs text) ON COMMIT DROP;
         ALTER TABLE pg_temp.musterd_append ALTER COLUMN inputs SET STORAGE EXTERNAL";
    const EXTEND: &str = "SELECT e.rows, e.repeated
          FROM musterd.extend_batch($1, 'pg_temp.musterd_append'::pg_catalog.regclass, $2, $3) e";
    const STAGED: &str =
        "COPY pg_temp.musterd_append (first_line, last_line, inputs) FROM STDIN (FORMAT binary)";
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .start()
        .await
        .map_err(failed("begin the append"))?;
    transaction.batch_execute(STAGE).await.map_err(failed("stage rows"))?;
    let copied = copy(&transaction, STAGED, messages).await;
    let (whole, ()) = better_reason(read.await, copied)?;
    let hash = whole.hash.as_ref().map(<[u8; 32]>::as_slice);
    let row = transaction
        .query_one(EXTEND, &[&id, &idempotency_key, &hash])
        .await
        .map_err(failed("add rows to the batch"))?;
    transaction.commit().await.map_err(failed("commit the append"))?;
    Ok(Appended { id, added: whole.rows, rows: row.get(0), repeated: row.get(1) })
}

/// What was read, or why there is nothing to submit. A bad row explains why the writing broke off; a writing that broke
/// off by itself explains why the rest was not read.
pub(super) fn better_reason<T, E: ReadFailure>(
    read: Result<Whole, E>,
    written: Result<T, SubmissionError>,
) -> Result<(Whole, T), E> {
    match (read, written) {
        (Ok(read), Ok(written)) => Ok((read, written)),
        (Ok(_), Err(error)) => Err(error.into()),
        (Err(cut_off), Err(error)) if cut_off.is_cut_off() => Err(error.into()),
        (Err(error), _) => Err(error),
    }
}

async fn copy(
    transaction: &Transaction<'_>,
    statement: &str,
    mut messages: mpsc::Receiver<Bytes>,
) -> Result<(), SubmissionError> {
    let sink = transaction.copy_in::<_, Bytes>(statement).await.map_err(failed("begin copying rows"))?;
    pin_mut!(sink);
    while let Some(message) = messages.recv().await {
        sink.send(message).await.map_err(failed("copy rows"))?;
    }
    sink.finish().await.map_err(failed("copy rows")).map(|_| ())
}

async fn open(
    transaction: &Transaction<'_>,
    id: i64,
    order: &Order,
    whole: &Whole,
) -> Result<i64, SubmissionError> {
    const SQL: &str = "SELECT musterd.open_batch(p_id => $1, p_command => $2, p_queue => $3, p_context => $4,
               p_priority => $5, p_idempotency_key => $6, p_hold => $7, p_max_attempts => $8,
               p_row_timeout => pg_catalog.make_interval(secs => $9::float8), p_max_failed => $10,
               p_max_failed_percent => $11, p_on_done => $12, p_on_budget => $13, p_rows => $14, p_request_hash => $15,
               p_traceparent => $16, p_keep => pg_catalog.justify_hours(pg_catalog.make_interval(secs => $17::float8)))";
    let timeout = order.row_timeout.map(|timeout| timeout.as_secs_f64());
    let (max_failed, percent) = match order.max_failed {
        MaxFailed::Rows(rows) => (rows, None),
        MaxFailed::Percent(percent) => (0, Some(percent)),
    };
    let rows = i32::try_from(whole.rows).unwrap_or(i32::MAX);
    let hash = whole.hash.as_ref().map(<[u8; 32]>::as_slice);
    let row = transaction
        .query_one(
            SQL,
            &[
                &id,
                &order.command,
                &order.queue,
                &order.context,
                &order.priority,
                &order.idempotency_key,
                &order.hold,
                &order.max_attempts,
                &timeout,
                &max_failed,
                &percent,
                &order.on_done,
                &order.on_budget.map(OnBudget::as_str),
                &rows,
                &hash,
                &order.traceparent.as_ref().map(Traceparent::as_str),
                &order.keep.map(|keep| keep.as_secs_f64()),
            ],
        )
        .await
        .map_err(failed("open the batch"))?;
    let opened: i64 = row.get(0);
    if let Some(canary) = order.canary.as_ref().filter(|_| opened == id) {
        const CANARY: &str = "SELECT musterd.canary($1, $2, $3, $4)";
        let params: [&(dyn ToSql + Sync); 4] = [&id, &canary.rows, &canary.sample, &canary.auto_release];
        transaction.execute(CANARY, &params).await.map_err(failed("choose the canary"))?;
    }
    Ok(opened)
}
