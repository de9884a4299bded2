//! The brake of a batch that was given a budget of failures.
//!
//! Whether the budget is spent is decided by the database, from what was written, under the batch's lock. That is a flush
//! away, in which a fast handler fails hundreds of rows more; so a fiber that knows of too many failures writes what it
//! has and asks before it goes on.

use super::{End, interrupted, work::Work};
use crate::store::facts::{self as facts_of_batch, Budget};
use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Failures that another fiber has reported and not written yet: waited for this long, then the block goes back.
const PATIENCE: Duration = Duration::from_secs(2);
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);
/// When lines are due again that were given back because the batch could not be asked.
const REST: Duration = Duration::from_secs(1);

/// The failures of a batch that this worker knows of.
#[derive(Debug)]
pub struct Brake {
    /// As of the last look at the database. The first is taken when a row has failed.
    may_fail: AtomicI64,
    written: AtomicI64,
    /// Reported here, and not written yet.
    pending: AtomicI64,
}

impl Default for Brake {
    fn default() -> Self {
        Self { may_fail: AtomicI64::new(-1), written: AtomicI64::new(0), pending: AtomicI64::new(0) }
    }
}

impl Brake {
    pub(super) fn saw_failed(&self, rows: i64) {
        self.pending.fetch_add(rows, Relaxed);
    }

    /// Failures that were on their way have arrived: so many of them, or of rows that could not be stored, are written.
    pub fn settled(&self, pending: i64, written: i64) {
        self.pending.fetch_sub(pending, Relaxed);
        self.saw_written(written);
    }

    pub(super) fn saw_written(&self, rows: i64) {
        self.written.fetch_add(rows, Relaxed);
    }

    fn looked(&self, may_fail: i64, has_failed: i64) {
        self.may_fail.store(may_fail, Relaxed);
        self.written.store(has_failed, Relaxed);
    }

    /// Whether more rows may have failed than are allowed, as far as is known.
    fn is_spent(&self) -> bool {
        let failed = self.written.load(Relaxed) + self.pending.load(Relaxed);
        failed > 0 && failed > self.may_fail.load(Relaxed)
    }
}

impl Work<'_> {
    /// Before a row: asks for the decision if the budget seems to be spent; `Some` when the block is to be given up.
    pub(super) async fn brake(&mut self) -> Option<End> {
        let (bench, cancel, facts) = (self.bench, self.cancel, self.facts);
        let brake = facts.brake.as_ref().filter(|brake| brake.is_spent())?;
        let began = Instant::now();
        loop {
            if let Some(written) = self.hand_over_noted().await {
                tokio::select! {
                    biased;
                    end = interrupted(cancel, &bench.now) => return Some(end),
                    // An error means that the writer is gone; then there is nothing to wait for.
                    _ = written => {}
                }
            }
            let batch = self.block.reference.batch;
            let look =
                || async { facts_of_batch::check_budget(&bench.store.general.get().await?, batch).await };
            match bench.patiently(cancel, "budget", look).await {
                Some(Budget::Within { may_fail, has_failed }) => brake.looked(may_fail, has_failed),
                Some(Budget::Stopped | Budget::Canary) => return Some(End::GiveBack),
                // The row is locked by another transaction: this block does not wait for it.
                Some(Budget::Busy) => {
                    self.close.rest_after = REST;
                    return Some(End::GiveBack);
                }
                None => return Some(interrupted(cancel, &bench.now).await),
            }
            if !brake.is_spent() {
                return None;
            }
            if began.elapsed() >= PATIENCE {
                self.close.rest_after = REST;
                return Some(End::GiveBack);
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brake_counts_what_is_written_and_what_is_on_its_way_once() {
        let brake = Brake::default();
        assert!(!brake.is_spent(), "nothing has failed");
        brake.saw_failed(1);
        assert!(brake.is_spent(), "the allowance is not known yet");
        brake.looked(1, 0);
        assert!(!brake.is_spent());
        brake.settled(1, 1);
        brake.saw_failed(1);
        assert!(brake.is_spent());
        // More rows were appended, and a percentage allows more.
        brake.looked(5, 1);
        assert!(!brake.is_spent());
        brake.settled(1, 0);
        brake.looked(0, 0);
        assert!(!brake.is_spent(), "refused failures count for nothing");
    }
}
