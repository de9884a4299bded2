//! How many requests are under way at a time: one more for every round that went well, half as many when it was too much.
//!
//! A struggling service is so given room to recover, and found again by itself.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// A pause that a fiber waits for; for a longer one it gives back what it has.
const BRIEF: Duration = Duration::from_millis(100);

/// The requests of one handler.
#[derive(Clone, Debug)]
pub struct Limiter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    most: f64,
    state: Mutex<State>,
    /// A request ended, or the limit has risen.
    room: Notify,
}

#[derive(Debug)]
struct State {
    limit: f64,
    under_way: usize,
    lowered_at: Option<Instant>,
    paused_until: Option<Instant>,
}

/// A request under way. Dropped without a word (cancelled), it says nothing about the service.
#[derive(Debug)]
pub struct Permit {
    limiter: Limiter,
    since: Instant,
}

impl Limiter {
    pub fn new(name: &str, most: usize) -> Self {
        let most = most.max(1) as f64;
        let state = State { limit: most, under_way: 0, lowered_at: None, paused_until: None };
        Self(Arc::new(Inner { name: name.to_owned(), most, state: Mutex::new(state), room: Notify::new() }))
    }

    /// Waits until one more request is allowed. An error: the service wants to be left alone for so long, and no fiber waits
    /// for that.
    pub async fn acquire(&self) -> Result<Permit, Duration> {
        loop {
            // Asked for before the look, so that nothing that happens after the look is missed.
            let room = self.0.room.notified();
            let wait = match self.try_acquire() {
                Ok(permit) => return Ok(permit),
                Err(wait) => wait,
            };
            match wait {
                Some(pause) if pause > BRIEF => return Err(pause),
                Some(pause) => tokio::time::sleep(pause).await,
                None => room.await,
            }
        }
    }

    /// How long the service wants to be left alone.
    pub fn rest(&self) -> Option<Duration> {
        let rest = self.lock().paused_until?.checked_duration_since(Instant::now())?;
        (rest > BRIEF).then_some(rest)
    }

    /// What is allowed now.
    pub fn limit(&self) -> usize {
        self.lock().limit as usize
    }

    fn try_acquire(&self) -> Result<Permit, Option<Duration>> {
        let mut state = self.lock();
        let now = Instant::now();
        if let Some(until) = state.paused_until.filter(|until| *until > now) {
            return Err(Some(until - now));
        }
        if state.under_way >= state.limit as usize {
            return Err(None);
        }
        state.under_way += 1;
        Ok(Permit { limiter: self.clone(), since: now })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    pub fn went_well(self) {
        let mut state = self.limiter.lock();
        state.limit = (state.limit + 1.0 / state.limit).min(self.limiter.0.most);
    }

    /// The service could not cope. It is lowered once for all requests that were under way together.
    pub fn was_too_much(self, pause: Option<Duration>) {
        let mut state = self.limiter.lock();
        let now = Instant::now();
        if let Some(pause) = pause {
            state.paused_until = state.paused_until.max(Some(now + pause));
        }
        if state.lowered_at.is_some_and(|at| at > self.since) {
            return;
        }
        state.lowered_at = Some(now);
        state.limit = (state.limit / 2.0).max(1.0);
        tracing::info!(
            handler = self.limiter.0.name,
            limit = state.limit as u64,
            pause_ms = pause.map(|p| p.as_millis() as u64),
            "the service struggles; asking it less"
        );
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limiter.lock().under_way -= 1;
        // Everybody looks: the limit may have risen by more than the one place.
        self.limiter.0.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn the_limit_halves_once_a_round_and_grows_back_by_one_a_round() {
        let limiter = Limiter::new("h", 8);
        let round: Vec<Permit> =
            futures::future::join_all((0..8).map(|_| async { limiter.acquire().await.unwrap() })).await;
        assert!(limiter.acquire().now_or_never().is_none());
        round.into_iter().for_each(|permit| permit.was_too_much(None));
        assert_eq!(limiter.limit(), 4);
        for _ in 0..4 {
            limiter.acquire().await.unwrap().went_well();
        }
        assert_eq!(limiter.limit(), 4);
        limiter.acquire().await.unwrap().went_well();
        assert_eq!(limiter.limit(), 5);
        for _ in 0..1_000 {
            limiter.acquire().await.unwrap().went_well();
        }
        assert_eq!(limiter.limit(), 8);
    }

    #[tokio::test]
    async fn it_never_falls_below_one_and_a_cancelled_request_gives_its_place_back() {
        let limiter = Limiter::new("h", 4);
        for _ in 0..10 {
            limiter.acquire().await.unwrap().was_too_much(None);
        }
        assert_eq!(limiter.limit(), 1);
        drop(limiter.acquire().await.unwrap());
        let waiting = limiter.acquire().await.unwrap();
        assert!(limiter.acquire().now_or_never().is_none());
        drop(waiting);
        limiter.acquire().await.unwrap().was_too_much(Some(Duration::from_secs(60)));
        let pause = limiter.acquire().await.unwrap_err();
        assert!(
            pause > Duration::from_secs(50) && limiter.rest().is_some(),
            "a pause is kept, and not waited for"
        );
    }
}
