//! A block being worked on, page by page, and the outcomes that gather meanwhile.

use super::{Bench, End, facts::Facts, interrupted};
use crate::{
    flow::{
        watch::Guard,
        writer::{BlockUpdate, Update},
    },
    handler::{self, BlockCall, Entry, Intake, Outcome, storable::text as storable},
    held::Cancel,
    lines::Lines,
    store::{
        blocks::Block,
        fault,
        flush::{Close, Outcomes},
        pages::{self, InputRow, Page},
    },
};
use futures::FutureExt;
use prometheus_client::metrics::histogram::Histogram;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Input that a fiber has in memory at a time, give or take a chunk.
const PAGE_BYTES: usize = 2 << 20;
/// Outcomes are handed over at the end of a block, or when they have become this much: tuples to be written, bytes, or time
/// since the first of them.
const CHUNK: u32 = 100;
const CHUNK_BYTES: usize = 1 << 20;
pub(super) const CHUNK_AGE: Duration = Duration::from_millis(100);

/// A block being worked on.
pub(super) struct Work<'a> {
    pub(super) bench: &'a Bench,
    pub(super) block: &'a Block,
    pub(super) entry: &'a Entry,
    pub(super) facts: &'a Facts,
    pub(super) traceparent: Option<&'a str>,
    pub(super) cancel: &'a Cancel,
    /// Lines that have no outcome yet and are not to be tried again.
    pub(super) todo: Lines,
    outcomes: Outcomes,
    outcomes_began: Instant,
    pub(super) close: Close,
    pub(super) post: &'a Guard,
    /// The times of single rows.
    pub(super) rows_took: &'a Histogram,
}

/// What every piece of work on a block is given.
pub(super) struct Given<'a> {
    pub(super) bench: &'a Bench,
    pub(super) block: &'a Block,
    pub(super) entry: &'a Entry,
    pub(super) facts: &'a Facts,
    pub(super) traceparent: Option<&'a str>,
    pub(super) cancel: &'a Cancel,
    pub(super) post: &'a Guard,
    pub(super) rows_took: &'a Histogram,
}

impl<'a> Work<'a> {
    pub(super) fn new(given: Given<'a>) -> Self {
        let Given { bench, block, entry, facts, traceparent, cancel, post, rows_took } = given;
        Self {
            bench,
            block,
            entry,
            facts,
            traceparent,
            cancel,
            todo: block.lines.clone(),
            outcomes: Outcomes::default(),
            outcomes_began: Instant::now(),
            close: Close::default(),
            post,
            rows_took,
        }
    }

    pub(super) async fn run(&mut self) -> End {
        while !self.todo.is_empty() {
            let Some(page) = self.read_page().await else {
                return interrupted(self.cancel, &self.bench.now).await;
            };
            let rows = page.rows();
            let (began, count) = (Instant::now(), rows.len());
            if let Some(end) = self.run_page(&rows).await {
                return end;
            }
            self.bench.pace.saw_work(&self.block.command, count, began.elapsed());
            // Lines without a row: the inputs were deleted, or never written. An attempt is charged, or they would be
            // looked for again for ever.
            let absent = page.lines().minus(&rows.iter().map(|row| row.line).collect());
            self.give_up(&absent, "its input is not there");
        }
        End::Whole
    }

    /// The next rows; an empty page when they cannot be read. `None`: the block is to be given up.
    async fn read_page(&mut self) -> Option<Page> {
        let page = match self.try_read(PAGE_BYTES).await? {
            // Something in it cannot be read: is it in the first chunk?
            Err(_) => self.try_read(1).await?,
            page => page,
        };
        match page {
            Ok(page) => Some(page),
            Err(error) => {
                let first = self.todo.first()?;
                let block = self.block;
                let chunk = self
                    .bench
                    .patiently(self.cancel, "chunk", || async {
                        pages::last_line(&self.bench.store.general.get().await?, block, first).await
                    })
                    .await?;
                let unreadable = self.todo.within(&(first..chunk.unwrap_or(first) + 1));
                tracing::error!(batch = block.reference.batch, lines = %unreadable, error, "inputs cannot be read");
                self.give_up(&unreadable, &format!("its input cannot be read: {error}"));
                Some(Page::default())
            }
        }
    }

    /// Reads until the database answers; an error that lies in the stored data is returned at once.
    async fn try_read(&self, bytes: usize) -> Option<Result<Page, String>> {
        let (bench, block, todo) = (self.bench, self.block, &self.todo);
        let read = || async {
            let client = bench.store.general.get().await?;
            match pages::read(&client, &bench.chunks, block, todo, bytes).await {
                Err(error) => match error.database().filter(|error| fault::is_of_data(error)) {
                    Some(error) => Ok(Err(fault::words(error))),
                    None => Err(error),
                },
                Ok(page) => Ok(Ok(page)),
            }
        };
        bench.patiently(self.cancel, "rows", read).await
    }

    /// Runs the rows of a page; `Some` when the block is to be given up.
    async fn run_page(&mut self, rows: &[InputRow<'_>]) -> Option<End> {
        let together = match self.entry.handler.intake() {
            Intake::OneByOne => {
                for row in rows {
                    if let Some(end) = self.brake().await {
                        return Some(end);
                    }
                    if let Some(end) = self.run_row(*row).await {
                        return Some(end);
                    }
                }
                return None;
            }
            Intake::Ahead(rows) | Intake::Together(rows) => rows.get(),
        };
        for slice in rows.chunks(together) {
            if let Some(end) = self.brake().await {
                return Some(end);
            }
            if let Some(end) = self.run_slice(slice).await {
                return Some(end);
            }
        }
        None
    }

    pub(super) fn call(&self) -> BlockCall<'a> {
        BlockCall {
            command: &self.block.command,
            context: &self.facts.batch.context,
            block: self.block.reference,
            uid: self.block.uid,
            parts: &self.block.parts,
            attempt: self.block.attempt,
            timeout: self.timeout(),
            traceparent: self.traceparent,
        }
    }

    /// Runs one row; `Some` when the block is to be given up.
    async fn run_row(&mut self, row: InputRow<'_>) -> Option<End> {
        let timeout = self.timeout();
        let call = self.call().row(row);
        let (bench, cancel, handler) = (self.bench, self.cancel, &*self.entry.handler);
        let (post, took) = (self.post, self.rows_took);
        let run = async {
            if !bench.lease.is_valid() {
                bench.lease.valid().await;
            }
            post.begin_row(row.line, timeout);
            let began = Instant::now();
            let outcome = handler::run_row(handler, call, timeout).await;
            // Its time is over when it has returned, however long the outcome waits to be handed over.
            post.end();
            let ran = began.elapsed();
            took.observe(ran.as_secs_f64());
            (outcome, began, ran)
        };
        let mut run = std::pin::pin!(run);
        // Most rows that take no time need neither a timer nor an ear for interruptions: asked once, between rows.
        let is_interrupted = cancel.is_cancelled() || bench.now.is_cancelled();
        let quick = if is_interrupted { None } else { (&mut run).now_or_never() };
        let outcome = match quick {
            Some(outcome) => Ok(outcome),
            None => {
                let handling = async {
                    tokio::select! {
                        biased;
                        end = interrupted(cancel, &bench.now) => Err(end),
                        outcome = run => Ok(outcome),
                    }
                };
                self.handing_over_meanwhile(handling).await
            }
        };
        let (outcome, began, ran) = match outcome {
            Ok(outcome) => outcome,
            Err(end) => return Some(end),
        };
        if self.take(row.line, outcome) {
            self.outcomes.ran(began, ran);
        }
        self.hand_over_if_due().await;
        None
    }

    /// Earlier outcomes do not wait for a slow row.
    async fn handing_over_meanwhile<T>(&mut self, handling: impl Future<Output = T>) -> T {
        let mut handling = std::pin::pin!(handling);
        let old = tokio::time::Instant::from_std(self.outcomes_began + CHUNK_AGE);
        tokio::select! {
            biased;
            handled = &mut handling => return handled,
            () = tokio::time::sleep_until(old), if !self.outcomes.is_empty() => {}
        }
        tokio::join!(handling, self.hand_over(false)).0
    }

    /// These lines cannot be run: a failed attempt of each.
    fn give_up(&mut self, lines: &Lines, error: &str) {
        for line in lines.iter() {
            self.take(line, Outcome::Retry { error: error.into(), after: None });
        }
    }

    /// Takes an outcome in; whether the row has ended with it. A line that has one, or is not of this block, gets no second.
    pub(super) fn take(&mut self, line: i32, outcome: Outcome) -> bool {
        if !self.todo.remove(line) {
            tracing::warn!(
                command = self.block.command,
                batch = self.block.reference.batch,
                line,
                "the handler reported a line that is not open"
            );
            return false;
        }
        self.begin_outcomes();
        let error = match outcome {
            Outcome::Succeeded(done) => match done.stored() {
                Ok(stored) => {
                    self.outcomes.succeed(line, stored.result, stored.outputs);
                    stored.append.into_iter().for_each(|input| self.outcomes.append(line, input));
                    return true;
                }
                Err(problem) => problem.into(),
            },
            Outcome::Retry { error, after } if self.block.attempt < self.max_attempts() => {
                let wait = after.unwrap_or_else(|| self.bench.retry.delay(self.block.attempt as u32));
                self.bench.metrics.row_retries.inc();
                self.close.retry.insert(line);
                self.close.error = Some(storable(error.error));
                self.close.retry_after = self.close.retry_after.max(wait);
                return false;
            }
            Outcome::Failed(error) | Outcome::Retry { error, .. } => error,
        };
        self.facts.saw_failed(1);
        self.outcomes.add_failure(error.stored(line));
        true
    }

    /// The handler was at work on rows whose outcomes were taken in since.
    pub(super) fn worked_since(&mut self, began: Instant) {
        if !self.outcomes.is_empty() {
            self.outcomes.ran(began, began.elapsed());
        }
    }

    /// All these lines succeeded, with nothing to store.
    pub(super) fn take_succeeded(&mut self, lines: &Lines) {
        let open = lines.minus(&lines.minus(&self.todo));
        self.todo = self.todo.minus(&open);
        self.begin_outcomes();
        self.outcomes.succeed_all(&open);
    }

    fn begin_outcomes(&mut self) {
        if self.outcomes.is_empty() {
            self.outcomes_began = Instant::now();
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.entry.config.timeout_for(self.facts.batch.row_timeout)
    }

    fn max_attempts(&self) -> i32 {
        self.bench.retry.attempts_for(self.facts.batch.max_attempts)
    }

    pub(super) async fn hand_over_if_due(&mut self) {
        let is_full = self.outcomes.weight() > CHUNK || self.outcomes.bytes() >= CHUNK_BYTES;
        if is_full || (!self.outcomes.is_empty() && self.outcomes_began.elapsed() >= CHUNK_AGE) {
            self.hand_over(false).await;
        }
    }

    async fn hand_over(&mut self, waited_for: bool) {
        if !self.outcomes.is_empty() {
            let update = self.update(None, waited_for);
            self.bench.hand_over(Update::Block(Box::new(update))).await;
        }
    }

    /// Hands over what there is; the receiver hears when it was written, or refused. `None`: there was nothing.
    pub(super) async fn hand_over_noted(&mut self) -> Option<oneshot::Receiver<()>> {
        if self.outcomes.is_empty() {
            return None;
        }
        let (sender, written) = oneshot::channel();
        let update = BlockUpdate { written: vec![sender], ..self.update(None, true) };
        self.bench.hand_over(Update::Block(Box::new(update))).await;
        Some(written)
    }

    fn update(&mut self, close: Option<Close>, waited_for: bool) -> BlockUpdate {
        BlockUpdate {
            block: self.block.reference,
            parts: self.block.parts.clone(),
            outcomes: std::mem::take(&mut self.outcomes),
            close,
            waited_for,
            brake: self.facts.brake.clone(),
            written: Vec::new(),
        }
    }

    pub(super) async fn finish(mut self, end: End) {
        if end == End::Fenced {
            // What was done and not handed over, and the row that was cut off.
            self.bench.metrics.fenced.inc_by(self.outcomes.len() as u64 + 1);
            return self.bench.held.forget(self.block.reference.token);
        }
        if end == End::GiveBack {
            self.bench.metrics.rows_given_back.inc_by(self.todo.len() as u64);
        }
        // Lines without an outcome come back by themselves; the database drops them if it knows that the batch is aborting.
        let close = std::mem::take(&mut self.close);
        let update = self.update(Some(close), true);
        self.bench.hand_over(Update::Block(Box::new(update))).await;
    }
}
