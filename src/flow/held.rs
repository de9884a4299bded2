//! What this worker holds, by token: known before a claim is sent, forgotten after its end was committed.

use crate::store::blocks::BlockRef;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Why a block is given up before its end.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    /// Its batch is being aborted: drop the rest.
    pub aborted: CancellationToken,
    /// Somebody else has it: write nothing more.
    pub fenced: CancellationToken,
}

#[derive(Clone, Debug, Default)]
pub struct Held(Arc<Mutex<HashMap<Uuid, Entry>>>);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// `None` while the claim that carries the token is under way.
    block: Option<BlockRef>,
    cancel: Cancel,
}

impl Held {
    /// Makes tokens for a claim that is about to be sent.
    pub fn announce(&self, count: usize) -> Vec<Uuid> {
        let tokens: Vec<Uuid> = (0..count).map(|_| Uuid::new_v4()).collect();
        self.lock().extend(tokens.iter().map(|token| (*token, Entry::default())));
        tokens
    }

    /// The claim came back: these tokens hold blocks, the rest of `announced` hold nothing.
    pub fn settle(&self, announced: &[Uuid], claimed: &[BlockRef]) {
        let mut held = self.lock();
        for block in claimed {
            held.entry(block.token).or_default().block = Some(*block);
        }
        for token in announced {
            if held.get(token).is_some_and(|entry| entry.block.is_none()) {
                held.remove(token);
            }
        }
    }

    pub fn cancel_of(&self, token: Uuid) -> Cancel {
        self.lock().get(&token).map(|entry| entry.cancel.clone()).unwrap_or_default()
    }

    pub fn forget(&self, token: Uuid) {
        self.lock().remove(&token);
    }

    /// Cancels every block of a batch that is being aborted.
    pub fn abort_batch(&self, batch: i64) -> usize {
        let held = self.lock();
        let of_batch = held.values().filter(|entry| entry.block.is_some_and(|block| block.batch == batch));
        of_batch.map(|entry| entry.cancel.aborted.cancel()).count()
    }

    pub fn len(&self) -> usize {
        self.lock().values().filter(|entry| entry.block.is_some()).count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batches of which something is held.
    pub fn batches(&self) -> Vec<i64> {
        let mut batches: Vec<i64> = self.lock().values().filter_map(|e| Some(e.block?.batch)).collect();
        batches.sort_unstable();
        batches.dedup();
        batches
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Entry>> {
        // Every change is a single step, so a panic elsewhere leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
