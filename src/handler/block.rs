//! Rows given to a handler together, and its way to report what became of them.

use super::{Handler, Outcome, RowCall, run_row};
use crate::{
    json::Json,
    lines::Lines,
    store::{
        blocks::{BlockRef, Parts},
        pages::InputRow,
    },
};
use futures::{FutureExt, future::BoxFuture};
use std::{
    num::NonZeroUsize,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;
use uuid::Uuid;

/// How a handler takes the rows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    /// One after the other.
    OneByOne,
    /// Up to so many are handed over ahead; each costs what it costs, and they are answered one by one.
    Ahead(NonZeroUsize),
    /// Up to so many in one call, answered together; a call costs much the same whatever is in it.
    Together(NonZeroUsize),
}

/// What the rows of a call have in common.
#[derive(Clone, Copy, Debug)]
pub struct BlockCall<'a> {
    pub command: &'a str,
    /// The batch's context.
    pub context: &'a Json,
    /// The block they are of, by its token.
    pub block: BlockRef,
    /// Of the batch alone, for ever.
    pub uid: Uuid,
    /// For a handler that writes outcomes in its own transaction.
    pub parts: &'a Parts,
    /// From 1; rows that failed before have a higher one.
    pub attempt: i32,
    /// The time that the call has ([`Intake::Together`]), or each row ([`Intake::Ahead`]).
    pub timeout: Duration,
    /// The trace that this call is a part of.
    pub traceparent: Option<&'a str>,
}

impl<'a> BlockCall<'a> {
    /// The call for one of the rows.
    pub fn row(&self, row: InputRow<'a>) -> RowCall<'a> {
        RowCall {
            batch: self.block.batch,
            uid: self.uid,
            line: row.line,
            input: row.input,
            context: self.context,
            attempt: self.attempt,
        }
    }
}

/// What a handler reports while it works.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    Row(i32, Outcome),
    /// All these lines succeeded, and have nothing to store.
    Succeeded(Lines),
    /// Effects and outcomes of these lines are committed already, together.
    Committed {
        lines: Lines,
        succeeded: u64,
        failed: u64,
    },
    /// Another worker had the block by then: nothing was committed.
    NotHeld,
    /// The handler itself cannot work now. The rows that it has not reported go back with no attempt charged, due after the
    /// given wait.
    Unavailable {
        error: String,
        after: Duration,
    },
}

/// Where a handler reports. Reports gather until they are read: no message for each row.
#[derive(Clone, Debug, Default)]
pub struct OutcomeSink(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    reports: Mutex<Vec<Report>>,
    news: Notify,
}

impl OutcomeSink {
    pub fn row(&self, line: i32, outcome: Outcome) {
        self.report(Report::Row(line, outcome));
    }

    /// The same outcome for many rows.
    pub fn rows<'a>(&self, rows: impl IntoIterator<Item = &'a InputRow<'a>>, outcome: &Outcome) {
        rows.into_iter().for_each(|row| self.row(row.line, outcome.clone()));
    }

    /// All rows succeeded, and have nothing to store.
    pub fn succeeded(&self, rows: &[InputRow<'_>]) {
        self.report(Report::Succeeded(rows.iter().map(|row| row.line).collect()));
    }

    pub fn report(&self, report: Report) {
        let mut reports = self.0.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.push(report);
        let is_first = reports.len() == 1;
        drop(reports);
        if is_first {
            self.0.news.notify_one();
        }
    }

    fn take(&self) -> Vec<Report> {
        std::mem::take(&mut *self.0.reports.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A call under way; dropping it cancels the handler.
pub struct Running<'a> {
    work: Option<BoxFuture<'a, Result<(), String>>>,
    sink: OutcomeSink,
    reason: Option<String>,
}

impl std::fmt::Debug for Running<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("reason", &self.reason).finish_non_exhaustive()
    }
}

/// Starts a call; a panic of the handler ends it and is the reason for the rows it did not report.
pub fn run_block<'a>(handler: &'a dyn Handler, call: BlockCall<'a>, rows: &'a [InputRow<'a>]) -> Running<'a> {
    let sink = OutcomeSink::default();
    let reports = sink.clone();
    let work = AssertUnwindSafe(async move { handler.block(call, rows, reports).await }).catch_unwind().map(
        |ended| {
            ended.map_err(|panic| {
                format!("the handler panicked: {}", crate::error_text::panic_message(panic.as_ref()))
            })
        },
    );
    Running { work: Some(work.boxed()), sink, reason: None }
}

impl Running<'_> {
    /// What the handler has reported since the last call; `None` when it has ended and everything was read.
    pub async fn next(&mut self) -> Option<Vec<Report>> {
        loop {
            let reports = self.sink.take();
            if !reports.is_empty() {
                return Some(reports);
            }
            let work = self.work.as_mut()?;
            tokio::select! {
                biased;
                () = self.sink.0.news.notified() => {}
                ended = work => {
                    self.reason = ended.err();
                    self.work = None;
                }
            }
        }
    }

    /// What becomes of a row that the handler has ended without reporting.
    pub fn unreported(&self) -> Outcome {
        let reason = self.reason.as_deref().unwrap_or("the handler said nothing about this row");
        Outcome::Retry { error: reason.into(), after: None }
    }
}

/// For handlers that know single rows only.
pub(super) fn one_by_one<'a, H: Handler + ?Sized>(
    handler: &'a H,
    call: BlockCall<'a>,
    rows: &'a [InputRow<'a>],
    sink: OutcomeSink,
) -> BoxFuture<'a, ()> {
    async move {
        for row in rows {
            sink.row(row.line, run_row(handler, call.row(*row), call.timeout).await);
        }
    }
    .boxed()
}
