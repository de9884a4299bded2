//! One flush: outcomes, failures and closed blocks in one transaction, guarded by the token of every block.
//!
//! All statements have the same guard: the block is held with this token, and every line that is said to be done is still
//! open. A block that fails it is refused whole and not answered.

mod outcomes;

pub use outcomes::{Append, Failure, Outcomes};

use super::{
    blocks::BlockRef,
    trip::{self, COMMIT, ROLLBACK},
};
use crate::{
    failpoint,
    failpoint::{is_mutant, patched},
    json::Json,
    lines::Lines,
};
use deadpool_postgres::{ClientWrapper, Object};
use std::time::Duration;
use tokio_postgres::{Error, Row, types::ToSql};
use uuid::Uuid;

/// The end of a block: which of its lines are tried again. All others that are not done come back by themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Close {
    pub retry: Lines,
    pub retry_after: Duration,
    /// What one of the rows to be tried again failed with.
    pub error: Option<String>,
    /// When the lines that were not started are due again.
    pub rest_after: Duration,
    /// Why they were not started, if that was the handler's trouble.
    pub rest_error: Option<String>,
}

/// What one flush writes for one block.
#[derive(Clone, Debug)]
pub struct BlockWrite {
    pub block: BlockRef,
    /// Stands for this content and no other.
    pub part: i32,
    pub outcomes: Outcomes,
    pub close: Option<Close>,
}

/// Whether what was written is to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Write,
    /// Rolled back: only to see whether the database would take it.
    Rehearse,
}

/// How long a flush waits for a lock. Held blocks are locked by others for a moment only; a batch that rows are appended to may
/// be locked by a producer for as long as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    Group,
    Alone,
}

impl Patience {
    fn begin(self) -> &'static str {
        match self {
            Self::Group => "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'",
            Self::Alone => "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '200ms'",
        }
    }
}

const LOCK: &str = include_str!("sql/lock.sql");
const OUTCOMES: &str = include_str!("sql/outcomes.sql");
const FAILURES: &str = include_str!("sql/failures.sql");
const FREE_REST: &str = include_str!("sql/free_rest.sql");
const CLOSE: &str = include_str!("sql/close.sql");
const SHRINK: &str = include_str!("sql/shrink.sql");
/// Only when rows are appended: a batch is locked before its blocks, or not at all.
const LOCK_BATCHES: &str =
    "SELECT b.id FROM musterd.batches b WHERE b.id = ANY ($1) ORDER BY b.id FOR NO KEY UPDATE";
const APPEND: &str = include_str!("sql/append.sql");

/// Writes `blocks`, all or nothing. Answers block by block whether it was written; a block that was not is another
/// worker's now, or was written before by a flush whose reply was lost.
pub async fn write_if_held(
    client: &Object,
    blocks: &mut [BlockWrite],
    purpose: Purpose,
    patience: Patience,
) -> Result<Vec<bool>, Error> {
    let count = blocks.len();
    let columns = Columns::of(blocks);
    // Each statement is sent only when it has something to do.
    failpoint!("flush.begin", client);
    let end = client.batch_execute(match purpose {
        Purpose::Write => COMMIT,
        Purpose::Rehearse => ROLLBACK,
    });
    let statement = |sql: &'static str, needed: bool| async move {
        if needed { client.prepare_cached(patched(sql)).await.map(Some) } else { Ok(None) }
    };
    let (appends, fails) = (!columns.append_input.is_empty(), !columns.failure_line.is_empty());
    let (closes, goes_on) = (!columns.closing.id.is_empty(), !columns.going_on.id.is_empty());
    let (lock_batches, append, lock, outcomes, failures, free_rest, close, shrink) = tokio::try_join!(
        statement(LOCK_BATCHES, appends),
        statement(APPEND, appends),
        statement(LOCK, true),
        statement(OUTCOMES, true),
        statement(FAILURES, fails),
        statement(FREE_REST, closes),
        statement(CLOSE, closes),
        statement(SHRINK, goes_on),
    )?;
    // On the heap: it is as large as all statements together.
    let work = Box::pin(async {
        let (batches_locked, locked, appended, stored, failed, freed, closed, shrunk) = tokio::join!(
            biased;
            run(client, lock_batches, vec![&columns.batches]),
            run(client, lock, vec![&columns.id, &columns.token]),
            run(client, append, columns.append_params()),
            run(client, outcomes, columns.outcome_params()),
            run(client, failures, columns.failure_params()),
            run(client, free_rest, columns.closing.rest_params()),
            run(client, close, columns.closing.params()),
            run(client, shrink, columns.going_on.params()),
        );
        for answer in [batches_locked, locked, appended, stored, failed, freed] {
            answer?;
        }
        Ok((closed?, shrunk?))
    });
    let (closed, shrunk) = trip::run(client, patience.begin(), work, end).await?;
    failpoint!("flush.committed", client);
    Ok(answers(count, closed.iter().chain(&shrunk)))
}

/// Nothing is sent for what is not needed.
async fn run(
    client: &Object,
    statement: Option<tokio_postgres::Statement>,
    params: Vec<&(dyn ToSql + Sync)>,
) -> Result<Vec<Row>, Error> {
    match statement {
        Some(statement) => client.query(&statement, &params).await,
        None => Ok(Vec::new()),
    }
}

/// Writes outcomes of one block as part of a transaction of a handler, which commits only if this says so.
pub async fn write_within(client: &ClientWrapper, write: BlockWrite) -> Result<bool, Error> {
    let mut blocks = [write];
    let columns = Columns::of(&mut blocks);
    let statements: [(&str, bool, Vec<&(dyn ToSql + Sync)>); 4] = [
        (LOCK, true, vec![&columns.id, &columns.token]),
        (OUTCOMES, true, columns.outcome_params()),
        (FAILURES, !columns.failure_line.is_empty(), columns.failure_params()),
        (SHRINK, true, columns.going_on.params()),
    ];
    let mut answered = Vec::new();
    for (sql, _, params) in statements.iter().filter(|(_, needed, _)| *needed) {
        let statement = client.prepare_cached(patched(sql)).await?;
        answered = client.query(&statement, params).await?;
    }
    Ok(answers(1, answered.iter())[0])
}

/// What became of a block that a flush did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// This very part was written before; only the reply was lost.
    Applied,
    /// Another worker has the block, or it was closed for this one.
    NotHeld,
    /// It is still held, and some of the lines are not open: this worker's own account of it is wrong.
    Inconsistent,
}

/// Asks about blocks that a flush did not answer, in their order.
pub async fn ask_about(client: &Object, blocks: &[&BlockWrite]) -> Result<Vec<Unanswered>, Error> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.outcomes o
                        WHERE o.batch_id = u.batch_id AND o.token = u.token AND o.part = u.part),
               EXISTS (SELECT FROM musterd.blocks b WHERE b.id = u.id AND b.token = u.token)
          FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::int[]),
                          pg_catalog.unnest($4::bigint[])) WITH ORDINALITY AS u (batch_id, token, part, id, place)
         ORDER BY u.place";
    let batches: Vec<i64> = blocks.iter().map(|write| write.block.batch).collect();
    let tokens: Vec<Uuid> = blocks.iter().map(|write| write.block.token).collect();
    let parts: Vec<i32> = blocks.iter().map(|write| write.part).collect();
    let ids: Vec<i64> = blocks.iter().map(|write| write.block.id).collect();
    let statement = client.prepare_cached(SQL).await?;
    let answer = |row: &Row| match (row.get(0), row.get(1)) {
        (true, _) if !is_mutant("no_applied") => Unanswered::Applied,
        (_, true) => Unanswered::Inconsistent,
        (_, false) => Unanswered::NotHeld,
    };
    Ok(client.query(&statement, &[&batches, &tokens, &parts, &ids]).await?.iter().map(answer).collect())
}

/// Which lines of a held block are still open; `None` when it is not held.
pub async fn open_lines(client: &ClientWrapper, block: BlockRef) -> Result<Option<Lines>, Error> {
    const SQL: &str = "SELECT b.lines FROM musterd.blocks b WHERE b.id = $1 AND b.token = $2";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query_opt(&statement, &[&block.id, &block.token]).await?.map(|row| row.get(0)))
}

fn answers<'r>(count: usize, rows: impl Iterator<Item = &'r Row>) -> Vec<bool> {
    let mut written = vec![false; count];
    for row in rows {
        let slot: i32 = row.get(0);
        written[slot as usize - 1] = true;
    }
    written
}

/// The blocks of a flush as one array per column, for `unnest`. The slot of a block is its place, from 1.
#[derive(Default)]
struct Columns<'a> {
    id: Vec<i64>,
    token: Vec<Uuid>,
    part: Vec<i32>,
    done: Vec<Lines>,
    /// Seconds since the first row of the block started, and those that a row took.
    age: Vec<Option<f64>>,
    row_took: Vec<Option<f64>>,
    // By outcome.
    outcome_slot: Vec<i32>,
    lines: Vec<Lines>,
    succeeded: Vec<i32>,
    failed: Vec<i32>,
    results: Vec<Option<String>>,
    outputs: Vec<Option<String>>,
    // By failure.
    failure_slot: Vec<i32>,
    failure_line: Vec<i32>,
    error: Vec<&'a str>,
    error_group: Vec<i32>,
    error_code: Vec<Option<&'a str>>,
    failed_result: Vec<Option<&'a Json>>,
    failed_outputs: Vec<Option<&'a Json>>,
    // By appended row.
    batches: Vec<i64>,
    append_slot: Vec<i32>,
    append_input: Vec<&'a str>,
    closing: Ends<'a>,
    going_on: Ends<'a>,
}

/// Blocks that close, or that go on.
#[derive(Default)]
struct Ends<'a> {
    id: Vec<i64>,
    token: Vec<Uuid>,
    done: Vec<Lines>,
    slot: Vec<i32>,
    retry: Vec<&'a Lines>,
    retry_wait: Vec<f64>,
    rest_wait: Vec<f64>,
    error: Vec<Option<&'a str>>,
    rest_error: Vec<Option<&'a str>>,
}

impl<'a> Columns<'a> {
    fn of(blocks: &'a mut [BlockWrite]) -> Self {
        let mut columns = Self::default();
        for (index, write) in blocks.iter_mut().enumerate() {
            let slot = i32::try_from(index + 1).unwrap_or(i32::MAX);
            let failed = write.outcomes.failed() as i32;
            for (place, stripe) in write.outcomes.stripes().into_iter().enumerate() {
                columns.outcome_slot.push(slot);
                columns.lines.push(stripe.lines);
                columns.succeeded.push(stripe.succeeded);
                // Failures are counted in the first tuple of the block.
                columns.failed.push(if place == 0 { failed } else { 0 });
                columns.results.push(stripe.results);
                columns.outputs.push(stripe.outputs);
            }
            let write: &'a BlockWrite = write;
            columns.add(slot, write);
        }
        columns
    }

    fn add(&mut self, slot: i32, write: &'a BlockWrite) {
        let done = write.outcomes.done();
        self.id.push(write.block.id);
        self.token.push(write.block.token);
        self.part.push(write.part);
        self.age.push(write.outcomes.began().map(|began| began.elapsed().as_secs_f64()));
        self.row_took.push(write.outcomes.row_took().map(|took| took.as_secs_f64()));
        for failure in write.outcomes.failures() {
            self.failure_slot.push(slot);
            self.failure_line.push(failure.line);
            self.error.push(&failure.error);
            self.error_group.push(failure.group.0);
            self.error_code.push(failure.code.as_deref());
            self.failed_result.push(failure.result.as_ref());
            self.failed_outputs.push(failure.outputs.as_ref());
        }
        for append in write.outcomes.appended() {
            self.batches.push(write.block.batch);
            self.append_slot.push(slot);
            self.append_input.push(append.input.text());
        }
        let ends = if write.close.is_some() { &mut self.closing } else { &mut self.going_on };
        ends.id.push(write.block.id);
        ends.token.push(write.block.token);
        ends.done.push(done.clone());
        ends.slot.push(slot);
        if let Some(close) = &write.close {
            ends.retry.push(&close.retry);
            ends.retry_wait.push(close.retry_after.as_secs_f64());
            ends.rest_wait.push(close.rest_after.as_secs_f64());
            ends.error.push(close.error.as_deref());
            ends.rest_error.push(close.rest_error.as_deref());
        }
        self.done.push(done);
    }

    fn outcome_params(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.id,
            &self.token,
            &self.done,
            &self.part,
            &self.outcome_slot,
            &self.lines,
            &self.succeeded,
            &self.failed,
            &self.results,
            &self.outputs,
            &self.age,
            &self.row_took,
        ]
    }

    fn failure_params(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.id,
            &self.token,
            &self.done,
            &self.failure_slot,
            &self.failure_line,
            &self.error,
            &self.age,
            &self.row_took,
            &self.error_group,
            &self.error_code,
            &self.failed_result,
            &self.failed_outputs,
        ]
    }

    fn append_params(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.id, &self.token, &self.done, &self.append_slot, &self.append_input]
    }
}

impl Ends<'_> {
    fn params(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.id, &self.token, &self.done, &self.slot]
    }

    fn rest_params(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.id,
            &self.token,
            &self.done,
            &self.retry,
            &self.retry_wait,
            &self.rest_wait,
            &self.error,
            &self.rest_error,
        ]
    }
}
