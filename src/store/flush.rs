//! One flush: outcomes, tallies and closed blocks in one transaction, guarded by the token of every block.

use super::blocks::BlockRef;
use crate::{failpoint, json::Json};
use deadpool_postgres::{Object, Transaction};
use std::{collections::HashMap, time::Duration};
use tokio_postgres::{Error, Row};
use uuid::Uuid;

/// The outcome of one row, as it will be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct RowWrite {
    pub line: i32,
    pub attempt: i32,
    pub verdict: Verdict,
    /// Text for output files, as a JSON object by file name.
    pub outputs: Option<Json>,
    /// Rows to add to its batch. A line that has a result already adds none.
    pub append: Vec<Json>,
}

impl RowWrite {
    /// The bytes its payload takes.
    pub fn bytes(&self) -> usize {
        let verdict = match &self.verdict {
            Verdict::Succeeded(result) => result.as_ref().map_or(0, Json::len),
            Verdict::Failed(error) => error.len(),
        };
        let append: usize = self.append.iter().map(Json::len).sum();
        verdict + self.outputs.as_ref().map_or(0, Json::len) + append
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Succeeded(Option<Json>),
    Failed(String),
}

/// The end of a block: which of its lines come back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Close {
    pub retry: Vec<i32>,
    pub retry_after: Duration,
    /// What one of the rows to be tried again failed with.
    pub error: Option<String>,
    /// Not started: no attempt is charged.
    pub give_back: Vec<i32>,
}

/// What one flush writes for one block.
#[derive(Clone, Debug)]
pub struct BlockWrite {
    pub block: BlockRef,
    pub rows: Vec<RowWrite>,
    pub close: Option<Close>,
}

/// What really changed for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The block was held; so many outcomes were new.
    Held { succeeded: u64, failed: u64 },
    /// Somebody else has it now: nothing was written.
    NotHeld,
}

impl Written {
    /// How many outcomes were new.
    pub fn rows(self) -> u64 {
        match self {
            Self::Held { succeeded, failed } => succeeded + failed,
            Self::NotHeld => 0,
        }
    }
}

const LOCK: &str = include_str!("sql/lock.sql");
const RESULTS: &str = include_str!("sql/results.sql");
const CLOSE: &str = include_str!("sql/close.sql");
/// Only when rows are appended: a batch is locked before its blocks, or not at all.
const LOCK_BATCHES: &str =
    "SELECT b.id FROM musterd.batches b WHERE b.id = ANY ($1) ORDER BY b.id FOR NO KEY UPDATE";
const APPEND: &str = include_str!("sql/append.sql");

/// Writes `blocks`, all or nothing. The answer says block by block whether it was still held.
pub async fn write_if_held(client: &Object, blocks: &[BlockWrite]) -> Result<Vec<Written>, Error> {
    let (lock, results, close) = tokio::try_join!(
        client.prepare_cached(LOCK),
        client.prepare_cached(RESULTS),
        client.prepare_cached(CLOSE),
    )?;
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) = blocks.iter().map(|b| (b.block.id, b.block.token)).unzip();
    let rows = RowColumns::of(blocks);
    let ends = CloseColumns::of(blocks);
    let more = AppendColumns::of(blocks);
    let growth = match more.is_empty() {
        true => None,
        false => Some(tokio::try_join!(client.prepare_cached(LOCK_BATCHES), client.prepare_cached(APPEND))?),
    };

    // Sent in one go and answered in order: a round trip for the transaction, not for each statement. A statement
    // that fails makes the server refuse those behind it, and the COMMIT a rollback.
    failpoint!("flush.begin");
    let begin = client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED");
    let lock_params: Params<'_, 2> = [&ids, &tokens];
    let row_params = rows.params(&ids, &tokens);
    let close_params: Params<'_, 7> =
        [&ends.id, &ends.token, &ends.wait, &ends.slot, &ends.retry, &ends.line, &ends.error];
    let close = async {
        match ends.id.is_empty() {
            true => Ok(0),
            false => client.execute(&close, &close_params).await,
        }
    };
    let lock_batches = async {
        match &growth {
            None => Ok(0),
            Some((lock, _)) => client.execute(lock, &[&more.batches]).await,
        }
    };
    let append_params: Params<'_, 6> = [&ids, &tokens, &more.slot, &more.line, &more.place, &more.input];
    let append = async {
        match &growth {
            None => Ok(0),
            Some((_, append)) => client.execute(append, &append_params).await,
        }
    };
    let (begun, batches_locked, locked, appended, stored, closed, committed) = tokio::join!(
        biased;
        begin,
        lock_batches,
        client.query(&lock, &lock_params),
        append,
        client.query(&results, &row_params),
        close,
        client.batch_execute("COMMIT"),
    );
    begun?;
    batches_locked?;
    locked?;
    appended?;
    let stored = stored?;
    closed?;
    committed?;
    failpoint!("flush.committed");
    Ok(answers(blocks, &stored))
}

/// Writes outcomes of one block as part of a transaction that somebody else began, and will commit only if they all are new.
pub async fn write_rows_within(
    transaction: &Transaction<'_>,
    block: BlockRef,
    rows: Vec<RowWrite>,
) -> Result<Written, Error> {
    let blocks = [BlockWrite { block, rows, close: None }];
    let (ids, tokens) = (vec![block.id], vec![block.token]);
    let lock = transaction.prepare_cached(LOCK).await?;
    let results = transaction.prepare_cached(RESULTS).await?;
    transaction.query(&lock, &[&ids, &tokens]).await?;
    let rows = RowColumns::of(&blocks);
    let params = rows.params(&ids, &tokens);
    let stored = transaction.query(&results, &params).await?;
    Ok(answers(&blocks, &stored).first().copied().unwrap_or(Written::NotHeld))
}

/// Which of these lines have a result: of a transaction whose reply was lost, the proof that it was applied.
pub async fn lines_with_result(client: &Object, batch: i64, lines: &[i32]) -> Result<Vec<i32>, Error> {
    const SQL: &str = "SELECT r.line FROM musterd.results r WHERE r.batch_id = $1 AND r.line = ANY ($2)";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query(&statement, &[&batch, &lines]).await?.iter().map(|row| row.get(0)).collect())
}

type Params<'a, const N: usize> = [&'a (dyn tokio_postgres::types::ToSql + Sync); N];

fn answers(blocks: &[BlockWrite], stored: &[Row]) -> Vec<Written> {
    let counted: HashMap<Uuid, (i32, i32)> =
        stored.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect();
    let answer = |block: &BlockWrite| match counted.get(&block.block.token) {
        Some(&(succeeded, failed)) => Written::Held { succeeded: succeeded as u64, failed: failed as u64 },
        None => Written::NotHeld,
    };
    blocks.iter().map(answer).collect()
}

/// The rows of all blocks as one array per column, for `unnest`.
#[derive(Default)]
struct RowColumns<'a> {
    slot: Vec<i32>,
    line: Vec<i32>,
    attempt: Vec<i32>,
    ok: Vec<bool>,
    result: Vec<Option<&'a Json>>,
    error: Vec<Option<&'a str>>,
    outputs: Vec<Option<&'a Json>>,
}

impl<'a> RowColumns<'a> {
    /// In the order of results.sql.
    fn params<'p>(&'p self, ids: &'p Vec<i64>, tokens: &'p Vec<Uuid>) -> Params<'p, 9> {
        let Self { slot, line, attempt, ok, result, error, outputs } = self;
        [ids, tokens, slot, line, attempt, ok, result, error, outputs]
    }

    fn of(blocks: &'a [BlockWrite]) -> Self {
        let mut columns = Self::default();
        for (index, block) in blocks.iter().enumerate() {
            for row in &block.rows {
                columns.slot.push(slot(index));
                columns.line.push(row.line);
                columns.attempt.push(row.attempt);
                columns.outputs.push(row.outputs.as_ref());
                let (ok, result, error) = match &row.verdict {
                    Verdict::Succeeded(result) => (true, result.as_ref(), None),
                    Verdict::Failed(error) => (false, None, Some(error.as_str())),
                };
                columns.ok.push(ok);
                columns.result.push(result);
                columns.error.push(error);
            }
        }
        columns
    }
}

/// The rows that rows add to their batches.
#[derive(Default)]
struct AppendColumns<'a> {
    batches: Vec<i64>,
    slot: Vec<i32>,
    /// The line that adds it, and its place among those that this line adds.
    line: Vec<i32>,
    place: Vec<i32>,
    input: Vec<&'a Json>,
}

impl<'a> AppendColumns<'a> {
    fn of(blocks: &'a [BlockWrite]) -> Self {
        let mut columns = Self::default();
        for (index, block) in blocks.iter().enumerate() {
            for row in block.rows.iter().filter(|row| !row.append.is_empty()) {
                columns.batches.push(block.block.batch);
                for (place, input) in row.append.iter().enumerate() {
                    columns.slot.push(slot(index));
                    columns.line.push(row.line);
                    columns.place.push(slot(place));
                    columns.input.push(input);
                }
            }
        }
        columns
    }

    fn is_empty(&self) -> bool {
        self.input.is_empty()
    }
}

/// The blocks that end, and their lines that come back.
#[derive(Default)]
struct CloseColumns<'a> {
    id: Vec<i64>,
    token: Vec<Uuid>,
    wait: Vec<f64>,
    slot: Vec<i32>,
    retry: Vec<bool>,
    line: Vec<i32>,
    error: Vec<Option<&'a str>>,
}

impl<'a> CloseColumns<'a> {
    fn of(blocks: &'a [BlockWrite]) -> Self {
        let mut columns = Self::default();
        for (block, close) in blocks.iter().filter_map(|block| Some((block, block.close.as_ref()?))) {
            let slot = slot(columns.id.len());
            columns.id.push(block.block.id);
            columns.token.push(block.block.token);
            columns.wait.push(close.retry_after.as_secs_f64());
            columns.error.push(close.error.as_deref());
            for (lines, retry) in [(&close.retry, true), (&close.give_back, false)] {
                for line in lines {
                    columns.slot.push(slot);
                    columns.retry.push(retry);
                    columns.line.push(*line);
                }
            }
        }
        columns
    }
}

/// SQL counts from one.
fn slot(index: usize) -> i32 {
    i32::try_from(index + 1).unwrap_or(i32::MAX)
}

/// Which of these tokens have a tally: of a flush whose reply was lost, the proof that it was applied.
pub async fn tokens_with_tally(client: &Object, blocks: &[BlockRef]) -> Result<Vec<Uuid>, Error> {
    const SQL: &str = "SELECT DISTINCT t.token
          FROM musterd.tallies t
          JOIN ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) AS u (batch_id, token)
            ON u.batch_id = t.batch_id AND u.token = t.token";
    let (batches, tokens): (Vec<i64>, Vec<Uuid>) = blocks.iter().map(|b| (b.batch, b.token)).unzip();
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&batches, &tokens]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
