//! Finds scopes that ended and were not finished (the worker that should have done it died, or gave up too soon), heals batches that
//! lost lines and tasks that lost their tickets, and declares what the configuration says and the database has lost.
//!
//! Each of these looks is made whatever becomes of the others, and each batch is healed by itself.

use crate::{
    error_text::describe,
    failpoint::is_mutant,
    flow::complete::Checks,
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{Store, batches, tasks, workers},
};
use deadpool_postgres::{Object, PoolError};

#[derive(Clone, Debug)]
pub struct Sweep {
    pub store: Store,
    pub checks: Checks,
    pub metrics: Metrics,
    pub declared: workers::Declared,
}

#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    #[error("no connection to sweep with")]
    Connect(#[from] PoolError),
    #[error("could not heal batches that lost lines")]
    Heal(#[source] tokio_postgres::Error),
    #[error("could not look for tasks without a ticket")]
    Tickets(#[source] tokio_postgres::Error),
    #[error("could not look for commands and queues that are not declared any more")]
    Declare(#[source] tokio_postgres::Error),
    #[error("could not look for unfinished scopes")]
    Unfinished(#[source] tokio_postgres::Error),
}

impl Periodic for Sweep {
    const NAME: &'static str = "sweep";
    type Error = SweepError;

    async fn tick(&mut self) -> Result<Tally, SweepError> {
        if is_mutant("no_sweep") {
            return Ok(Tally(0));
        }
        let client = self.store.general.get().await?;
        let healed = self.heal(&client).await;
        let reissued = self.reissue(&client).await;
        let declared = self.declare(&client).await;
        let found = self.ask(&client).await;
        Ok(Tally(healed? + reissued? + declared? + found?))
    }
}

impl Sweep {
    /// Lines of which nothing is recorded run again.
    async fn heal(&self, client: &Object) -> Result<u64, SweepError> {
        let mut healed = 0;
        for batch in batches::over(client).await.map_err(SweepError::Heal)? {
            match batches::heal(client, batch).await {
                Ok(0) => {}
                Ok(lines) => {
                    healed += 1;
                    self.metrics.lines_reopened.inc_by(lines.unsigned_abs().into());
                    tracing::warn!(
                        batch,
                        lines,
                        "nothing was recorded of some lines of a batch; they run again"
                    );
                }
                Err(error) if error.code().is_none() => return Err(SweepError::Heal(error)),
                // The next sweep tries it again; the others are healed now.
                Err(error) => {
                    tracing::warn!(batch, error = describe(&error), "a batch could not be healed");
                }
            }
        }
        Ok(healed)
    }

    async fn reissue(&self, client: &Object) -> Result<u64, SweepError> {
        let reissued = tasks::sweep_tickets(&***client).await.map_err(SweepError::Tickets)?;
        if reissued > 0 {
            tracing::warn!(
                tasks = reissued,
                "queued tasks could not be claimed by any worker; they can again"
            );
        }
        Ok(reissued)
    }

    /// Producers find the queue of a command there, and `process_tasks` its procedure.
    async fn declare(&self, client: &Object) -> Result<u64, SweepError> {
        let declared = self.declared.declare_missing(client).await.map_err(SweepError::Declare)?;
        if declared > 0 {
            tracing::warn!(
                declared,
                "commands or queues were not declared in the database any more; they are again"
            );
        }
        Ok(declared)
    }

    async fn ask(&self, client: &Object) -> Result<u64, SweepError> {
        let found = batches::unfinished(client).await.map_err(SweepError::Unfinished)?;
        for id in &found {
            // The same path as after a commit, so that there is only one.
            self.checks.ask(*id);
        }
        self.metrics.sweep_found.inc_by(found.len() as u64);
        Ok(found.len() as u64)
    }
}
