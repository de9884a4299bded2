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
    /// Off behind a transaction pooler: a lock taken there would be somebody else's.
    wanted: bool,
    since: Arc<Mutex<Option<Instant>>>,
    changes: watch::Sender<u64>,
}

impl Session {
    pub fn new(wanted: bool) -> Self {
        Self { wanted, since: Arc::default(), changes: watch::Sender::new(0) }
    }

    /// Whether there is to be a session lock at all.
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    pub fn stands(&self) {
        *self.lock() = Some(Instant::now());
        self.changes.send_modify(|count| *count += 1);
    }

    /// The connection is gone and the lock with it: the heartbeat speaks at once, or we would be taken for dead.
    pub fn fell(&self) {
        *self.lock() = None;
        self.changes.send_modify(|count| *count += 1);
    }

    /// Should hold the lock and does not.
    pub fn is_missing(&self) -> bool {
        self.wanted && self.lock().is_none()
    }

    pub fn has_stood_for(&self, time: Duration) -> bool {
        self.lock().is_some_and(|since| since.elapsed() >= time)
    }

    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
