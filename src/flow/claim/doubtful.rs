//! The tokens of claims whose reply never came: the claim may have been committed, and what it took is then ours.

use super::{Claimed, Dispatcher};
use crate::{error_text::describe, store::query::QueryError};
use deadpool_postgres::Object;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A claim whose reply was lost may still be under way; after this long it is not.
const FOR: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Doubtful(Vec<(Uuid, Instant)>);

impl Doubtful {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn add(&mut self, tokens: &[Uuid]) {
        self.0.extend(tokens.iter().map(|token| (*token, Instant::now())));
    }

    pub(super) fn tokens(&self) -> Vec<Uuid> {
        self.0.iter().map(|(token, _)| *token).collect()
    }

    /// Leaves those that were found, and those that can no longer be; returns the latter.
    pub(super) fn settle(&mut self, is_found: impl Fn(Uuid) -> bool) -> Vec<Uuid> {
        self.0.retain(|(token, _)| !is_found(*token));
        let over = |(_, since): &mut (Uuid, Instant)| since.elapsed() >= FOR;
        self.0.extract_if(.., over).map(|(token, _)| token).collect()
    }
}

impl<W: Claimed> Dispatcher<W> {
    /// What a claim whose reply was lost has claimed is ours all the same.
    pub(super) async fn adopt(&mut self, client: &Object) -> Result<Vec<W>, QueryError> {
        if self.doubtful.is_empty() {
            return Ok(Vec::new());
        }
        let found = W::find(client, &self.doubtful.tokens()).await?;
        let held = &self.desk.bench.held;
        held.settle(&[], found.iter().map(W::holding));
        let is_found = |token| found.iter().any(|one| one.holding().token() == token);
        self.doubtful.settle(is_found).into_iter().for_each(|token| held.forget(token));
        if !found.is_empty() {
            let (queue, work) = (&self.desk.queue, W::WORK.as_str());
            tracing::info!(
                queue,
                work,
                count = found.len(),
                "adopted the work of a claim whose reply was lost"
            );
        }
        Ok(found)
    }

    /// Before the end: the work of claims whose reply was lost must not stay behind, owned by this worker and held by none of its fibers.
    pub(super) async fn adopt_last(&mut self) {
        if self.doubtful.is_empty() {
            return;
        }
        let company = self.desk.bench.room.enter().await;
        let adopted = match self.desk.bench.store.claims.get().await {
            Ok(client) => self.adopt(&client).await,
            Err(error) => Err(error.into()),
        };
        match adopted {
            Ok(found) => found.into_iter().for_each(|one| self.start(vec![one], None, company.clone())),
            Err(error) => tracing::warn!(error = describe(&error), "lost claims are left to the recovery"),
        }
    }
}
