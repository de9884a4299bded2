//! What blocks of the same batch share, asked once.

use super::{Bench, budget::Brake};
use crate::{
    held::Cancel,
    store::{
        blocks::Block,
        facts::{self, BatchFacts},
    },
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};
use uuid::Uuid;

/// The batches of the last claims, each by what is its own for ever: after a failover an id may stand for another batch.
#[derive(Clone, Debug, Default)]
pub struct FactsCache(Arc<Mutex<HashMap<Key, Arc<Facts>>>>);

/// A batch, and the generation its failures are counted in.
type Key = (Uuid, i32);

/// What is known of a batch.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) batch: BatchFacts,
    pub(super) brake: Option<Arc<Brake>>,
}

/// What a cache remembers at most; more at a time in one worker means asking again now and then.
const REMEMBERED: usize = 1_000;
const REMEMBERED_BYTES: usize = 8 << 20;

impl Bench {
    /// Asks until there is an answer; `None` when the work is to be given up meanwhile, or the batch is gone.
    pub(super) async fn facts_of(&self, block: &Block, cancel: &Cancel) -> Option<Arc<Facts>> {
        let key = (block.uid, block.generation);
        if let Some(facts) = self.facts.get(key) {
            return Some(facts);
        }
        let found = self
            .patiently(cancel, "batch", || async {
                facts::read(&self.store.general.get().await?, block.reference.batch, block.uid).await
            })
            .await??;
        let brake = found.has_budget.then(Arc::default);
        Some(self.facts.keep(key, Facts { batch: found, brake }))
    }
}

impl Facts {
    pub(super) fn saw_failed(&self, rows: i64) {
        self.brake.iter().for_each(|brake| brake.saw_failed(rows));
    }
}

impl FactsCache {
    fn get(&self, key: Key) -> Option<Arc<Facts>> {
        self.lock().get(&key).cloned()
    }

    /// Keeps it, unless another fiber was first: all of them share one brake.
    fn keep(&self, key: Key, facts: Facts) -> Arc<Facts> {
        let mut cache = self.lock();
        let bytes: usize = cache.values().map(|facts| facts.batch.context.len()).sum();
        if cache.len() >= REMEMBERED || bytes + facts.batch.context.len() > REMEMBERED_BYTES {
            cache.clear();
        }
        Arc::clone(cache.entry(key).or_insert_with(|| Arc::new(facts)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Arc<Facts>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Json;

    #[test]
    fn large_contexts_are_not_all_remembered() {
        let cache = FactsCache::default();
        for n in 0..20 {
            let context = Json::from_text("x".repeat(1 << 20));
            let batch = BatchFacts {
                context,
                max_attempts: None,
                row_timeout: None,
                traceparent: None,
                has_budget: false,
            };
            cache.keep((Uuid::from_u128(n), 1), Facts { batch, brake: None });
            let bytes: usize = cache.lock().values().map(|facts| facts.batch.context.len()).sum();
            assert!(bytes <= REMEMBERED_BYTES, "{bytes} bytes");
            assert!(cache.get((Uuid::from_u128(n), 1)).is_some(), "the newest is remembered");
        }
    }
}
