//! What this worker holds, by token: known before a claim is sent, forgotten after its end was committed.
//!
//! The heartbeat copies what runs of it to Redis and the reconciliation compares it with the database; both only ever look.

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
    /// Another worker has it: write nothing more.
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

/// A block by its token; a task by the token of its claim, which may be of several tasks, and its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    token: Uuid,
    task: Option<i64>,
}

impl From<Uuid> for Key {
    fn from(token: Uuid) -> Self {
        Self { token, task: None }
    }
}

impl From<TaskRef> for Key {
    fn from(task: TaskRef) -> Self {
        Self { token: task.token, task: Some(task.id) }
    }
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Key, Entry>,
    /// How many entries a token has.
    tokens: HashMap<Uuid, usize>,
    /// What was aborted a moment ago: the reply to a claim of it may still be under way.
    aborted: HashMap<i64, Instant>,
}

/// Longer than any claim takes; after that the listener's own look finds what was missed.
const ABORT_REMEMBERED: Duration = Duration::from_secs(15);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// `None` while the claim that carries the token is under way.
    holding: Option<Holding>,
    /// When the claim came back.
    since: Option<Instant>,
    cancel: Cancel,
    /// Waits to be alone: nothing of it has started.
    stands_by: bool,
    /// A fiber runs it.
    started: bool,
    /// It was to be alone, and is not any more.
    joined: bool,
}

/// What a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    Block(BlockRef),
    Task(TaskRef),
}

impl State {
    fn entry(&mut self, key: Key) -> &mut Entry {
        let tokens = &mut self.tokens;
        self.entries.entry(key).or_insert_with(|| {
            *tokens.entry(key.token).or_default() += 1;
            Entry::default()
        })
    }

    fn remove(&mut self, key: Key) {
        if self.entries.remove(&key).is_none() {
            return;
        }
        if let Some(count) = self.tokens.get_mut(&key.token) {
            *count -= 1;
            if *count == 0 {
                self.tokens.remove(&key.token);
            }
        }
    }

    /// A token that was sent with a claim and holds nothing by itself.
    fn remove_announced(&mut self, token: Uuid) {
        let key = Key::from(token);
        if self.entries.get(&key).is_some_and(|entry| entry.holding.is_none()) {
            self.remove(key);
        }
    }
}

impl Holding {
    pub fn key(self) -> Key {
        match self {
            Self::Block(block) => block.token.into(),
            Self::Task(task) => task.into(),
        }
    }

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
        let mut held = self.lock();
        for token in &tokens {
            held.entry((*token).into());
        }
        drop(held);
        tokens
    }

    /// The claim came back: it brought these, and the other tokens of `announced` hold nothing.
    pub fn settle(&self, announced: &[Uuid], claimed: impl Iterator<Item = Holding>) {
        let mut held = self.lock();
        held.aborted.retain(|_, since| since.elapsed() < ABORT_REMEMBERED);
        for holding in claimed {
            // Of batches, which are aborted for good. A task may have been retried by hand since; whether it is aborted the listener asks.
            let is_aborted = matches!(holding, Holding::Block(_)) && held.aborted.contains_key(&holding.id());
            let entry = held.entry(holding.key());
            entry.holding = Some(holding);
            entry.since = Some(Instant::now());
            // The news of the abort was faster than the reply to the claim.
            if is_aborted {
                entry.cancel.aborted.cancel();
            }
            if matches!(holding, Holding::Task(_)) {
                held.remove_announced(holding.token());
            }
        }
        for token in announced {
            held.remove_announced(*token);
        }
        drop(held);
        self.tell();
    }

    pub fn cancel_of(&self, key: impl Into<Key>) -> Cancel {
        self.lock().entries.get(&key.into()).map(|entry| entry.cancel.clone()).unwrap_or_default()
    }

    pub fn forget(&self, key: impl Into<Key>) {
        self.forget_all([key]);
    }

    pub fn forget_all(&self, keys: impl IntoIterator<Item = impl Into<Key>>) {
        let mut held = self.lock();
        keys.into_iter().for_each(|key| held.remove(key.into()));
        drop(held);
        self.tell();
    }

    /// This worker was declared dead: what it holds, or is about to, is another worker's.
    pub fn fence_all(&self) -> usize {
        let held = self.lock();
        held.entries.values().for_each(|entry| entry.cancel.fenced.cancel());
        held.entries.values().filter(|entry| entry.holding.is_some()).count()
    }

    /// Another worker has this block, or these tasks.
    pub fn fence(&self, token: Uuid) {
        let held = self.lock();
        let of_token = held.entries.iter().filter(|(key, _)| key.token == token);
        of_token.for_each(|(_, entry)| entry.cancel.fenced.cancel());
    }

    /// One block, or one task of a claim, was given up.
    pub fn fence_one(&self, key: impl Into<Key>) {
        if let Some(entry) = self.lock().entries.get(&key.into()) {
            entry.cancel.fenced.cancel();
        }
    }

    /// Whether a token is known: held, or sent with a claim whose end we do not know yet.
    pub fn knows(&self, token: Uuid) -> bool {
        self.lock().tokens.contains_key(&token)
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

    /// A fiber begins to run these.
    pub fn start(&self, keys: &[Key]) {
        let mut held = self.lock();
        for key in keys {
            if let Some(entry) = held.entries.get_mut(key) {
                entry.started = true;
            }
        }
        drop(held);
        self.tell();
    }

    /// What fibers run, as opposed to what waits for one or waits to be alone.
    pub fn running(&self) -> Vec<Holding> {
        let runs = |entry: &Entry| entry.holding.filter(|_| entry.started && !entry.stands_by);
        self.lock().entries.values().filter_map(runs).collect()
    }

    /// Says whether a block or task merely waits for its turn to be alone.
    pub fn stand_by(&self, key: Key, stands_by: bool) {
        if let Some(entry) = self.lock().entries.get_mut(&key) {
            entry.stands_by = stands_by;
        }
        self.tell();
    }

    /// A suspect that was alone runs on beside others.
    pub fn join_others(&self, key: Key) {
        if let Some(entry) = self.lock().entries.get_mut(&key) {
            entry.joined = true;
        }
    }

    pub fn has_joined_others(&self, key: impl Into<Key>) -> bool {
        self.lock().entries.get(&key.into()).is_some_and(|entry| entry.joined)
    }

    /// Waits until nothing else is in hand: the ends of all others are committed. Those that stand by do not count: two that
    /// want to be alone would wait for each other.
    pub async fn nothing_but(&self, key: Key) {
        let mut changes = self.watch();
        let counts =
            |(other, entry): (&Key, &Entry)| *other != key && entry.holding.is_some() && !entry.stands_by;
        while self.lock().entries.iter().any(counts) {
            // Cannot fail: the sender is ours.
            let _ = changes.changed().await;
        }
    }

    /// How long the oldest of what is in hand has been there; `None` when nothing is. Those that stand by do not count.
    pub fn oldest(&self) -> Option<Duration> {
        let held = self.lock();
        let at_work = held.entries.values().filter(|entry| !entry.stands_by);
        at_work.filter_map(|entry| Some(entry.since?.elapsed())).max()
    }

    /// Notifies of every change.
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
