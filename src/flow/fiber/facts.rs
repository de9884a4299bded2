//! What blocks of the same batch share, asked once.

use super::{Bench, budget::Brake};
use crate::{
    flow::held::Cancel,
    store::blocks::{self, BatchFacts, Block},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// The batches of late.
#[derive(Clone, Debug, Default)]
pub struct FactsCache(Arc<Mutex<HashMap<i64, Arc<Facts>>>>);

/// What is known of a batch.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) batch: BatchFacts,
    pub(super) brake: Option<Brake>,
}

/// Batches a cache remembers; more at a time in one worker means asking again now and then.
const REMEMBERED: usize = 1_000;

impl Bench {
    /// Asks until there is an answer; `None` when the work is to be given up meanwhile.
    pub(super) async fn facts_of(&self, block: &Block, cancel: &Cancel) -> Option<Arc<Facts>> {
        let batch = block.reference.batch;
        if let Some(facts) = self.facts.get(batch) {
            return Some(facts);
        }
        let found = self
            .patiently(cancel, "batch", || async {
                blocks::facts(&self.store.general.get().await?, batch).await
            })
            .await??;
        let brake = found.budget.map(Brake::of);
        Some(self.facts.keep(batch, Facts { batch: found, brake }))
    }
}

impl Facts {
    pub(super) fn saw_failed(&self, rows: i64) {
        self.brake.iter().for_each(|brake| brake.saw_failed(rows));
    }
}

impl FactsCache {
    fn get(&self, batch: i64) -> Option<Arc<Facts>> {
        self.lock().get(&batch).cloned()
    }

    /// Keeps it, unless another fiber was first: all of them share one brake.
    fn keep(&self, batch: i64, facts: Facts) -> Arc<Facts> {
        let mut cache = self.lock();
        if cache.len() >= REMEMBERED {
            cache.clear();
        }
        Arc::clone(cache.entry(batch).or_insert_with(|| Arc::new(facts)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Arc<Facts>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
