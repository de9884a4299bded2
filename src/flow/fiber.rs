//! A fiber: runs the rows of one block, one after the other, and hands over their outcomes.

mod budget;
mod slice;

use super::{
    batcher::{Sender, Writer},
    complete::Checks,
    held::{Cancel, Held},
    pace::Pace,
    solo::{Company, Room, Solitude},
    watch::{Guard, Watch},
    writer::{BlockUpdate, OutcomeWriter, Update},
};
use crate::{
    backoff, handler,
    handler::{Entry, Intake, Outcome, Registry, RowCall},
    json::Json,
    liveness::lease::Lease,
    metrics::{Call, Metrics},
    objects::file_name_problem,
    periodic::describe,
    spans::Span,
    store::{
        LONGEST_BACKOFF, Store,
        blocks::{self, BatchFacts, Block, InputRow},
        flush::{Close, RowWrite, Verdict},
    },
};
use budget::Brake;
use futures::FutureExt;
use prometheus_client::metrics::histogram::Histogram;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Input that a fiber has in memory at a time, give or take a row.
const PAGE_BYTES: usize = 4 << 20;
/// Outcomes handed over together; slow rows are handed over as they come.
const CHUNK: usize = 100;
const CHUNK_BYTES: usize = 1 << 20;
const CHUNK_AGE: Duration = Duration::from_millis(100);

/// Everything a fiber needs; shared by all of them.
#[derive(Clone, Debug)]
pub struct Bench {
    pub store: Store,
    pub handlers: Registry,
    pub outcomes: Sender<Update>,
    pub checks: Checks,
    pub held: Held,
    pub pace: Pace,
    pub retry: backoff::Config,
    /// A task that takes so many connections down with it is failed.
    pub max_crashes: i32,
    pub metrics: Metrics,
    /// Give back what is running, now.
    pub now: CancellationToken,
    pub facts: FactsCache,
    /// Without it no handler is started: the block may be somebody else's by now.
    pub lease: Lease,
    pub room: Room,
    pub watch: Watch,
}

/// What blocks of the same batch share, asked once.
#[derive(Clone, Debug, Default)]
pub struct FactsCache(Arc<Mutex<HashMap<i64, Arc<Facts>>>>);

/// What is known of a batch.
#[derive(Debug)]
struct Facts {
    batch: BatchFacts,
    brake: Option<Brake>,
}

/// Batches a cache remembers; more at a time in one worker means asking again now and then.
const REMEMBERED: usize = 1_000;

/// How the work on a block came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Every row was run.
    Whole,
    /// The rest goes back, nothing charged.
    GiveBack,
    /// The batch is being aborted: the rest is dropped.
    Aborted,
    /// Somebody else has the block.
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
            solitude = self.alone_with(block.reference.token) => solitude,
        };
        let marked = self.patiently(&cancel, "block", || async {
            blocks::mark_alone_if_held(&self.store.general.get().await?, block.reference).await
        });
        match marked.await {
            Some(true) => {
                tracing::warn!(batch = block.reference.batch, line = block.first, token = %block.reference.token,
                    "a row that processes died with runs alone now");
                self.run_block(block).await;
            }
            Some(false) => self.leave(&block, End::Fenced).await,
            None => {
                let end = interrupted(&cancel, &self.now).await;
                self.leave(&block, end).await;
            }
        }
        drop(solitude);
    }

    /// Nobody else is at work, and what they did is written: only this block or task could suffer from its own deed.
    pub(super) async fn alone_with(&self, token: Uuid) -> Solitude {
        self.held.stand_by(token, true);
        let solitude = self.room.alone().await;
        self.held.stand_by(token, false);
        self.held.nothing_but(token).await;
        solitude
    }

    /// Gives up a block of which nothing was started.
    async fn leave(&self, block: &Block, end: End) {
        match end {
            End::Fenced => {
                self.metrics.fenced.inc();
                self.held.forget(block.reference.token);
            }
            End::Aborted => self.close(block, Close::default()).await,
            End::Whole | End::GiveBack => {
                let give_back = block.open_lines(block.first);
                self.metrics.rows_given_back.inc_by(give_back.len() as u64);
                self.close(block, Close { give_back, ..Close::default() }).await;
            }
        }
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
            // Told to give up; or the batch does not exist any more.
            let end = interrupted(&cancel, &self.now).now_or_never().unwrap_or(End::GiveBack);
            return self.leave(&block, end).await;
        };
        let post = self.watch.post(block.reference, &block.command);
        let rows_took = self.metrics.walk.handler(&block.command, Call::Row);
        let span = Span::begin("block", facts.batch.traceparent.as_deref())
            .name("command", &block.command)
            .number("batch", block.reference.batch)
            .number("first_line", i64::from(block.first))
            .number("attempt", i64::from(block.attempt));
        let traceparent = span.or_parent(facts.batch.traceparent.as_deref());
        let mut work = Work {
            bench: self,
            block: &block,
            entry: &entry,
            facts: &facts,
            traceparent: traceparent.as_deref(),
            cancel: &cancel,
            chunk: Vec::new(),
            chunk_bytes: 0,
            chunk_began: Instant::now(),
            close: Close::default(),
            next_line: block.first,
            post: &post,
            rows_took: &rows_took,
        };
        let end = work.run().await;
        work.finish(end).await;
    }

    async fn close(&self, block: &Block, close: Close) {
        let update =
            BlockUpdate { block: block.reference, rows: Vec::new(), close: Some(close), waited_for: true };
        self.hand_over(Update::Block(update)).await;
    }

    pub(super) async fn hand_over(&self, update: Update) {
        let weight = OutcomeWriter::weight(&update);
        if let Err(ended) = self.outcomes.send(update, weight).await {
            // Only when the batcher was abandoned at the end of the grace: recovery finds the block.
            tracing::error!(update = ?ended.0, "an outcome could not be handed over");
        }
    }

    /// Asks until there is an answer; `None` when the work is to be given up meanwhile.
    async fn facts_of(&self, block: &Block, cancel: &Cancel) -> Option<Arc<Facts>> {
        let batch = block.reference.batch;
        if let Some(facts) = self.facts.get(batch) {
            return Some(facts);
        }
        let found = self
            .patiently(cancel, "batch", || async {
                blocks::facts(&self.store.general.get().await?, batch).await
            })
            .await??;
        let brake = found.budget.map(Brake::of);
        Some(self.facts.keep(batch, Facts { batch: found, brake }))
    }

    /// Repeats a read until it succeeds. `None`: told to give up first.
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
                    let wait = backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries);
                    tokio::select! {
                        () = tokio::time::sleep(wait) => {}
                        _ = interrupted(cancel, &self.now) => return None,
                    }
                }
            }
        }
    }
}

impl Facts {
    fn saw_failed(&self, rows: i64) {
        self.brake.iter().for_each(|brake| brake.saw_failed(rows));
    }
}

impl FactsCache {
    fn get(&self, batch: i64) -> Option<Arc<Facts>> {
        self.lock().get(&batch).cloned()
    }

    /// Keeps it, unless another fiber was first: all of them share one brake.
    fn keep(&self, batch: i64, facts: Facts) -> Arc<Facts> {
        let mut cache = self.lock();
        if cache.len() >= REMEMBERED {
            cache.clear();
        }
        Arc::clone(cache.entry(batch).or_insert_with(|| Arc::new(facts)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Arc<Facts>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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

/// A block being worked on.
struct Work<'a> {
    bench: &'a Bench,
    block: &'a Block,
    entry: &'a Entry,
    facts: &'a Facts,
    traceparent: Option<&'a str>,
    cancel: &'a Cancel,
    chunk: Vec<RowWrite>,
    chunk_bytes: usize,
    chunk_began: Instant,
    close: Close,
    /// The first line that has not been run.
    next_line: i32,
    post: &'a Guard,
    /// The times of single rows.
    rows_took: &'a Histogram,
}

impl Work<'_> {
    async fn run(&mut self) -> End {
        let mut limit = self.bench.pace.page_rows(self.block.reference.batch, PAGE_BYTES);
        loop {
            let Some(page) = self.read_page(limit).await else {
                return interrupted(self.cancel, &self.bench.now).await;
            };
            let bytes: usize = page.iter().map(|row| row.input.len()).sum();
            self.bench.pace.saw_rows(self.block.reference.batch, page.len(), bytes);
            let was_last = page.len() < limit && bytes < PAGE_BYTES;
            let began = Instant::now();
            let count = page.len();
            if let Some(end) = self.run_page(page).await {
                return end;
            }
            self.bench.pace.saw_work(&self.block.command, count, began.elapsed());
            if was_last || self.next_line > self.block.last {
                return End::Whole;
            }
            limit = self.bench.pace.page_rows(self.block.reference.batch, PAGE_BYTES);
        }
    }

    async fn read_page(&self, limit: usize) -> Option<Vec<InputRow>> {
        let (store, block, from) = (&self.bench.store, self.block, self.next_line);
        self.bench
            .patiently(self.cancel, "rows", || async {
                blocks::read_rows(&store.general.get().await?, block, from, limit, PAGE_BYTES).await
            })
            .await
    }

    /// Runs the rows of a page; `Some` when the block is to be given up.
    async fn run_page(&mut self, page: Vec<InputRow>) -> Option<End> {
        let together = match self.entry.handler.intake() {
            Intake::OneByOne => {
                for row in page {
                    if let Some(end) = self.brake().await {
                        return Some(end);
                    }
                    if let Some(end) = self.run_row(row).await {
                        return Some(end);
                    }
                }
                return None;
            }
            Intake::Ahead(rows) | Intake::Together(rows) => rows.get(),
        };
        for slice in page.chunks(together) {
            if let Some(end) = self.brake().await {
                return Some(end);
            }
            if let Some(end) = self.run_slice(slice).await {
                return Some(end);
            }
        }
        None
    }

    /// Runs one row; `Some` when the block is to be given up.
    async fn run_row(&mut self, row: InputRow) -> Option<End> {
        let timeout = self.timeout();
        let call = RowCall {
            batch: self.block.reference.batch,
            line: row.line,
            input: &row.input,
            context: &self.facts.batch.context,
            attempt: self.block.attempt,
        };
        let (bench, cancel, handler) = (self.bench, self.cancel, &*self.entry.handler);
        let (post, took) = (self.post, self.rows_took);
        let handling = async {
            let run = async {
                bench.lease.valid().await;
                post.begin(row.line, timeout);
                let began = Instant::now();
                let outcome = handler::run_row(handler, call, timeout).await;
                took.observe(began.elapsed().as_secs_f64());
                outcome
            };
            tokio::select! {
                biased;
                end = interrupted(cancel, &bench.now) => Err(end),
                outcome = run => Ok(outcome),
            }
        };
        let outcome = match self.handing_over_meanwhile(handling).await {
            Ok(outcome) => outcome,
            Err(end) => return Some(end),
        };
        self.post.end();
        self.next_line = row.line + 1;
        self.take_down(row.line, outcome);
        let is_full = self.chunk.len() >= CHUNK || self.chunk_bytes >= CHUNK_BYTES;
        if is_full || self.chunk_began.elapsed() >= CHUNK_AGE {
            self.hand_over_chunk(false).await;
        }
        None
    }

    /// Earlier outcomes do not wait for a slow row.
    async fn handing_over_meanwhile<T>(&mut self, handling: impl Future<Output = T>) -> T {
        let mut handling = std::pin::pin!(handling);
        let old = tokio::time::Instant::from_std(self.chunk_began + CHUNK_AGE);
        tokio::select! {
            biased;
            handled = &mut handling => return handled,
            () = tokio::time::sleep_until(old), if !self.chunk.is_empty() => {}
        }
        tokio::join!(handling, self.hand_over_chunk(false)).0
    }

    fn take_down(&mut self, line: i32, outcome: Outcome) {
        if self.chunk.is_empty() {
            self.chunk_began = Instant::now();
        }
        let attempt = self.block.attempt;
        let (verdict, outputs, append) = match outcome {
            Outcome::Succeeded(done) => match outputs_json(&done.outputs) {
                Ok(outputs) => (Verdict::Succeeded(done.result), outputs, done.append),
                Err(problem) => (Verdict::Failed(storable(problem)), None, Vec::new()),
            },
            Outcome::Failed(error) => (Verdict::Failed(storable(error)), None, Vec::new()),
            Outcome::Retry { error, after } if attempt < self.max_attempts() => {
                let wait = after.unwrap_or_else(|| self.bench.retry.delay(attempt as u32));
                self.bench.metrics.row_retries.inc();
                self.close.retry.push(line);
                self.close.error = Some(storable(error));
                self.close.retry_after = self.close.retry_after.max(wait);
                return;
            }
            Outcome::Retry { error, .. } => (Verdict::Failed(storable(error)), None, Vec::new()),
        };
        if matches!(verdict, Verdict::Failed(_)) {
            self.facts.saw_failed(1);
        }
        let write = RowWrite { line, attempt, verdict, outputs, append };
        self.chunk_bytes += write.bytes();
        self.chunk.push(write);
    }

    fn timeout(&self) -> Duration {
        self.facts.batch.row_timeout.unwrap_or(self.entry.config.timeout)
    }

    fn max_attempts(&self) -> i32 {
        self.facts.batch.max_attempts.unwrap_or(self.bench.retry.max_attempts.get() as i32)
    }

    async fn hand_over_chunk(&mut self, waited_for: bool) {
        if self.chunk.is_empty() {
            return;
        }
        let rows = std::mem::take(&mut self.chunk);
        self.chunk_bytes = 0;
        let update = BlockUpdate { block: self.block.reference, rows, close: None, waited_for };
        self.bench.hand_over(Update::Block(update)).await;
    }

    async fn finish(mut self, end: End) {
        match end {
            End::Whole => {}
            End::GiveBack => {
                self.close.give_back = self.block.open_lines(self.next_line);
                self.bench.metrics.rows_given_back.inc_by(self.close.give_back.len() as u64);
                // Those that were told of out of turn have had their say; a line with a result is no open line anyway.
                self.close.give_back.retain(|line| !self.close.retry.contains(line));
            }
            // Rows without a result are aborted by derivation; another try of any would only be in the way.
            End::Aborted => {
                self.close.retry.clear();
                self.close.error = None;
            }
            End::Fenced => {
                // What was done and not handed over, and the row that was cut off.
                self.bench.metrics.fenced.inc_by(self.chunk.len() as u64 + 1);
                return self.bench.held.forget(self.block.reference.token);
            }
        }
        let rows = std::mem::take(&mut self.chunk);
        let close = Some(std::mem::take(&mut self.close));
        let update = BlockUpdate { block: self.block.reference, rows, close, waited_for: true };
        self.bench.hand_over(Update::Block(update)).await;
    }
}

/// Output text by file name. Text for the same file is joined in the order it was given. A name that cannot be a
/// file's is the row's own error.
fn outputs_json(outputs: &[(String, String)]) -> Result<Option<Json>, String> {
    if outputs.is_empty() {
        return Ok(None);
    }
    let mut by_name: std::collections::BTreeMap<&str, String> = std::collections::BTreeMap::new();
    for (name, text) in outputs {
        if let Some(problem) = file_name_problem(name) {
            return Err(format!("{name:?} cannot name an output file: {problem}"));
        }
        by_name.entry(name).or_default().push_str(text);
    }
    Json::of(&by_name).map(Some).map_err(|error| format!("the outputs cannot be written: {error}"))
}

/// PostgreSQL's text has no NUL; the rest of a message is still worth keeping. Very long ones are cut.
pub(super) fn storable(mut error: String) -> String {
    const LONGEST: usize = 8 << 10;
    if error.contains('\0') {
        error = error.replace('\0', "\u{fffd}");
    }
    if error.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| error.is_char_boundary(*at)).unwrap_or(0);
        error.truncate(end);
        error.push('…');
    }
    error
}
