//! Rows given to a handler together: what it reports is taken in as it comes.

use super::{End, interrupted, work::Work};
use crate::{
    handler::{self, Report, storable::text as storable},
    metrics::Call,
    store::pages::InputRow,
};
use std::time::Instant;

impl Work<'_> {
    /// Runs a slice of the page; `Some` when the block is to be given up. What was reported before an interruption counts.
    pub(super) async fn run_slice(&mut self, rows: &[InputRow<'_>]) -> Option<End> {
        let (handler, cancel, now) = (&*self.entry.handler, self.cancel, &self.bench.now);
        if !self.bench.lease.is_valid() || cancel.is_cancelled() || now.is_cancelled() {
            tokio::select! {
                biased;
                end = interrupted(cancel, now) => return Some(end),
                () = self.bench.lease.valid() => {}
            }
        }
        let began = Instant::now();
        let mut reported = began;
        let mut work = handler::run_block(handler, self.call(), rows);
        let end = loop {
            let reports = tokio::select! {
                biased;
                end = interrupted(cancel, now) => break Some(end),
                reports = work.next() => reports,
            };
            let Some(reports) = reports else { break None };
            if let Some(end) = self.take_reports(reports, rows.len()) {
                break Some(end);
            }
            self.worked_since(std::mem::replace(&mut reported, Instant::now()));
            self.hand_over_if_due().await;
        };
        if end.is_none() {
            let took = self.bench.metrics.walk.handler(&self.block.command, Call::Block);
            took.observe(began.elapsed().as_secs_f64());
            let unreported = work.unreported();
            for row in rows.iter().filter(|row| self.todo.contains(row.line)).collect::<Vec<_>>() {
                self.take(row.line, unreported.clone());
            }
        }
        end
    }

    /// `Some` when the block is to be given up.
    fn take_reports(&mut self, reports: Vec<Report>, rows: usize) -> Option<End> {
        for report in reports {
            match report {
                Report::Row(line, outcome) => _ = self.take(line, outcome),
                Report::Succeeded(lines) => self.take_succeeded(&lines),
                Report::Committed { lines, succeeded, failed } => {
                    self.todo = self.todo.minus(&lines);
                    self.was_committed(succeeded, failed);
                }
                Report::NotHeld => {
                    self.was_refused(rows);
                    return Some(End::Fenced);
                }
                Report::Unavailable { error, after } => {
                    self.close.rest_after = self.close.rest_after.max(after);
                    self.close.rest_error = Some(storable(error));
                    return Some(End::GiveBack);
                }
            }
        }
        None
    }

    fn was_refused(&self, rows: usize) {
        self.bench.metrics.fenced.inc_by(rows as u64);
        let block = self.block.reference;
        tracing::warn!(token = %block.token, batch = block.batch, rows,
            "another worker has this block now; the handler's effects were rolled back");
    }

    /// The handler's own transaction wrote these rows; what follows from that commit follows now.
    fn was_committed(&self, succeeded: u64, failed: u64) {
        self.bench.metrics.count_rows(succeeded, failed);
        if failed > 0 {
            if let Some(brake) = &self.facts.brake {
                brake.saw_written(failed as i64);
            }
            self.bench.checks.ask(self.block.reference.batch);
        }
    }
}
