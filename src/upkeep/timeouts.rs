//! Handlers that do not stop: past their timeout, told to end, and still there. Reported; nothing can stop them but the
//! end of the process.

use crate::{
    flow::watch::Watch,
    metrics::Metrics,
    periodic::{Periodic, Tally},
};
use std::{convert::Infallible, time::Duration};

/// Time between two looks.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A handler that is told to end may take this long to do so.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Timeouts {
    pub watch: Watch,
    pub metrics: Metrics,
}

impl Periodic for Timeouts {
    const NAME: &'static str = "timeouts";
    type Error = Infallible;

    async fn tick(&mut self) -> Result<Tally, Infallible> {
        let overdue = self.watch.overdue(GRACE);
        self.metrics.handlers_overdue.set(overdue.len() as i64);
        for row in overdue.iter().filter(|row| row.news) {
            tracing::warn!(
                batch = row.batch,
                line = row.line,
                command = row.command,
                late_s = row.late.as_secs(),
                "a handler is past its timeout and does not stop: it blocks its thread"
            );
        }
        Ok(Tally(0))
    }
}
