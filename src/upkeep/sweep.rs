//! Finds scopes that ended and were not finished (the worker that should have done it died, or gave up too soon), and heals
//! batches that lost lines and tasks that lost their tickets.

use crate::{
    flow::complete::Checks,
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{Store, batches, tasks},
};
use deadpool_postgres::PoolError;

#[derive(Debug)]
pub struct Sweep {
    pub store: Store,
    pub checks: Checks,
    pub metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    #[error("no connection to sweep with")]
    Connect(#[from] PoolError),
    #[error("could not look for unfinished scopes")]
    Query(#[from] tokio_postgres::Error),
}

impl Periodic for Sweep {
    const NAME: &'static str = "sweep";
    type Error = SweepError;

    async fn tick(&mut self) -> Result<Tally, SweepError> {
        let client = self.store.general.get().await?;
        let healed = batches::heal(&client).await?;
        for (batch, lines) in &healed {
            self.metrics.lines_reopened.inc_by(*lines as u64);
            tracing::warn!(batch, lines, "nothing was recorded of some lines of a batch; they run again");
        }
        let reissued = tasks::sweep_tickets(&**client).await?;
        if reissued > 0 {
            tracing::warn!(
                tasks = reissued,
                "queued tasks could not be claimed by any worker; they can again"
            );
        }
        let found = batches::unfinished(&client).await?;
        for id in &found {
            // The same path as after a commit, so that there is only one.
            self.checks.ask(*id);
        }
        self.metrics.sweep_found.inc_by(found.len() as u64);
        Ok(Tally((found.len() + healed.len()) as u64 + reissued))
    }
}
