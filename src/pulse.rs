//! Whether the loops of the daemon still turn: what `/livez` is answered from.
//!
//! A loop reports each time it comes round. While it waits for something outside, a database that is away or handlers that
//! run for hours, it tells by the clock: its task is still polled, and it waits rightly. So a loop that stands still is
//! one that a restart fixes (a deadlock, a thread that is blocked, a wake-up that was lost); no trouble outside is.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// The loops of one daemon.
#[derive(Clone, Debug)]
pub struct Pulses {
    limit: Duration,
    began: Instant,
    turns: Arc<Mutex<BTreeMap<String, Weak<AtomicU64>>>>,
}

/// A loop that has ended needs not turn.
const ENDED: u64 = u64::MAX;

impl Default for Pulses {
    fn default() -> Self {
        Self::new(Duration::from_secs(120))
    }
}

impl Pulses {
    /// A loop that has not turned for `limit` stands still.
    pub fn new(limit: Duration) -> Self {
        Self { limit, began: Instant::now(), turns: Arc::default() }
    }

    /// A loop by this name begins; one of the same name that died is forgotten.
    pub fn begin(&self, name: impl Into<String>) -> Pulse {
        let last = Arc::new(AtomicU64::new(0));
        self.lock().insert(name.into(), Arc::downgrade(&last));
        let pulse = Pulse { began: self.began, last, tick: (self.limit / 4).min(Duration::from_secs(5)) };
        pulse.turn();
        pulse
    }

    /// The loops that stand still, and for how long they have.
    pub fn stuck(&self) -> Vec<(String, Duration)> {
        let now = self.began.elapsed();
        let mut turns = self.lock();
        turns.retain(|_, last| last.strong_count() > 0);
        let still = |(name, last): (&String, &Weak<AtomicU64>)| {
            let last = last.upgrade()?.load(Ordering::Relaxed);
            let since = now.saturating_sub(Duration::from_millis(last));
            (last != ENDED && since > self.limit).then(|| (name.clone(), since))
        };
        turns.iter().filter_map(still).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<AtomicU64>>> {
        // Every change is a single step, so a panic elsewhere leaves the map whole.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One loop's own.
#[derive(Clone, Debug)]
pub struct Pulse {
    began: Instant,
    /// When it turned last, in milliseconds since `began`.
    last: Arc<AtomicU64>,
    tick: Duration,
}

impl Default for Pulse {
    /// Of a loop that is not watched.
    fn default() -> Self {
        Pulses::default().begin("")
    }
}

impl Pulse {
    /// The loop has come round.
    pub fn turn(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(ENDED - 1);
        self.last.store(now, Ordering::Relaxed);
    }

    /// The loop is over, as it should be.
    pub fn end(&self) {
        self.last.store(ENDED, Ordering::Relaxed);
    }

    /// The time after which a loop that waits should tell that it does.
    pub fn tick(&self) -> Duration {
        self.tick
    }

    /// Waits for what is not in the loop's hand.
    pub fn outside<'a, T>(
        &'a self,
        wait: impl Future<Output = T> + Send + 'a,
    ) -> impl Future<Output = T> + Send + 'a
    where
        T: 'a,
    {
        self.outside_while(|| true, wait)
    }

    /// The same, for a wait that is right only as long as `rightly` says so: else a wake-up was forgotten.
    pub fn outside_while<'a, T>(
        &'a self,
        rightly: impl Fn() -> bool + Send + 'a,
        wait: impl Future<Output = T> + Send + 'a,
    ) -> impl Future<Output = T> + Send + 'a
    where
        T: 'a,
    {
        // Boxed before anything is awaited: a flush or a claim is a large future, and would be there twice.
        let mut wait = Box::pin(wait);
        async move {
            loop {
                let waited = tokio::time::timeout(self.tick, &mut wait).await;
                if waited.is_ok() || rightly() {
                    self.turn();
                }
                if let Ok(answer) = waited {
                    return answer;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn names(pulses: &Pulses) -> Vec<String> {
        pulses.stuck().into_iter().map(|(name, _)| name).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_does_not_come_round_is_found_until_it_does() {
        let pulses = Pulses::new(LIMIT);
        let (slow, quick) = (pulses.begin("slow"), pulses.begin("quick"));
        tokio::time::advance(LIMIT).await;
        quick.turn();
        assert_eq!(names(&pulses), [""; 0]);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(pulses.stuck(), [("slow".to_owned(), LIMIT + Duration::from_secs(1))]);
        slow.turn();
        assert_eq!(names(&pulses), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_others_is_not_stuck_however_long_it_takes() {
        let pulses = Pulses::new(LIMIT);
        let pulse = pulses.begin("claim");
        let looked = async {
            tokio::time::sleep(LIMIT * 10).await;
            names(&pulses)
        };
        assert_eq!(pulse.outside(looked).await, [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_will_never_end_is_found() {
        let pulses = Pulses::new(LIMIT);
        let pulse = pulses.begin("claim");
        let looked = async {
            tokio::time::sleep(LIMIT * 2).await;
            names(&pulses)
        };
        assert_eq!(pulse.outside_while(|| false, looked).await, ["claim"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_ended_or_was_dropped_or_began_again_is_not_waited_for() {
        let pulses = Pulses::new(LIMIT);
        let ended = pulses.begin("ended");
        ended.end();
        drop(pulses.begin("dropped"));
        let _dead = pulses.begin("again");
        tokio::time::advance(LIMIT * 2).await;
        let _alive = pulses.begin("again");
        assert_eq!(names(&pulses), [""; 0]);
    }
}
