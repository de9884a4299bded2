//! What the database says this worker holds, and what it does hold: made the same, both ways.

use crate::{
    failpoint::is_mutant,
    flow::complete::Checks,
    held::Held,
    liveness::identity::Identity,
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{Store, blocks::BlockRef, recovery},
};
use deadpool_postgres::{Object, PoolError};
use std::collections::HashSet;
use uuid::Uuid;

#[derive(Clone, Debug)]
pub struct Reconcile {
    pub store: Store,
    pub identity: Identity,
    pub held: Held,
    pub checks: Checks,
    pub metrics: Metrics,
    /// Held and not owned at the last look. A block whose end was committed a moment ago looks the same, once.
    pub missing: HashSet<Uuid>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("no connection to reconcile with")]
    Connect(#[from] PoolError),
    #[error("could not compare what is held with what is owned")]
    Query(#[from] tokio_postgres::Error),
}

impl Periodic for Reconcile {
    const NAME: &'static str = "reconcile";
    type Error = ReconcileError;

    async fn tick(&mut self) -> Result<Tally, ReconcileError> {
        if is_mutant("no_reconcile") {
            return Ok(Tally(0));
        }
        let client = self.store.general.get().await?;
        let worker = self.identity.id();
        let before: Vec<Uuid> = self
            .held
            .blocks()
            .iter()
            .map(|block| block.token)
            .chain(self.held.tasks().iter().map(|task| task.token))
            .collect();
        // The database first, then memory: a token is known here before it is sent there.
        let (owned, claims) = recovery::owned(&client, worker.as_str()).await?;
        let lost: Vec<BlockRef> =
            owned.iter().copied().filter(|block| !self.held.knows(block.token)).collect();
        let freed = match lost.is_empty() {
            true => 0,
            false => recovery::give_back_if_owned(&client, worker.as_str(), &lost).await?,
        };
        lost.iter().for_each(|block| self.checks.ask(block.batch));
        let freed = freed + self.free_lost_tasks(&client, worker.as_str(), &claims).await?;
        let owned = owned.iter().map(|block| block.token).chain(claims);
        let fenced = self.fence_what_is_gone(&before, owned.collect());
        self.metrics.liveness.reconciled.inc_by(freed + fenced);
        Ok(Tally(freed + fenced))
    }
}

impl Reconcile {
    /// Tasks of claims whose reply was lost go back to their queue, no attempt charged.
    async fn free_lost_tasks(
        &self,
        client: &Object,
        worker: &str,
        claims: &[Uuid],
    ) -> Result<u64, ReconcileError> {
        let lost: Vec<Uuid> = claims.iter().copied().filter(|token| !self.held.knows(*token)).collect();
        if lost.is_empty() {
            return Ok(0);
        }
        Ok(recovery::give_back_tasks_if_owned(client, worker, &lost).await?.freed)
    }

    /// Gives up what two looks in a row found in hand and not in the database.
    fn fence_what_is_gone(&mut self, before: &[Uuid], owned: HashSet<Uuid>) -> u64 {
        let gone = |token: &&Uuid| !owned.contains(*token) && self.held.knows(**token);
        let missing: HashSet<Uuid> = before.iter().filter(gone).copied().collect();
        let mut fenced = 0;
        for token in missing.intersection(&self.missing) {
            tracing::warn!(%token, "this block is not ours any more; giving it up");
            self.held.fence(*token);
            fenced += 1;
        }
        self.missing = missing;
        fenced
    }
}
