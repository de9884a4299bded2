//! The brake of a batch that was given a budget of failures.
//!
//! Whether the budget is spent is decided from what was written. That is a flush away, in which a fast handler fails
//! hundreds of rows more; so a fiber that knows of too many failures waits for the decision before it goes on.

use super::{End, interrupted, work::Work};
use crate::store::blocks::{self, Budget};
use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A decision takes a flush and a look; what another fiber has failed may be flushed a little later. One that takes
/// longer than this is not waited for: the batch may have been given more rows, or somebody has decided otherwise.
const PATIENCE: Duration = Duration::from_secs(10);
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// The failures of a batch that this worker knows of.
#[derive(Debug)]
pub(super) struct Brake {
    allowed: i64,
    failed: AtomicI64,
}

impl Brake {
    pub(super) fn of(budget: Budget) -> Self {
        Self { allowed: budget.allowed, failed: AtomicI64::new(budget.failed) }
    }

    pub(super) fn saw_failed(&self, rows: i64) {
        self.failed.fetch_add(rows, Relaxed);
    }

    fn is_spent(&self) -> bool {
        self.failed.load(Relaxed) > self.allowed
    }

    /// The next failure is one too many again: so it is with a batch that was released.
    fn reset(&self) {
        self.failed.store(self.allowed, Relaxed);
    }
}

impl Work<'_> {
    /// Before a row: waits for the decision if the budget seems to be spent; `Some` when the block is to be given up.
    pub(super) async fn brake(&mut self) -> Option<End> {
        let brake = self.facts.brake.as_ref().filter(|brake| brake.is_spent())?;
        self.hand_over_chunk(true).await;
        let (bench, batch, began) = (self.bench, self.block.reference.batch, Instant::now());
        let decided = async {
            while began.elapsed() < PATIENCE {
                let look = || async { blocks::is_open(&bench.store.general.get().await?, batch).await };
                match bench.patiently(self.cancel, "batch", look).await {
                    Some(true) => tokio::time::sleep(BETWEEN_LOOKS).await,
                    Some(false) => return Some(End::GiveBack),
                    None => break,
                }
            }
            None
        };
        let end = tokio::select! {
            biased;
            end = interrupted(self.cancel, &bench.now) => Some(end),
            end = decided => end,
        };
        brake.reset();
        end
    }
}
