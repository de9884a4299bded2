//! Finds scopes that ended and were not finished: whoever should have done it died, or gave up too soon.

use crate::{
    flow::complete::Checks,
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{Store, batches},
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
        let found = batches::unfinished(&client).await?;
        for id in &found {
            // The same path as after a commit, so that there is only one.
            self.checks.ask(*id);
        }
        self.metrics.sweep_found.inc_by(found.len() as u64);
        Ok(Tally(found.len() as u64))
    }
}
