//! One claim: for the permits that there are, and the start of what it brought.

use super::{Claimed, Dispatcher, Looked, Turn, permits::Permit};
use crate::{
    failpoint,
    flow::solo::Company,
    held::{Held, Key},
    spans::{Moment, Span},
    store::query::QueryError,
};
use deadpool_postgres::Object;
use std::{sync::Arc, time::Instant};

/// Forgets what a fiber holds when the fiber panics: the reconciliation then frees it.
struct ForgetOnPanic {
    held: Held,
    keys: Vec<Key>,
}

impl Drop for ForgetOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.keys.iter().for_each(|key| self.held.forget(*key));
        }
    }
}
impl<W: Claimed> Dispatcher<W> {
    /// Claims for every permit and starts what came.
    pub(super) async fn claim_for(
        &mut self,
        mut permits: Vec<Permit>,
        company: Company,
    ) -> Result<Looked, QueryError> {
        let (began, moment) = (Instant::now(), Moment::now());
        let client = self.desk.bench.store.claims.get().await?;
        let mut claimed = Vec::new();
        let busy = match self.claim_into(&mut claimed, &client, &permits).await {
            Ok(busy) => busy,
            Err(error) => {
                // The session may be in any state, or lead to a server that is read-only now; a new one is cheap.
                drop(Object::take(client));
                if claimed.is_empty() {
                    return Err(error);
                }
                // What was claimed before the error is ours, and no other worker would run it. The error will come again.
                false
            }
        };
        self.tell(&claimed, began, moment);
        let count = claimed.len();
        self.quick = count > 0 && claimed.iter().all(|one| one.is_quick(&self.desk));
        // The idle fibers first.
        permits.sort_by_key(|permit| matches!(permit, Permit::Fiber(_)));
        let idle = permits.iter().filter(|permit| matches!(permit, Permit::Fiber(_))).count();
        for unit in W::units(claimed, &self.desk, idle) {
            let permit = permits.pop().map(|permit| permit.with_places(unit.len() - 1, &mut permits));
            self.start(unit, permit, company.clone());
        }
        Ok(match (count, busy) {
            (0, false) => Looked::Nothing,
            (0, true) => Looked::Busy,
            _ => Looked::Claimed,
        })
    }

    /// Whether there was more that other claims had locked.
    async fn claim_into(
        &mut self,
        claimed: &mut Vec<W>,
        client: &Object,
        permits: &[Permit],
    ) -> Result<bool, QueryError> {
        claimed.extend(self.adopt(client).await?);
        let count = permits.len();
        if claimed.len() >= count {
            return Ok(false);
        }
        self.claims += 1;
        let mut turn = Turn {
            desk: &self.desk,
            client,
            doubtful: &mut self.doubtful,
            number: self.claims,
            deferring: false,
            idle: permits.iter().filter(|permit| matches!(permit, Permit::Fiber(_))).count(),
            busy: false,
        };
        // Solitary work is rare: looked for now and then, and not behind everything else, or a busy worker never would. A
        // look that fails must not keep the others from being claimed.
        let solo = if self.next_solo_look <= Instant::now() && turn.desk.bench.takes_solo() {
            self.next_solo_look = Instant::now() + turn.desk.config.poll_interval;
            W::claim_solo(&mut turn, claimed).await
        } else {
            Ok(())
        };
        // What is claimed ahead of the fibers must not be behind the other kind, whatever that found when it last looked.
        turn.deferring = !turn.ignores_priority() && (turn.desk.rival.defers() || turn.idle < count);
        let missing = count.saturating_sub(claimed.len());
        if missing > 0 {
            W::claim(&mut turn, &mut self.memory, claimed, missing).await?;
        }
        turn.desk.rival.claimed(claimed.len(), turn.deferring);
        solo.map(|()| turn.busy)
    }

    fn tell(&self, claimed: &[W], began: Instant, moment: Moment) {
        let (walk, queue) = (&self.desk.bench.metrics.walk, &self.desk.queue);
        walk.claimed(queue, W::WORK, began.elapsed());
        claimed.iter().filter_map(W::waited).for_each(|waited| walk.picked_up(queue, W::WORK, waited));
        if !claimed.is_empty() {
            let span = Span::since("claim", None, moment).name("queue", queue);
            span.number(W::WORK.as_str(), claimed.len() as i64).end();
        }
    }

    pub(super) fn start(&mut self, unit: Vec<W>, permit: Option<Permit>, company: Company) {
        let (bench, idle) = (Arc::clone(&self.desk.bench), Arc::clone(&self.desk.idle));
        let (drain, stalled) = (self.desk.drain.clone(), self.stalled.clone());
        self.fibers.spawn(async move {
            let keys = unit.iter().map(|one| one.holding().key()).collect();
            let guard = ForgetOnPanic { held: bench.held.clone(), keys };
            let fiber = match permit {
                Some(Permit::Ahead(place)) => {
                    // Refused only when the queue is gone, and the process with it.
                    let fiber = async { idle.acquire_owned().await.ok() };
                    let fiber = match W::KEPT {
                        None => fiber.await,
                        Some(kept) => tokio::select! {
                            biased;
                            fiber = fiber => fiber,
                            // Another replica can run it now.
                            () = drain.cancelled() => return W::give_back(unit, &bench).await,
                            () = tokio::time::sleep(kept) => {
                                stalled.set();
                                return W::give_back(unit, &bench).await;
                            }
                        },
                    };
                    drop(place);
                    fiber
                }
                Some(Permit::Fiber(fiber)) => Some(fiber),
                None => None,
            };
            failpoint!("fiber.start");
            guard.held.start(&guard.keys);
            W::run(unit, &bench, company).await;
            drop(fiber);
        });
    }
}
