//! Whether the daemon is ready and alive, as its parts say.

use crate::pulse::{Pulse, Pulses};
use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::watch;

/// The name under which a daemon whose flushes fail is not ready.
pub const WRITES: &str = "writes";

/// Why the daemon is not ready, by the part that says so. Empty is ready.
#[derive(Clone, Debug, Default)]
pub struct Health {
    reasons: Arc<Mutex<BTreeMap<Cow<'static, str>, String>>>,
    pulses: Pulses,
    changes: watch::Sender<u64>,
}

impl Health {
    /// The same as the default, with its own limit to how long a loop may stand still.
    pub fn watching(stuck_after: Duration) -> Self {
        Self { pulses: Pulses::new(stuck_after), ..Self::default() }
    }

    /// A loop that says when it turns.
    pub fn pulse(&self, name: impl Into<String>) -> Pulse {
        self.pulses.begin(name)
    }

    /// The loops that stand still though nothing outside holds them up. Empty is alive.
    pub fn stuck(&self) -> Vec<String> {
        let sentence =
            |(name, since): (String, Duration)| format!("{name}: has not turned for {} s", since.as_secs());
        self.pulses.stuck().into_iter().map(sentence).collect()
    }

    /// Why outcomes cannot be written, for the list of workers.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.reasons).get(WRITES).cloned()
    }

    /// Notifies of every change of the reasons.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub fn unready(&self, part: impl Into<Cow<'static, str>>, reason: impl Into<String>) {
        let reason = reason.into();
        let before = lock(&self.reasons).insert(part.into(), reason.clone());
        if before != Some(reason) {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    pub fn ready(&self, part: &str) {
        let before = lock(&self.reasons).remove(part);
        if before.is_some() {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    pub fn not_ready_because(&self) -> Vec<String> {
        lock(&self.reasons).iter().map(|(part, reason)| format!("{part}: {reason}")).collect()
    }

    /// The parts that are not ready, without their reasons.
    pub fn parts_not_ready(&self) -> Vec<String> {
        lock(&self.reasons).keys().map(|part| part.to_string()).collect()
    }
}

fn lock<T>(map: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves the map whole: inserts and removals are single steps.
    map.lock().unwrap_or_else(PoisonError::into_inner)
}
