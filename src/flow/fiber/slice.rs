//! Rows given to a handler together: what it tells of them is taken down as it comes.

use super::{
    End, interrupted,
    work::{CHUNK, CHUNK_AGE, Work},
};
use crate::{
    handler::{self, BlockCall, Outcome, Told},
    metrics::Call,
    store::blocks::InputRow,
};
use std::{collections::HashSet, time::Instant};

impl Work<'_> {
    /// Runs a slice of the page; `Some` when the block is to be given up. What was told before an interruption counts.
    pub(super) async fn run_slice(&mut self, rows: &[InputRow]) -> Option<End> {
        let call = BlockCall {
            command: &self.block.command,
            context: &self.facts.batch.context,
            block: self.block.reference,
            attempt: self.block.attempt,
            timeout: self.timeout(),
            traceparent: self.traceparent,
        };
        let (handler, cancel, now) = (&*self.entry.handler, self.cancel, &self.bench.now);
        tokio::select! {
            biased;
            end = interrupted(cancel, now) => return Some(end),
            () = self.bench.lease.valid() => {}
        }
        let began = Instant::now();
        let mut work = handler::run_block(handler, call, rows);
        let mut open: HashSet<i32> = rows.iter().map(|row| row.line).collect();
        let end = loop {
            let told = tokio::select! {
                biased;
                end = interrupted(cancel, now) => break Some(end),
                told = work.next() => told,
            };
            match told {
                None => break None,
                Some(Told::Row(line, outcome)) if open.remove(&line) => {
                    self.take_down(line, outcome);
                    if self.chunk.len() >= CHUNK || self.chunk_began.elapsed() >= CHUNK_AGE {
                        self.hand_over_chunk(false).await;
                    }
                }
                Some(Told::Row(line, _)) => {
                    tracing::warn!(command = self.block.command, line, "told of a line that was not open");
                }
                Some(Told::Committed { lines, succeeded, failed }) => {
                    open.retain(|line| !lines.contains(line));
                    self.was_committed(succeeded, failed);
                }
                Some(Told::NotHeld) => {
                    self.was_refused(rows.len());
                    break Some(End::Fenced);
                }
            }
        };
        if end.is_none() {
            let took = self.bench.metrics.walk.handler(&self.block.command, Call::Block);
            took.observe(began.elapsed().as_secs_f64());
        }
        match (end, work.reason()) {
            (Some(End::GiveBack), _) => self.skip_told(rows, &open),
            (None, reason) => {
                let error = reason.unwrap_or_else(|| "the handler said nothing about this row".to_owned());
                let mut silent: Vec<i32> = open.into_iter().collect();
                silent.sort_unstable();
                for line in silent {
                    self.take_down(line, Outcome::Retry { error: error.clone(), after: None });
                }
                self.next_line = rows.last().map_or(self.next_line, |row| row.line + 1);
            }
            _ => {}
        }
        end
    }

    /// The lines from the first one that nobody was told of are given back; in-order handlers leave no others.
    fn skip_told(&mut self, rows: &[InputRow], open: &HashSet<i32>) {
        match rows.iter().find(|row| open.contains(&row.line)) {
            Some(first) => self.next_line = first.line,
            None => self.next_line = rows.last().map_or(self.next_line, |row| row.line + 1),
        }
    }

    fn was_refused(&self, rows: usize) {
        self.bench.metrics.fenced.inc_by(rows as u64);
        let block = self.block.reference;
        tracing::warn!(token = %block.token, batch = block.batch, rows,
            "this block is somebody else's now; its effects were rolled back");
    }

    /// The handler's own transaction wrote these rows; what follows from that commit follows now.
    fn was_committed(&self, succeeded: u64, failed: u64) {
        self.bench.metrics.count_rows(succeeded, failed);
        self.facts.saw_failed(failed as i64);
        if failed > 0 {
            self.bench.checks.ask(self.block.reference.batch);
        }
    }
}
