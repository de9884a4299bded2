//! The tokens of claims whose reply never came: the claim may have been committed, and what it took is then ours.

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
