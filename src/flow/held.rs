//! What this worker holds, by token: known before a claim is sent, forgotten after its end was committed.
//!
//! The heartbeat copies it to Redis and the reconciliation compares it with the database; both only ever look.

use crate::store::{blocks::BlockRef, tasks::TaskRef};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;
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

impl Cancel {
    pub fn is_cancelled(&self) -> bool {
        self.aborted.is_cancelled() || self.fenced.is_cancelled()
    }
}

#[derive(Clone, Debug, Default)]
pub struct Held {
    state: Arc<Mutex<State>>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Uuid, Entry>,
    /// What was aborted a moment ago: the reply to a claim of it may still be under way.
    aborted: HashMap<i64, Instant>,
}

/// Longer than any claim takes; after that the listener's own look finds what was missed.
const ABORT_REMEMBERED: Duration = Duration::from_secs(15);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// `None` while the claim that carries the token is under way.
    holding: Option<Holding>,
    cancel: Cancel,
    /// Waits to be alone: nothing of it has started.
    stands_by: bool,
}

/// What a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    Block(BlockRef),
    Task(TaskRef),
}

impl Holding {
    pub fn token(self) -> Uuid {
        match self {
            Self::Block(block) => block.token,
            Self::Task(task) => task.token,
        }
    }

    /// The batch or the task: what an abort names.
    fn id(self) -> i64 {
        match self {
            Self::Block(block) => block.batch,
            Self::Task(task) => task.id,
        }
    }
}

impl Held {
    /// Makes tokens for a claim that is about to be sent.
    pub fn announce(&self, count: usize) -> Vec<Uuid> {
        let tokens: Vec<Uuid> = (0..count).map(|_| Uuid::new_v4()).collect();
        self.lock().entries.extend(tokens.iter().map(|token| (*token, Entry::default())));
        tokens
    }

    /// The claim came back: it brought these, and the other tokens of `announced` hold nothing.
    pub fn settle(&self, announced: &[Uuid], claimed: impl Iterator<Item = Holding>) {
        let mut held = self.lock();
        let State { entries, aborted } = &mut *held;
        aborted.retain(|_, since| since.elapsed() < ABORT_REMEMBERED);
        for holding in claimed {
            let entry = entries.entry(holding.token()).or_default();
            entry.holding = Some(holding);
            // The news of the abort was faster than the reply to the claim.
            if aborted.contains_key(&holding.id()) {
                entry.cancel.aborted.cancel();
            }
        }
        for token in announced {
            if entries.get(token).is_some_and(|entry| entry.holding.is_none()) {
                entries.remove(token);
            }
        }
        drop(held);
        self.tell();
    }

    pub fn cancel_of(&self, token: Uuid) -> Cancel {
        self.lock().entries.get(&token).map(|entry| entry.cancel.clone()).unwrap_or_default()
    }

    pub fn forget(&self, token: Uuid) {
        self.lock().entries.remove(&token);
        self.tell();
    }

    /// This worker was declared dead: whatever it holds, or is about to, is somebody else's.
    pub fn fence_all(&self) -> usize {
        let held = self.lock();
        held.entries.values().for_each(|entry| entry.cancel.fenced.cancel());
        held.entries.values().filter(|entry| entry.holding.is_some()).count()
    }

    /// Somebody else has this block.
    pub fn fence(&self, token: Uuid) {
        if let Some(entry) = self.lock().entries.get(&token) {
            entry.cancel.fenced.cancel();
        }
    }

    /// Whether a token is known: held, or sent with a claim whose end we do not know yet.
    pub fn knows(&self, token: Uuid) -> bool {
        self.lock().entries.contains_key(&token)
    }

    /// The tasks in hand.
    pub fn tasks(&self) -> Vec<TaskRef> {
        let task = |entry: &Entry| match entry.holding? {
            Holding::Task(task) => Some(task),
            Holding::Block(_) => None,
        };
        self.lock().entries.values().filter_map(task).collect()
    }

    /// The blocks in hand.
    pub fn blocks(&self) -> Vec<BlockRef> {
        let block = |entry: &Entry| match entry.holding? {
            Holding::Block(block) => Some(block),
            Holding::Task(_) => None,
        };
        self.lock().entries.values().filter_map(block).collect()
    }

    /// Says whether a block or task merely waits for its turn to be alone.
    pub fn stand_by(&self, token: Uuid, stands_by: bool) {
        if let Some(entry) = self.lock().entries.get_mut(&token) {
            entry.stands_by = stands_by;
        }
        self.tell();
    }

    /// Waits until nothing else is in hand: the ends of all others are committed. Those that stand by do not count: two that
    /// want to be alone would wait for each other.
    pub async fn nothing_but(&self, token: Uuid) {
        let mut changes = self.watch();
        let counts =
            |(other, entry): (&Uuid, &Entry)| *other != token && entry.holding.is_some() && !entry.stands_by;
        while self.lock().entries.iter().any(counts) {
            // Cannot fail: the sender is ours.
            let _ = changes.changed().await;
        }
    }

    /// Tells of every change.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Cancels the task, or every block of the batch, that is being aborted.
    pub fn abort(&self, id: i64) -> usize {
        let mut held = self.lock();
        held.aborted.retain(|_, since| since.elapsed() < ABORT_REMEMBERED);
        held.aborted.insert(id, Instant::now());
        let meant =
            held.entries.values().filter(|entry| entry.holding.is_some_and(|holding| holding.id() == id));
        meant.map(|entry| entry.cancel.aborted.cancel()).count()
    }

    pub fn len(&self) -> usize {
        self.lock().entries.values().filter(|entry| entry.holding.is_some()).count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batches and tasks of which something is held.
    pub fn ids(&self) -> Vec<i64> {
        let mut ids: Vec<i64> =
            self.lock().entries.values().filter_map(|entry| Some(entry.holding?.id())).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single step, so a panic elsewhere leaves the map whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_comes_back_after_the_abort_is_cancelled_at_once() {
        let held = Held::default();
        let tokens = held.announce(2);
        assert_eq!(held.abort(7), 0, "nothing of it is known to be held yet");
        let block = |token, batch| Holding::Block(BlockRef { id: 1, token, batch });
        held.settle(&tokens, [block(tokens[0], 7), block(tokens[1], 8)].into_iter());
        assert!(held.cancel_of(tokens[0]).aborted.is_cancelled());
        assert!(!held.cancel_of(tokens[1]).aborted.is_cancelled());
    }
}
