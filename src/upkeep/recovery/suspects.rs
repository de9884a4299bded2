//! Workers whose session lock is gone: dead when look after look, for three seconds, says so and nothing was heard.

use crate::{liveness::roll::Roll, store::recovery::Lockless};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// How long a lock must be gone: three seconds of looks, less what a tick may come too early. A living worker without its lock beats
/// every second.
pub(super) const GONE_FOR: Duration = Duration::from_millis(2_900);

#[derive(Clone, Debug, Default)]
pub(super) struct Suspects(HashMap<String, Suspicion>);

#[derive(Clone, Debug)]
struct Suspicion {
    found: Lockless,
    since: Instant,
    /// What was left of its heartbeat in Redis when the suspicion began.
    left: Option<Duration>,
}

impl Suspects {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes down what this look found. Returns those that have been gone, and silent, for long enough.
    pub(super) async fn look(&mut self, found: Vec<Lockless>, roll: Option<&Roll>) -> Vec<Lockless> {
        let mut before = std::mem::take(&mut self.0);
        let mut dead = Vec::new();
        for found in found {
            let left = heartbeat_left(roll, &found.id).await;
            let suspicion = match before.remove(&found.id) {
                Some(old) if old.found == found && !old.was_heard_since(left) => old,
                // New, or it has another lock, or it has beaten: from the beginning.
                _ => Suspicion { found: found.clone(), since: Instant::now(), left },
            };
            if suspicion.since.elapsed() >= GONE_FOR {
                dead.push(found);
            } else {
                self.0.insert(found.id, suspicion);
            }
        }
        dead
    }
}

impl Suspicion {
    /// A heartbeat in Redis that ran down by less than the time that passed was renewed.
    fn was_heard_since(&self, left: Option<Duration>) -> bool {
        match (self.left, left) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(before), Some(now)) => now > before.saturating_sub(self.since.elapsed() / 2),
        }
    }
}

async fn heartbeat_left(roll: Option<&Roll>, id: &str) -> Option<Duration> {
    roll?.heartbeat_left(id).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lockless(seen_us: i64, lock_key: i64) -> Lockless {
        Lockless { id: "w".into(), lock_key, seen_us }
    }

    fn long_ago(suspects: &mut Suspects) {
        for suspicion in suspects.0.values_mut() {
            suspicion.since -= GONE_FOR;
        }
    }

    #[tokio::test]
    async fn one_look_condemns_no_worker_and_three_silent_seconds_do() {
        let mut suspects = Suspects::default();
        assert_eq!(suspects.look(vec![lockless(1, 1)], None).await, []);
        assert_eq!(suspects.look(vec![lockless(1, 1)], None).await, [], "too soon");
        long_ago(&mut suspects);
        assert_eq!(suspects.look(vec![lockless(1, 1)], None).await, [lockless(1, 1)]);
    }

    #[tokio::test]
    async fn a_beat_a_new_lock_or_a_lock_seen_again_starts_the_count_over() {
        for (name, between) in [
            ("beat", vec![lockless(2, 1)]),
            ("another session", vec![lockless(1, 2)]),
            ("the lock is there", vec![]),
        ] {
            let mut suspects = Suspects::default();
            suspects.look(vec![lockless(1, 1)], None).await;
            long_ago(&mut suspects);
            assert_eq!(suspects.look(between, None).await, [], "{name}");
            assert_eq!(suspects.look(vec![lockless(1, 1)], None).await, [], "{name}");
        }
    }

    #[test]
    fn a_heartbeat_that_was_renewed_in_redis_is_heard() {
        let since = Instant::now() - Duration::from_secs(4);
        let suspicion = |left| Suspicion { found: lockless(1, 1), since, left };
        let seconds = |s| Some(Duration::from_secs(s));
        assert!(!suspicion(seconds(50)).was_heard_since(seconds(46)), "it merely runs down");
        assert!(suspicion(seconds(50)).was_heard_since(seconds(59)));
        assert!(suspicion(seconds(60)).was_heard_since(seconds(60)), "renewed every second");
        assert!(suspicion(None).was_heard_since(seconds(60)));
        assert!(!suspicion(seconds(50)).was_heard_since(None));
    }
}
