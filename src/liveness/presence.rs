//! Whether Redis is there, as all clients of the process see it together: logged once, not once by each.

use crate::metrics::Metrics;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A Redis that comes and goes is logged once in this time, not at every turn.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(300);

/// One for the process, whose parts each have a client of their own.
#[derive(Clone, Debug, Default)]
pub struct Presence {
    state: Arc<Mutex<State>>,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct State {
    /// Clients without a connection.
    lost: usize,
    warned: Option<Instant>,
}

impl Presence {
    pub fn new(metrics: &Metrics) -> Self {
        Self { state: Arc::default(), metrics: metrics.clone() }
    }

    /// Another client looks.
    pub fn witness(&self) -> Witness {
        Witness { presence: self.clone(), up: Mutex::new(None) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gone(&self, reason: &str) {
        let mut state = self.lock();
        state.lost += 1;
        self.metrics.redis_up.set(0);
        if state.lost > 1 {
            return;
        }
        if state.warned.is_none_or(|last| last.elapsed() > BETWEEN_WARNINGS) {
            state.warned = Some(Instant::now());
            tracing::warn!(reason, "Redis is away; PostgreSQL alone keeps the heartbeats meanwhile");
        } else {
            tracing::debug!(reason, "Redis went away again");
        }
    }

    /// A client has Redis again, or is no more.
    fn found(&self) {
        let mut state = self.lock();
        state.lost = state.lost.saturating_sub(1);
        if state.lost == 0 {
            self.metrics.redis_up.set(1);
            tracing::info!("Redis is back");
        }
    }
}

/// What one client sees.
#[derive(Debug)]
pub struct Witness {
    presence: Presence,
    /// `None` before the first answer.
    up: Mutex<Option<bool>>,
}

impl Witness {
    /// Nothing has been seen yet.
    pub fn is_new(&self) -> bool {
        self.lock().is_none()
    }

    pub fn note(&self, up: bool, reason: &str) {
        let before = self.lock().replace(up);
        match (before, up) {
            (Some(false), true) => self.presence.found(),
            (None | Some(true), false) => self.presence.gone(reason),
            (None, true) if self.presence.lock().lost == 0 => _ = self.presence.metrics.redis_up.set(1),
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<bool>> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if *self.lock() == Some(false) {
            let mut state = self.presence.lock();
            state.lost = state.lost.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_is_up_when_no_client_misses_it_and_a_client_that_ends_misses_nothing() {
        let metrics = Metrics::default();
        let presence = Presence::new(&metrics);
        let (one, other) = (presence.witness(), presence.witness());
        assert!(one.is_new() && metrics.redis_up.get() == 0);
        one.note(true, "");
        assert_eq!(metrics.redis_up.get(), 1);
        one.note(false, "gone");
        other.note(false, "gone");
        one.note(true, "");
        assert_eq!((metrics.redis_up.get(), presence.lock().lost), (0, 1));
        drop(other);
        assert_eq!(presence.lock().lost, 0);
        one.note(false, "gone again");
        one.note(true, "");
        assert_eq!(metrics.redis_up.get(), 1);
    }
}
