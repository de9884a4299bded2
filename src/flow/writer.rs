//! Writes outcomes: every one is applied, or refused by the fence, or kept until it can be.
//!
//! A flush is one transaction for all blocks that have something to write. A group that cannot be written is taken apart:
//! what alone cannot be written now is put aside, and everything else goes on.

mod aside;
mod flusher;
mod tasks;

use super::{
    batcher::{Weight, Writer},
    complete::Checks,
    fiber::Brake,
};
use crate::{
    error_text::describe,
    failpoint::is_mutant,
    health::{Health, WRITES},
    held::Held,
    json::Json,
    metrics::Metrics,
    store::{
        blocks::{BlockRef, Parts},
        flush::{BlockWrite, Close, Outcomes},
        tasks::{TaskEnd, TaskWrite},
    },
};
use aside::Aside;
use deadpool_postgres::Pool;
use flusher::{Answer, Flusher};
use std::{collections::HashMap, sync::Arc};
use tasks::TasksAside;
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

/// What a fiber hands over.
#[derive(Debug)]
pub enum Update {
    Block(Box<BlockUpdate>),
    Task(TaskWrite),
}

/// Some outcomes of a block, or its end.
#[derive(Debug)]
pub struct BlockUpdate {
    pub block: BlockRef,
    pub parts: Parts,
    pub outcomes: Outcomes,
    pub close: Option<Close>,
    /// A fiber, or a person, waits for the write: it does not wait for others to gather.
    pub waited_for: bool,
    /// Of a batch with a budget: hears what became of the failures.
    pub brake: Option<Arc<Brake>>,
    /// Hear when it was written, or refused.
    pub written: Vec<oneshot::Sender<()>>,
}

/// Whether outcomes can be written; while they cannot, nothing new is claimed.
#[derive(Clone, Debug)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    pub fn new() -> (Self, watch::Receiver<bool>) {
        let (sender, receiver) = watch::channel(true);
        (Self(sender), receiver)
    }
}

/// What follows when the database refuses to be written to, and when it does no longer.
#[derive(Clone, Debug)]
struct Trouble {
    health: Health,
    gate: Gate,
}

impl Trouble {
    fn begins(&self, tries: u32, error: &(dyn std::error::Error + 'static)) {
        self.gate.0.send_if_modified(|open| std::mem::replace(open, false));
        // The first line only: PostgreSQL's DETAIL, on the next, quotes the row.
        let said = describe(error);
        let reason = said.lines().next().unwrap_or_default();
        self.health.unready(WRITES, format!("outcomes cannot be written: {reason}"));
        if tries == 1 {
            tracing::warn!(error = reason, "a flush failed; keeping its outcomes and trying again");
        }
    }

    fn ends(&self) {
        if self.gate.0.send_if_modified(|open| !std::mem::replace(open, true)) {
            self.health.ready(WRITES);
            tracing::info!("outcomes can be written again");
        }
    }

    /// The schema or the rights are wrong: a person is needed.
    fn is_systemic(&self, error: &tokio_postgres::Error) {
        let sqlstate = error.code().map_or("none", |state| state.code());
        let said = describe(error);
        tracing::error!(
            sqlstate,
            error = said.lines().next(),
            "outcomes cannot be written: the schema or the rights are wrong; everything is kept"
        );
    }
}

#[derive(Debug)]
pub struct OutcomeWriter {
    flusher: Flusher,
    after: Acknowledge,
    aside: Aside,
    tasks_aside: TasksAside,
}

/// What a writer needs of the rest of the daemon.
#[derive(Debug)]
pub struct WriterParts {
    /// For flushes: one at a time.
    pub pool: Pool,
    /// For what was put aside.
    pub general: Pool,
    pub held: Held,
    pub checks: Checks,
    pub health: Health,
    pub gate: Gate,
    pub metrics: Metrics,
}

impl OutcomeWriter {
    pub fn new(parts: WriterParts) -> Self {
        let WriterParts { pool, general, held, checks, health, gate, metrics } = parts;
        let trouble = Trouble { health, gate };
        let after = Acknowledge { held, checks, metrics: metrics.clone() };
        let flusher = Flusher { pool, trouble, metrics };
        let beside = Flusher { pool: general, ..flusher.clone() };
        let aside = Aside::new(beside.clone(), after.clone());
        let tasks_aside = TasksAside::new(beside, after.clone());
        Self { flusher, after, aside, tasks_aside }
    }
}

impl Writer for OutcomeWriter {
    type Update = Update;

    fn weight(update: &Update) -> Weight {
        match update {
            Update::Block(update) => Weight {
                updates: update.outcomes.len().max(1) as u32,
                room: update.outcomes.weight(),
                bytes: update.outcomes.bytes(),
                waited_for: update.waited_for,
            },
            Update::Task(write) => {
                let bytes = match &write.end {
                    TaskEnd::Succeeded { result, spawn, after } => {
                        [result, spawn, after].into_iter().flatten().map(Json::len).sum()
                    }
                    TaskEnd::Failed { error, result } => error.len() + result.as_ref().map_or(0, Json::len),
                    TaskEnd::Retry { error, .. } | TaskEnd::Postponed { error, .. } => error.len(),
                    TaskEnd::GiveBack => 0,
                };
                Weight { updates: 1, room: 1, bytes, waited_for: true }
            }
        }
    }

    async fn write(&mut self, updates: Vec<Update>) -> u64 {
        let (mut blocks, mut tasks) = (Vec::new(), Vec::new());
        for update in updates {
            match update {
                Update::Block(update) => blocks.push(*update),
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

    /// Waits for what was put aside.
    async fn finish(&mut self) {
        self.aside.finish().await;
        self.tasks_aside.finish().await;
    }
}

impl OutcomeWriter {
    /// Returns the rows that were written.
    async fn write_blocks(&mut self, updates: Vec<BlockUpdate>) -> u64 {
        let (mut writes, mut notes) = (Vec::new(), Vec::new());
        for (write, note) in merge(updates) {
            // Parts of a token are written in their order: what comes after one that is aside waits with it.
            if let Some((write, note)) = self.aside.join(write, note) {
                writes.push(write);
                notes.push(note);
            }
        }
        if writes.is_empty() {
            return 0;
        }
        if is_mutant("untrack_first") {
            writes.iter().for_each(|write| self.after.held.forget(write.block.token));
        }
        let answers = self.flusher.write(&mut writes, &mut notes).await;
        let mut rows = 0;
        for ((write, note), answer) in writes.into_iter().zip(notes).zip(answers) {
            match answer {
                Answer::Aside(reason) => self.aside.put(write, note, reason).await,
                answer => rows += self.after.acknowledge(&write, note, answer),
            }
        }
        rows
    }
}

/// What is to be done beside a write.
#[derive(Debug)]
struct Note {
    parts: Parts,
    brake: Option<Arc<Brake>>,
    written: Vec<oneshot::Sender<()>>,
    /// Failures that the brake counts as on their way.
    pending: i64,
    /// Rows that were written already, piece by piece.
    succeeded: u64,
    failed: u64,
}

/// One write per block, in the order of their ids: every transaction locks in the same order.
fn merge(updates: Vec<BlockUpdate>) -> Vec<(BlockWrite, Note)> {
    let mut by_token: HashMap<Uuid, (BlockWrite, Note)> = HashMap::with_capacity(updates.len());
    for update in updates {
        let BlockUpdate { block, parts, outcomes, close, brake, written, .. } = update;
        let (write, note) = by_token.entry(block.token).or_insert_with(|| {
            let write = BlockWrite { block, part: parts.next(), outcomes: Outcomes::default(), close: None };
            (write, Note { parts, brake, written: Vec::new(), pending: 0, succeeded: 0, failed: 0 })
        });
        note.pending += outcomes.failed() as i64;
        write.outcomes.extend(outcomes);
        write.close = close.or(write.close.take());
        note.written.extend(written);
    }
    let mut merged: Vec<(BlockWrite, Note)> = by_token.into_values().collect();
    merged.sort_by_key(|(write, _)| write.block.id);
    merged
}

/// What follows from a commit, and only from a commit.
#[derive(Clone, Debug)]
struct Acknowledge {
    held: Held,
    checks: Checks,
    metrics: Metrics,
}

impl Acknowledge {
    /// Returns the rows that were written.
    fn acknowledge(&self, write: &BlockWrite, note: Note, answer: Answer) -> u64 {
        let BlockWrite { block, outcomes, close, .. } = write;
        // What is left in the write, and what was written of it piece by piece before.
        let (succeeded, failed) = match answer {
            Answer::Written | Answer::AppliedBefore => {
                (note.succeeded + outcomes.succeeded() as u64, note.failed + outcomes.failed() as u64)
            }
            Answer::Refused | Answer::Aside(_) => (note.succeeded, note.failed),
        };
        if let Some(brake) = &note.brake {
            brake.settled(note.pending, failed as i64);
        }
        let is_refused = matches!(answer, Answer::Refused);
        if is_refused {
            self.metrics.fenced.inc_by(outcomes.len().max(1) as u64);
            tracing::warn!(token = %block.token, batch = block.batch, rows = outcomes.len(),
                "another worker has this block now; its outcomes were refused");
            self.held.cancel_of(block.token).fenced.cancel();
        }
        self.metrics.count_rows(succeeded, failed);
        if succeeded + failed > 0 {
            self.metrics.batcher.outcomes.inc();
        }
        if close.is_some() || is_refused {
            self.held.forget(block.token);
            // Asked for in every case: whichever flush wrote the last row, the batch must be looked at.
            self.checks.ask(block.batch);
        } else if failed > 0 {
            self.checks.ask(block.batch);
        }
        for written in note.written {
            // A fiber that was cancelled meanwhile does not listen any more.
            let _ = written.send(());
        }
        succeeded + failed
    }
}

#[cfg(test)]
mod tests;
