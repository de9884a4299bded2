//! Company and solitude: a block that some process died with runs when nothing else does.
//!
//! Every other block, and every claim, keeps [`Company`] for as long as it lasts. A solitary block waits until the last
//! of them is gone, and while it waits or runs nothing new starts. It waits with patience only: what is at work may take
//! hours, and neither the other work of this process nor the solitary block, which another replica could run, waits for that.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// How long the first solitary block waits for the others; each that waited in vain doubles it.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);
/// Work that takes longer than this is never waited for.
const LONGEST_PATIENCE: Duration = Duration::from_secs(64);
/// After a wait in vain no other begins for so many times its length: waiting costs at most a tenth of the process's time.
const REST: u32 = 9;

/// Shared by all queues of a worker: they are one process.
#[derive(Clone, Debug, Default)]
pub struct Room {
    door: Arc<RwLock<()>>,
    waits: Arc<Mutex<Waits>>,
    /// Who is alone.
    alone: Arc<Mutex<Weak<Mutex<Right>>>>,
}

/// How the last waits for solitude went.
#[derive(Debug, Default)]
struct Waits {
    in_vain: u32,
    not_before: Option<Instant>,
}

impl Waits {
    fn patience(&self) -> Duration {
        (FIRST_PATIENCE * (1 << self.in_vain.min(16))).min(LONGEST_PATIENCE)
    }
}

/// The right to be at work beside others. One claim and the blocks it brings share one: a second could not be had
/// while a solitary block waits.
#[derive(Clone, Debug)]
pub struct Company(#[expect(dead_code, reason = "it is held, not read")] Arc<OwnedRwLockReadGuard<()>>);

/// The right to be at work alone, until it is dropped or [`Room::let_others_in`] makes company of it.
#[derive(Debug)]
pub struct Solitude(#[expect(dead_code, reason = "it is held, not read")] Arc<Mutex<Right>>);

#[derive(Debug)]
enum Right {
    Alone(OwnedRwLockWriteGuard<()>),
    Beside(#[expect(dead_code, reason = "it is held, not read")] OwnedRwLockReadGuard<()>),
    /// Between the two.
    Changing,
}

impl Room {
    pub async fn enter(&self) -> Company {
        Company(Arc::new(Arc::clone(&self.door).read_owned().await))
    }

    /// Whether solitary work may be claimed: nothing is in hand, or what is in hand, the oldest for `oldest`, may be over soon and
    /// the last wait in vain was long enough ago.
    pub fn may_wait(&self, oldest: Option<Duration>) -> bool {
        let Some(oldest) = oldest else { return true };
        oldest < LONGEST_PATIENCE && lock(&self.waits).not_before.is_none_or(|then| then <= Instant::now())
    }

    /// Alone, when the others are gone and `settled`, what they did is written; `None` when patience ended first.
    pub async fn alone(&self, settled: impl Future<Output = ()>) -> Option<Solitude> {
        let patience = lock(&self.waits).patience();
        let alone = async {
            let solitude = Arc::clone(&self.door).write_owned().await;
            settled.await;
            Arc::new(Mutex::new(Right::Alone(solitude)))
        };
        let solitude = tokio::time::timeout(patience, alone).await.ok();
        if let Some(solitude) = &solitude {
            *lock(&self.alone) = Arc::downgrade(solitude);
        }
        let solitude = solitude.map(Solitude);
        let mut waits = lock(&self.waits);
        match solitude {
            Some(_) => *waits = Waits::default(),
            None => {
                waits.in_vain += 1;
                waits.not_before = Some(Instant::now() + patience * REST);
            }
        }
        solitude
    }

    /// Lets others in beside what is alone: it was given up, and blocks its thread for an unknown time. Nothing else can be alone
    /// beside it.
    pub fn let_others_in(&self) {
        let Some(alone) = lock(&self.alone).upgrade() else { return };
        let mut right = lock(&alone);
        *right = match std::mem::replace(&mut *right, Right::Changing) {
            Right::Alone(guard) => Right::Beside(guard.downgrade()),
            right => right,
        };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::future::ready;

    #[tokio::test]
    async fn a_solitary_block_waits_for_the_others_and_keeps_new_ones_out() {
        let room = Room::default();
        let company = room.enter().await;
        let shared = company.clone();
        let mut alone = Box::pin(room.alone(ready(())));
        assert!((&mut alone).now_or_never().is_none());
        assert!(room.enter().now_or_never().is_none(), "came in beside one that waits to be alone");
        drop(company);
        assert!((&mut alone).now_or_never().is_none(), "a block of the same claim is still at work");
        drop(shared);
        let solitude = alone.await;
        assert!(solitude.is_some());
        assert!(room.enter().now_or_never().is_none());
        drop(solitude);
        room.enter().await;
    }

    #[tokio::test]
    async fn one_that_is_given_up_lets_others_in_and_nothing_else_be_alone() {
        let room = Room::default();
        room.let_others_in();
        let blocked = room.alone(ready(())).await;
        room.let_others_in();
        room.let_others_in();
        drop(room.enter().now_or_never().expect("others come in"));
        let mut next = Box::pin(room.alone(ready(())));
        assert!((&mut next).now_or_never().is_none(), "alone beside one that blocks its thread");
        drop(blocked);
        let next = next.await;
        assert!(next.is_some() && room.enter().now_or_never().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn patience_ends_grows_and_rests_between_two_waits() {
        let room = Room::default();
        let company = room.enter().await;
        for seconds in [2, 4, 8, 16, 32, 64, 64] {
            let began = tokio::time::Instant::now();
            assert!(room.alone(ready(())).await.is_none());
            assert_eq!(began.elapsed().as_secs(), seconds);
            room.enter().now_or_never().expect("others come in after a wait in vain");
            assert!(!room.may_wait(Some(Duration::ZERO)), "no rest after a wait in vain");
            assert!(room.may_wait(None), "nothing is in hand");
        }
        drop(company);
        assert!(room.alone(ready(())).await.is_some());
        assert!(room.may_wait(Some(Duration::ZERO)));
        assert!(!room.may_wait(Some(LONGEST_PATIENCE)), "waits for what may take hours");
    }
}
