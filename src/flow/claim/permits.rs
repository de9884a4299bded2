//! Permits: what something is claimed for, an idle fiber or a place to wait for one.

use super::{Claimed, Desk, Dispatcher};
use crate::flow::solo::Company;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::OwnedSemaphorePermit;

/// What something is claimed for.
#[derive(Debug)]
pub(super) enum Permit {
    /// An idle fiber.
    Fiber(OwnedSemaphorePermit),
    /// A place to wait for one.
    Ahead(OwnedSemaphorePermit),
}

impl Permit {
    /// With a place for each of the others that one fiber runs together with the first; an idle fiber needs none.
    pub(super) fn with_places(mut self, others: usize, permits: &mut Vec<Self>) -> Self {
        if let Self::Ahead(places) = &mut self {
            // The fibers were given out before the places.
            for more in permits.drain(permits.len().saturating_sub(others)..) {
                if let Self::Ahead(more) = more {
                    places.merge(more);
                }
            }
        }
        self
    }
}
/// A permit for several places as several for one.
fn single(permit: Permit) -> impl Iterator<Item = Permit> {
    let mut rest = Some(permit);
    std::iter::from_fn(move || match rest.take()? {
        Permit::Ahead(mut places) => match places.split(1) {
            Some(one) if places.num_permits() > 0 => {
                rest = Some(Permit::Ahead(places));
                Some(Permit::Ahead(one))
            }
            one => one.map(Permit::Ahead),
        },
        fiber => Some(fiber),
    })
}
/// When work that waited for a fiber was last given back because no fiber became idle.
#[derive(Clone, Debug, Default)]
pub(super) struct Stalled(Arc<Mutex<Option<Instant>>>);

impl Stalled {
    /// So long nothing is claimed ahead of the fibers.
    const FOR: Duration = Duration::from_secs(1);

    pub(super) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|since| since.elapsed() < Self::FOR)
    }
}
impl<W: Claimed> Dispatcher<W> {
    /// Waits until a fiber is idle, outcomes can be written, the lease is valid and no suspect is to be alone; takes as many
    /// idle fibers as there are. Quick work is claimed ahead of them, so that the claim of the next blocks and the run of the
    /// last ones overlap.
    pub(super) async fn idle_fibers(&self) -> (Vec<Permit>, Company) {
        let Desk { pulse, bench, .. } = &self.desk;
        // The gate's other end lives in the batcher; without it there is nothing to claim for.
        let mut gate = self.desk.writable.clone();
        let shut = || !*self.desk.writable.borrow();
        if pulse.outside_while(shut, gate.wait_for(|open| *open)).await.is_err() {
            std::future::pending::<()>().await;
        }
        let Desk { idle, .. } = &self.desk;
        // Not beside work of the other kind, which may have the better priority and would find the fibers taken.
        let ahead =
            (self.quick && !self.stalled.is_set() && W::goes_ahead(&self.desk)).then_some(&self.ahead);
        let refill = W::REFILL as usize;
        let all_busy =
            || idle.available_permits() == 0 && ahead.is_none_or(|ahead| ahead.available_permits() < refill);
        let first = async {
            tokio::select! {
                biased;
                fiber = Arc::clone(idle).acquire_owned() => fiber.map(Permit::Fiber),
                places = Arc::clone(&self.ahead).acquire_many_owned(W::REFILL), if ahead.is_some() => places.map(Permit::Ahead),
            }
        };
        let Ok(first) = pulse.outside_while(all_busy, first).await else {
            return std::future::pending().await;
        };
        let more = || match Arc::clone(idle).try_acquire_owned() {
            Ok(fiber) => Some(Permit::Fiber(fiber)),
            Err(_) => Arc::clone(ahead?).try_acquire_owned().ok().map(Permit::Ahead),
        };
        let permits = single(first).chain(std::iter::from_fn(more)).take(W::AT_ONCE).collect();
        let company = pulse.outside(bench.room.enter()).await;
        pulse.outside_while(|| !bench.lease.is_valid(), bench.lease.valid()).await;
        (permits, company)
    }
}
