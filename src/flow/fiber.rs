//! A fiber: runs the rows of one block, one after the other, and hands over their outcomes.

mod alone;
mod budget;
mod facts;
mod overdue;
mod slice;
mod work;

pub use budget::Brake;
pub use facts::FactsCache;

use super::{
    batcher::{Sender, Writer},
    complete::Checks,
    pace::Pace,
    solo::{Company, Room, Solitude},
    watch::{Watch, Watched, WatchedBlock},
    writer::{BlockUpdate, OutcomeWriter, Update},
};
use crate::{
    backoff,
    error_text::describe,
    handler::Registry,
    held::{Cancel, Held, Key},
    liveness::lease::Lease,
    metrics::{Call, Metrics},
    spans::Span,
    store::{
        Store,
        blocks::{self, Block},
        flush::{Close, Outcomes},
        pages::ChunkCache,
    },
};
use futures::FutureExt;
use tokio_util::sync::CancellationToken;
use work::{Given, Work};

/// Everything a fiber needs; shared by all of them.
#[derive(Clone, Debug)]
pub struct Bench {
    pub store: Store,
    pub handlers: Registry,
    pub outcomes: Sender<Update>,
    pub checks: Checks,
    pub held: Held,
    /// Of rows.
    pub pace: Pace,
    pub task_pace: Pace,
    pub retry: backoff::Config,
    /// A task that takes so many connections down with it is failed.
    pub max_crashes: i32,
    pub metrics: Metrics,
    /// Give back what is running, now.
    pub now: CancellationToken,
    pub facts: FactsCache,
    pub chunks: ChunkCache,
    /// Without it no handler is started: another worker may have the block by now.
    pub lease: Lease,
    pub room: Room,
    pub watch: Watch,
}

/// How the work on a block came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Every row was run.
    Whole,
    /// The rest goes back, nothing charged.
    GiveBack,
    /// The batch is being aborted, as the database said: the rest is not run.
    Aborted,
    /// Another worker has the block.
    Fenced,
}

impl Bench {
    /// Runs a block to its end beside others; or, when it must be alone, when they are gone.
    pub async fn run(&self, block: Block, company: Company) {
        if !block.solo {
            self.run_block(block).await;
            return drop(company);
        }
        // Not one of those it waits for.
        drop(company);
        let cancel = self.held.cancel_of(block.reference.token);
        let solitude = tokio::select! {
            biased;
            end = interrupted(&cancel, &self.now) => return self.leave(&block, end).await,
            solitude = self.alone_with(block.reference.token.into()) => solitude,
        };
        // Another replica may have nothing else to do.
        let Some(solitude) = solitude else { return self.leave(&block, End::GiveBack).await };
        let marked = self.patiently(&cancel, "block", || async {
            blocks::mark_alone_if_held(&self.store.general.get().await?, block.reference).await
        });
        match marked.await {
            Some(true) => {
                tracing::warn!(batch = block.reference.batch, lines = %block.lines, token = %block.reference.token,
                    "a row that processes died with runs alone now");
                let (reference, suspect) = (block.reference, (block.reference.token.into(), block.crashes));
                let lift =
                    || async move { blocks::unmark_alone(&self.store.general.get().await?, reference).await };
                return self.alone_for_a_while(suspect, solitude, self.run_block(block), lift).await;
            }
            Some(false) => self.leave(&block, End::Fenced).await,
            None => {
                let end = interrupted(&cancel, &self.now).await;
                self.leave(&block, end).await;
            }
        }
        drop(solitude);
    }

    /// Waits until nothing else is at work and the outcomes of all other work are written: a death is then this block's or task's
    /// doing. `None`: the others take too long.
    pub(super) async fn alone_with(&self, key: Key) -> Option<Solitude> {
        self.held.stand_by(key, true);
        let settled = async {
            self.held.stand_by(key, false);
            self.held.nothing_but(key).await;
        };
        self.room.alone(settled).await
    }

    /// Whether solitary work may be claimed now.
    pub(super) fn takes_solo(&self) -> bool {
        self.room.may_wait(self.held.oldest())
    }

    /// Gives back a block that waited for a fiber.
    pub async fn give_back(&self, block: &Block) {
        self.leave(block, End::GiveBack).await;
    }

    /// Gives up a block of which nothing was started.
    async fn leave(&self, block: &Block, end: End) {
        if end == End::Fenced {
            self.metrics.fenced.inc();
            return self.held.forget(block.reference.token);
        }
        if end != End::Aborted {
            self.metrics.rows_given_back.inc_by(block.lines.len() as u64);
        }
        let update = BlockUpdate {
            block: block.reference,
            parts: block.parts.clone(),
            outcomes: Outcomes::default(),
            close: Some(Close::default()),
            waited_for: true,
            brake: None,
            written: Vec::new(),
        };
        self.hand_over(Update::Block(Box::new(update))).await;
    }

    /// Runs a block to its end and hands over its close.
    async fn run_block(&self, block: Block) {
        let Some(entry) = self.handlers.get(&block.command).cloned() else {
            // The claim asks for our commands only; a block of another is a bug, and goes back unharmed.
            tracing::error!(command = block.command, "claimed a block of a command that is not ours");
            return self.leave(&block, End::GiveBack).await;
        };
        let cancel = self.held.cancel_of(block.reference.token);
        let Some(facts) = self.facts_of(&block, &cancel).await else {
            // Asked to give up; or the batch does not exist any more.
            let end = interrupted(&cancel, &self.now).now_or_never().unwrap_or(End::GiveBack);
            return self.leave(&block, end).await;
        };
        let most = facts.batch.max_attempts.unwrap_or(self.retry.max_attempts.get() as i32);
        let post = self.watch.post(Watched::Block(WatchedBlock {
            block: block.reference,
            parts: block.parts.clone(),
            command: block.command.clone(),
            attempt: block.attempt,
            max_attempts: most,
        }));
        let rows_took = self.metrics.walk.handler(&block.command, Call::Row);
        let span = Span::begin("block", facts.batch.traceparent.as_deref())
            .name("command", &block.command)
            .number("batch", block.reference.batch)
            .number("first_line", i64::from(block.lines.first().unwrap_or_default()))
            .number("attempt", i64::from(block.attempt));
        let traceparent = span.or_parent(facts.batch.traceparent.as_deref());
        let mut work = Work::new(Given {
            bench: self,
            block: &block,
            entry: &entry,
            facts: &facts,
            traceparent: traceparent.as_deref(),
            cancel: &cancel,
            post: &post,
            rows_took: &rows_took,
        });
        let end = work.run().await;
        work.finish(end).await;
    }

    pub(super) async fn hand_over(&self, update: Update) {
        let weight = OutcomeWriter::weight(&update);
        if let Err(ended) = self.outcomes.send(update, weight).await {
            // Only when the batcher was abandoned at the end of the grace: recovery finds the block.
            tracing::error!(update = ?ended.0, "an outcome could not be handed over");
        }
    }

    /// Repeats a read until it succeeds. `None`: asked to give up first.
    pub(super) async fn patiently<T, E, F>(
        &self,
        cancel: &Cancel,
        what: &'static str,
        read: impl Fn() -> F,
    ) -> Option<T>
    where
        E: std::error::Error + 'static,
        F: Future<Output = Result<T, E>>,
    {
        let mut tries = 0;
        loop {
            match read().await {
                Ok(found) => return Some(found),
                Err(error) => {
                    tries += 1;
                    if tries == 1 {
                        tracing::warn!(what, error = describe(&error), "could not be read; trying again");
                    }
                    let wait = backoff::of_database(tries);
                    tokio::select! {
                        () = tokio::time::sleep(wait) => {}
                        _ = interrupted(cancel, &self.now) => return None,
                    }
                }
            }
        }
    }
}

pub(super) async fn interrupted(cancel: &Cancel, now: &CancellationToken) -> End {
    tokio::select! {
        biased;
        () = cancel.fenced.cancelled() => End::Fenced,
        () = cancel.aborted.cancelled() => End::Aborted,
        () = now.cancelled() => End::GiveBack,
    }
}
