//! Writes outcomes: every one is applied, or refused by the fence, or kept until it can be.

mod tasks;

use super::{
    batcher::{Weight, Writer},
    complete::Checks,
    held::Held,
};
use crate::{
    backoff,
    json::Json,
    metrics::Metrics,
    periodic::describe,
    store::{
        LONGEST_BACKOFF,
        blocks::BlockRef,
        fault::{self, Fault},
        flush::{self, BlockWrite, Close, RowWrite, Verdict, Written},
        tasks::{TaskEnd, TaskWrite},
    },
    supervisor::{Health, WRITES},
};
use deadpool_postgres::Pool;
use std::{collections::HashMap, time::Duration};
use tokio::sync::watch;
use uuid::Uuid;

/// What a fiber hands over.
#[derive(Debug)]
pub enum Update {
    Block(BlockUpdate),
    Task(TaskWrite),
}

/// Some outcomes of a block, or its end.
#[derive(Debug)]
pub struct BlockUpdate {
    pub block: BlockRef,
    pub rows: Vec<RowWrite>,
    pub close: Option<Close>,
    /// Somebody waits for the write: it does not wait for others to gather.
    pub waited_for: bool,
}

/// Whether outcomes can be written; while they cannot, nothing new is claimed.
#[derive(Debug)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    pub fn new() -> (Self, watch::Receiver<bool>) {
        let (sender, receiver) = watch::channel(true);
        (Self(sender), receiver)
    }
}

#[derive(Debug)]
pub struct OutcomeWriter {
    pub pool: Pool,
    pub held: Held,
    pub checks: Checks,
    pub health: Health,
    pub gate: Gate,
    pub metrics: Metrics,
}

impl Writer for OutcomeWriter {
    type Update = Update;

    fn weight(update: &Update) -> Weight {
        match update {
            Update::Block(update) => weight_of_block(update),
            Update::Task(write) => {
                let bytes = match &write.end {
                    TaskEnd::Succeeded { result, spawn, after } => {
                        [result, spawn, after].into_iter().flatten().map(Json::len).sum()
                    }
                    TaskEnd::Failed(error)
                    | TaskEnd::Retry { error, .. }
                    | TaskEnd::Postponed { error, .. } => error.len(),
                    TaskEnd::GiveBack => 0,
                };
                Weight { updates: 1, bytes, waited_for: true }
            }
        }
    }

    async fn write(&mut self, updates: Vec<Update>) -> u64 {
        let (mut blocks, mut tasks) = (Vec::new(), Vec::new());
        for update in updates {
            match update {
                Update::Block(update) => blocks.push(update),
                Update::Task(write) => tasks.push(write),
            }
        }
        // A transaction for each kind: a value that cannot be stored then holds up only its own.
        let mut rows = 0;
        if !blocks.is_empty() {
            rows += self.write_blocks(blocks).await;
        }
        if !tasks.is_empty() {
            rows += self.write_tasks(tasks).await;
        }
        rows
    }
}

fn weight_of_block(update: &BlockUpdate) -> Weight {
    Weight {
        updates: update.rows.len().max(1) as u32,
        bytes: update.rows.iter().map(RowWrite::bytes).sum(),
        waited_for: update.waited_for,
    }
}

impl OutcomeWriter {
    /// Returns the rows that were written.
    async fn write_blocks(&mut self, updates: Vec<BlockUpdate>) -> u64 {
        let blocks = merge(updates);
        let written = match self.outlast(&blocks).await {
            Ok(written) => written,
            Err(error) => {
                // The first line only: PostgreSQL's DETAIL, on the next, quotes the row.
                let error = describe(&error);
                tracing::warn!(error = error.lines().next(), "a row cannot be stored; looking for it");
                self.write_apart(&blocks).await
            }
        };
        self.settle(&blocks, &written);
        written.iter().map(|answer| answer.rows()).sum()
    }
}

/// One write per block, in the order of their ids: everybody locks in the same order. Of several outcomes of one
/// line the newest wins.
fn merge(updates: Vec<BlockUpdate>) -> Vec<BlockWrite> {
    let mut by_token: HashMap<Uuid, BlockWrite> = HashMap::new();
    for update in updates {
        let write = by_token.entry(update.block.token).or_insert_with(|| BlockWrite {
            block: update.block,
            rows: Vec::new(),
            close: None,
        });
        write.rows.extend(update.rows);
        write.close = update.close.or(write.close.take());
    }
    let mut blocks: Vec<BlockWrite> = by_token.into_values().collect();
    for block in &mut blocks {
        // Stable, and reversed first: of equal lines the one that came last survives.
        block.rows.reverse();
        block.rows.sort_by_key(|row| row.line);
        block.rows.dedup_by_key(|row| row.line);
    }
    blocks.sort_by_key(|block| block.block.id);
    blocks
}

impl OutcomeWriter {
    /// Tries until it is written; gives up only when a row is at fault.
    async fn outlast(&mut self, blocks: &[BlockWrite]) -> Result<Vec<Written>, tokio_postgres::Error> {
        let mut tries = 0;
        let mut unsure = false;
        loop {
            let error: Box<dyn std::error::Error + Send + Sync> = match self.pool.get().await {
                Ok(client) => match flush::write_if_held(&client, blocks).await {
                    Ok(written) => match self.adjudicate(&client, blocks, written, unsure).await {
                        Ok(written) => {
                            self.recovered();
                            return Ok(written);
                        }
                        Err(error) => Box::new(error),
                    },
                    Err(error) => {
                        self.metrics.batcher.rollbacks.inc();
                        match fault::of(&error) {
                            // The session is as good as before, and the search for the row needs it many times.
                            Fault::Row => return Err(error),
                            Fault::Systemic => self.complain(&error),
                            Fault::Transient => unsure |= fault::is_of_connection(&error),
                        }
                        // The session may be in any state; a new one is cheap.
                        drop(deadpool_postgres::Object::take(client));
                        Box::new(error)
                    }
                },
                Err(error) => Box::new(error),
            };
            tries += 1;
            self.hold(tries, &*error);
            tokio::time::sleep(backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries)).await;
        }
    }

    /// After a lost reply a block that is gone and has our tally was written by us, not taken from us.
    async fn adjudicate(
        &self,
        client: &deadpool_postgres::Object,
        blocks: &[BlockWrite],
        mut written: Vec<Written>,
        unsure: bool,
    ) -> Result<Vec<Written>, tokio_postgres::Error> {
        self.metrics.batcher.transactions.inc();
        if !unsure || !written.contains(&Written::NotHeld) {
            return Ok(written);
        }
        let references: Vec<BlockRef> = blocks.iter().map(|block| block.block).collect();
        let applied = flush::tokens_with_tally(client, &references).await?;
        for (block, answer) in blocks.iter().zip(&mut written) {
            if *answer == Written::NotHeld && applied.contains(&block.block.token) {
                *answer = Written::Held { succeeded: 0, failed: 0 };
            }
        }
        Ok(written)
    }

    /// Halves the rows until the ones at fault stand alone; those are failed with PostgreSQL's words, their
    /// neighbours are stored. The blocks close last, when every row has its outcome.
    async fn write_apart(&mut self, blocks: &[BlockWrite]) -> Vec<Written> {
        let mut sums: HashMap<Uuid, Written> = HashMap::new();
        let rows_only = |block: &BlockWrite| BlockWrite { close: None, ..block.clone() };
        let mut pieces: Vec<Vec<BlockWrite>> = vec![blocks.iter().map(rows_only).collect()];
        while let Some(mut piece) = pieces.pop() {
            match self.outlast(&piece).await {
                Ok(written) => add(&mut sums, &piece, &written),
                Err(error) => match halve(&piece) {
                    Some((one, other)) => pieces.extend([other, one]),
                    None => {
                        blame(&mut piece, &error);
                        let written = self.outlast_anything(&piece).await;
                        add(&mut sums, &piece, &written);
                    }
                },
            }
        }
        let closes_only = |block: &BlockWrite| BlockWrite { rows: Vec::new(), ..block.clone() };
        let closes: Vec<BlockWrite> = blocks.iter().map(closes_only).collect();
        let written = self.outlast_anything(&closes).await;
        add(&mut sums, &closes, &written);
        blocks.iter().map(|block| sums.get(&block.block.token).copied().unwrap_or(Written::NotHeld)).collect()
    }

    /// For writes in which no value can be at fault any more: a refusal then is the schema's, and is outlasted too.
    async fn outlast_anything(&mut self, blocks: &[BlockWrite]) -> Vec<Written> {
        let mut tries = 0;
        loop {
            match self.outlast(blocks).await {
                Ok(written) => return written,
                Err(error) => {
                    tries += 1;
                    self.complain(&error);
                    self.hold(tries, &error);
                    tokio::time::sleep(backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries))
                        .await;
                }
            }
        }
    }

    fn complain(&self, error: &tokio_postgres::Error) {
        let sqlstate = error.code().map_or("none", |state| state.code());
        tracing::error!(
            sqlstate,
            error = describe(error),
            "outcomes cannot be written: the schema or the rights are wrong; everything is kept"
        );
    }

    fn hold(&self, tries: u32, error: &(dyn std::error::Error + 'static)) {
        self.gate.0.send_if_modified(|open| std::mem::replace(open, false));
        // The first line only: PostgreSQL's DETAIL, on the next, quotes the row.
        let said = describe(error);
        let reason = said.lines().next().unwrap_or_default();
        self.health.unready(WRITES, format!("outcomes cannot be written: {reason}"));
        if tries == 1 {
            tracing::warn!(error = %error, "a flush failed; keeping its outcomes and trying again");
        }
    }

    fn recovered(&self) {
        if self.gate.0.send_if_modified(|open| !std::mem::replace(open, true)) {
            self.health.ready(WRITES);
            tracing::info!("outcomes can be written again");
        }
    }

    /// What follows from a commit, and only from a commit.
    fn settle(&self, blocks: &[BlockWrite], written: &[Written]) {
        for (block, answer) in blocks.iter().zip(written) {
            let reference = block.block;
            if matches!(answer, Written::Held { succeeded, failed } if succeeded + failed > 0) {
                self.metrics.batcher.tallies.inc();
            }
            match answer {
                Written::Held { succeeded, failed } => self.metrics.count_rows(*succeeded, *failed),
                Written::NotHeld => {
                    self.metrics.fenced.inc_by(block.rows.len().max(1) as u64);
                    tracing::warn!(token = %reference.token, batch = reference.batch, rows = block.rows.len(),
                        "this block is somebody else's now; its outcomes were refused");
                    self.held.cancel_of(reference.token).fenced.cancel();
                }
            }
            if block.close.is_some() || *answer == Written::NotHeld {
                self.held.forget(reference.token);
                // Asked for in every case: whoever wrote the last row, somebody must look.
                self.checks.ask(reference.batch);
            } else if matches!(answer, Written::Held { failed, .. } if *failed > 0) {
                self.checks.ask(reference.batch);
            }
        }
    }
}

fn add(sums: &mut HashMap<Uuid, Written>, blocks: &[BlockWrite], written: &[Written]) {
    for (block, answer) in blocks.iter().zip(written) {
        sums.entry(block.block.token)
            .and_modify(|sum| {
                *sum = match (*sum, *answer) {
                    (Written::Held { succeeded: a, failed: b }, Written::Held { succeeded, failed }) => {
                        Written::Held { succeeded: a + succeeded, failed: b + failed }
                    }
                    _ => Written::NotHeld,
                }
            })
            .or_insert(*answer);
    }
}

/// Two halves of the rows, or `None` when there is only one row left (or none: then no row is at fault).
fn halve(piece: &[BlockWrite]) -> Option<(Vec<BlockWrite>, Vec<BlockWrite>)> {
    let total: usize = piece.iter().map(|block| block.rows.len()).sum();
    if total <= 1 {
        return None;
    }
    let mut room = total / 2;
    let (mut one, mut other) = (Vec::new(), Vec::new());
    for block in piece {
        let (first, second) = block.rows.split_at(room.min(block.rows.len()));
        room -= first.len();
        for (rows, side) in [(first, &mut one), (second, &mut other)] {
            if !rows.is_empty() {
                side.push(BlockWrite { block: block.block, rows: rows.to_vec(), close: None });
            }
        }
    }
    Some((one, other))
}

/// The last row standing gets the error as its outcome.
fn blame(piece: &mut [BlockWrite], error: &tokio_postgres::Error) {
    let reason = told(error);
    for row in piece.iter_mut().flat_map(|block| &mut block.rows) {
        row.verdict = Verdict::Failed(reason.clone());
        row.outputs = None;
        row.append.clear();
    }
}

fn told(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("the result cannot be stored: {} (SQLSTATE {})", db.message(), db.code().code()),
        None => "the result cannot be stored".to_owned(),
    }
}
