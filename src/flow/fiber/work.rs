//! A block being worked on, row by row, page by page.

use super::{Bench, End, facts::Facts, interrupted, storable};
use crate::{
    flow::{
        held::Cancel,
        watch::Guard,
        writer::{BlockUpdate, Update},
    },
    handler::{self, Entry, Intake, Outcome, RowCall},
    json::Json,
    objects::file_name_problem,
    store::{
        blocks::{self, Block, InputRow},
        flush::{Close, RowWrite, Verdict},
    },
};
use prometheus_client::metrics::histogram::Histogram;
use std::time::{Duration, Instant};

/// Input that a fiber has in memory at a time, give or take a row.
const PAGE_BYTES: usize = 4 << 20;
/// Outcomes handed over together; slow rows are handed over as they come.
pub(super) const CHUNK: usize = 100;
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
    pub(super) chunk: Vec<RowWrite>,
    pub(super) chunk_bytes: usize,
    pub(super) chunk_began: Instant,
    pub(super) close: Close,
    /// The first line that has not been run.
    pub(super) next_line: i32,
    pub(super) post: &'a Guard,
    /// The times of single rows.
    pub(super) rows_took: &'a Histogram,
}

impl Work<'_> {
    pub(super) async fn run(&mut self) -> End {
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

    pub(super) fn take_down(&mut self, line: i32, outcome: Outcome) {
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

    pub(super) fn timeout(&self) -> Duration {
        self.facts.batch.row_timeout.unwrap_or(self.entry.config.timeout)
    }

    fn max_attempts(&self) -> i32 {
        self.facts.batch.max_attempts.unwrap_or(self.bench.retry.max_attempts.get() as i32)
    }

    pub(super) async fn hand_over_chunk(&mut self, waited_for: bool) {
        if self.chunk.is_empty() {
            return;
        }
        let rows = std::mem::take(&mut self.chunk);
        self.chunk_bytes = 0;
        let update = BlockUpdate { block: self.block.reference, rows, close: None, waited_for };
        self.bench.hand_over(Update::Block(update)).await;
    }

    pub(super) async fn finish(mut self, end: End) {
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
