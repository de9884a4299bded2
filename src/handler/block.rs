//! Rows given to a handler together, and its way of telling what became of them.

use super::{Handler, Outcome, RowCall, run_row};
use crate::{
    json::Json,
    store::blocks::{BlockRef, InputRow},
};
use futures::{FutureExt, future::BoxFuture};
use std::{num::NonZeroUsize, panic::AssertUnwindSafe, time::Duration};
use tokio::sync::mpsc;

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
    /// From 1; rows that failed before have a higher one.
    pub attempt: i32,
    /// The time that the call has ([`Intake::Together`]), or each row ([`Intake::Ahead`]).
    pub timeout: Duration,
    /// The trace that this call is a part of.
    pub traceparent: Option<&'a str>,
}

/// What a handler tells while it works.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Row(i32, Outcome),
    /// Effects and outcomes of these lines are committed already, together.
    Committed {
        lines: Vec<i32>,
        succeeded: u64,
        failed: u64,
    },
    /// The block was somebody else's by then: nothing was committed.
    NotHeld,
}

/// Where a handler tells it.
#[derive(Clone, Debug)]
pub struct Tongue(mpsc::UnboundedSender<Told>);

impl Tongue {
    pub fn row(&self, line: i32, outcome: Outcome) {
        self.tell(Told::Row(line, outcome));
    }

    /// The same for many lines.
    pub fn rows<'a>(&self, rows: impl IntoIterator<Item = &'a InputRow>, outcome: &Outcome) {
        rows.into_iter().for_each(|row| self.row(row.line, outcome.clone()));
    }

    pub fn tell(&self, told: Told) {
        // Nobody listens any more when the block was given up; then nobody needs to know.
        let _ = self.0.send(told);
    }
}

/// A call under way; dropping it cancels the handler.
pub struct Running<'a> {
    work: Option<BoxFuture<'a, Result<(), String>>>,
    told: mpsc::UnboundedReceiver<Told>,
    reason: Option<String>,
}

impl std::fmt::Debug for Running<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("reason", &self.reason).finish_non_exhaustive()
    }
}

/// Starts a call; a panic of the handler ends it and is the reason for the rows it said nothing about.
pub fn run_block<'a>(handler: &'a dyn Handler, call: BlockCall<'a>, rows: &'a [InputRow]) -> Running<'a> {
    let (sender, told) = mpsc::unbounded_channel();
    let work = AssertUnwindSafe(async move { handler.block(call, rows, Tongue(sender)).await })
        .catch_unwind()
        .map(|ended| {
            ended.map_err(|panic| {
                format!("the handler panicked: {}", crate::supervisor::panic_message(panic.as_ref()))
            })
        });
    Running { work: Some(work.boxed()), told, reason: None }
}

impl Running<'_> {
    /// What the handler tells next; `None` when it has ended and told everything.
    pub async fn next(&mut self) -> Option<Told> {
        loop {
            let Some(work) = &mut self.work else { return self.told.recv().await };
            tokio::select! {
                biased;
                Some(told) = self.told.recv() => return Some(told),
                ended = work => {
                    self.reason = ended.err();
                    // With the work goes the last tongue, so that what is left can be heard to its end.
                    self.work = None;
                }
            }
        }
    }

    /// Why the handler ended before its time.
    pub fn reason(&self) -> Option<String> {
        self.reason.clone()
    }
}

/// For handlers that know single rows only.
pub(super) fn one_by_one<'a, H: Handler + ?Sized>(
    handler: &'a H,
    call: BlockCall<'a>,
    rows: &'a [InputRow],
    tongue: Tongue,
) -> BoxFuture<'a, ()> {
    async move {
        for row in rows {
            let one = RowCall {
                batch: call.block.batch,
                line: row.line,
                input: &row.input,
                context: call.context,
                attempt: call.attempt,
            };
            tongue.row(row.line, run_row(handler, one, call.timeout).await);
        }
    }
    .boxed()
}
