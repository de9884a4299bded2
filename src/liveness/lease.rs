//! The right to start work: as long as this worker has renewed in time, no other worker has been given its blocks.
//!
//! Renewed means written to `workers.seen_at`: Redis is a witness for others, not a proof for ourselves. All times here
//! are of the monotonic clock and only ever compared with each other.

use crate::failpoint::is_mutant;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;

#[derive(Clone, Debug)]
pub struct Lease {
    ttl: Duration,
    state: Arc<Mutex<State>>,
    renewals: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    renewed: Instant,
    /// The last time a renewal failed, or came so late that others had lost sight of us.
    outage: Option<Instant>,
}

impl Lease {
    /// Begins renewed: a worker starts after it was written into the list.
    pub fn new(ttl: Duration) -> Self {
        let state = State { renewed: Instant::now(), outage: None };
        Self { ttl, state: Arc::new(Mutex::new(state)), renewals: watch::Sender::new(0) }
    }

    /// A renewal that was sent at `sent` arrived: the time on the way counts against us.
    pub fn renew(&self, sent: Instant) {
        let mut state = self.lock();
        state.renewed = state.renewed.max(sent);
        drop(state);
        self.renewals.send_modify(|count| *count += 1);
    }

    pub fn failed(&self) {
        self.lock().outage = Some(Instant::now());
    }

    pub fn is_valid(&self) -> bool {
        self.age() < self.ttl || is_mutant("no_lease")
    }

    /// Time since the last renewal.
    pub fn age(&self) -> Duration {
        self.lock().renewed.elapsed()
    }

    /// Whether no renewal has failed for this long: only then is what we see of others not our own trouble.
    pub fn is_sound_for(&self, quiet: Duration) -> bool {
        self.is_valid() && self.lock().outage.is_none_or(|outage| outage.elapsed() >= quiet)
    }

    /// Returns at once while the lease is valid; else when it is renewed.
    pub async fn valid(&self) {
        if self.is_valid() {
            return;
        }
        let mut renewals = self.renewals.subscribe();
        while !self.is_valid() {
            // Cannot fail: the sender is ours.
            let _ = renewals.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lease_that_ran_out_holds_work_back_until_it_is_renewed() {
        let lease = Lease::new(Duration::from_millis(20));
        lease.valid().await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(!lease.is_valid());
        let waiting = lease.clone();
        let waits = tokio::time::timeout(Duration::from_millis(20), waiting.valid()).await;
        assert!(waits.is_err(), "started without a lease");
        let long_ago = Instant::now() - Duration::from_secs(1);
        lease.renew(long_ago);
        assert!(!lease.is_valid(), "a renewal counts from when it was sent");
        lease.renew(Instant::now());
        lease.valid().await;
    }

    #[test]
    fn after_an_outage_a_judge_is_not_sound_for_a_while() {
        let lease = Lease::new(Duration::from_secs(60));
        assert!(lease.is_sound_for(Duration::from_secs(15)), "a fresh start has seen no outage");
        lease.failed();
        assert!(!lease.is_sound_for(Duration::from_secs(15)));
        assert!(lease.is_sound_for(Duration::ZERO));
    }
}
