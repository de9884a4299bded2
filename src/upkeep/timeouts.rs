//! Handlers that do not stop: past their timeout, cancelled, and still there, because they block their thread. Only the end of
//! the process ends them; their rows are given up, so that another fiber or replica runs them.

use crate::{
    flow::{fiber::Bench, watch::Watch},
    metrics::Metrics,
    periodic::{Periodic, Tally},
};
use std::{convert::Infallible, sync::Weak, time::Duration};

/// Time between two looks.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A handler that is cancelled may take this long to stop.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Timeouts {
    pub watch: Watch,
    pub metrics: Metrics,
    /// Weak: the batcher ends when the last fiber has handed over what it had, and must not wait for this.
    pub bench: Weak<Bench>,
}

impl Periodic for Timeouts {
    const NAME: &'static str = "timeouts";
    type Error = Infallible;

    async fn tick(&mut self) -> Result<Tally, Infallible> {
        let overdue = self.watch.overdue(GRACE);
        self.metrics.handlers_overdue.set(overdue.len() as i64);
        let mut given_up = 0;
        for row in overdue.iter().filter(|row| row.news) {
            tracing::warn!(
                batch = row.watched.block.batch,
                line = row.line,
                command = row.watched.command,
                late_s = row.late.as_secs(),
                "a handler is past its timeout and does not stop: it blocks its thread; its row is given up"
            );
            if let Some(bench) = self.bench.upgrade() {
                bench.give_up(row).await;
                given_up += 1;
            }
        }
        Ok(Tally(given_up))
    }
}
