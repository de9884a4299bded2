//! The session lock: PostgreSQL lets go of it the moment this process is gone, and everybody can see that.
//!
//! It is held on the LISTEN connection, with a random key of its own for every session: an old session that the server
//! has not given up yet cannot be in the way, and a judge that looks twice sees that the key has changed.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Whether this worker's session stands, for the heartbeat and the judge.
#[derive(Clone, Debug)]
pub struct Session {
    /// Off behind a transaction pooler: a lock taken there would be another client's.
    wanted: bool,
    state: Arc<Mutex<State>>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    since: Option<Instant>,
    /// The connection is slow to answer: the server may have ended the session without our knowing.
    doubted: bool,
}

impl Session {
    pub fn new(wanted: bool) -> Self {
        Self { wanted, state: Arc::default(), changes: watch::Sender::new(0) }
    }

    /// Whether there is to be a session lock at all.
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    pub fn stands(&self) {
        *self.lock() = State { since: Some(Instant::now()), doubted: false };
        self.changes.send_modify(|count| *count += 1);
    }

    /// The connection does not answer, or does again. While it does not, the heartbeat speaks for us.
    pub fn doubt(&self, doubted: bool) {
        self.lock().doubted = doubted;
        self.changes.send_modify(|count| *count += 1);
    }

    /// The connection is gone and the lock with it: the heartbeat speaks at once, or we would be taken for dead.
    pub fn fell(&self) {
        *self.lock() = State::default();
        self.changes.send_modify(|count| *count += 1);
    }

    /// Should hold the lock and does not, or perhaps does not.
    pub fn is_missing(&self) -> bool {
        let state = self.lock();
        self.wanted && (state.since.is_none() || state.doubted)
    }

    pub fn has_stood_for(&self, time: Duration) -> bool {
        let state = self.lock();
        !state.doubted && state.since.is_some_and(|since| since.elapsed() >= time)
    }

    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
