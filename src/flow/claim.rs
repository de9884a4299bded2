//! The dispatcher of one kind of a queue's work, its rows or its tasks: claims for idle fibers, and sleeps when there is
//! nothing. Both kinds of a queue share its fibers.

mod doubtful;
mod rows;
mod tasks;

use super::{
    fiber::Bench,
    held::{Held, Holding, Key},
    rivals::Rival,
    solo::Company,
};
use crate::{
    backoff,
    config::Problems,
    failpoint,
    liveness::{identity::Identity, session::Session},
    metrics::Work,
    periodic::describe,
    pulse::Pulse,
    queue,
    spans::{Moment, Span},
    store::{LONGEST_BACKOFF, query::QueryError},
};
use deadpool_postgres::Object;
use doubtful::Doubtful;
use serde::{Deserialize, Serialize};
use std::{
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::{JoinError, JoinSet},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// The `[claim]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Time between two looks for work when nothing wakes the worker.
    #[serde(with = "humantime_serde")]
    pub poll_interval: Duration,
    /// The time one block should take.
    #[serde(with = "humantime_serde")]
    pub target_block_time: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { poll_interval: Duration::from_secs(1), target_block_time: Duration::from_millis(500) }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            self.poll_interval >= Duration::from_millis(10),
            "claim.poll_interval",
            "must be at least 10ms: an idle worker would do nothing but ask",
        );
        problems.unless(!self.target_block_time.is_zero(), "claim.target_block_time", "must be above zero");
    }
}

/// Every so many claims priority does not count, so that nothing waits for ever.
const IGNORE_PRIORITY_EVERY: u64 = 16;

/// Where one kind of a queue's work is claimed.
#[derive(Clone, Debug)]
pub struct Desk {
    pub queue: String,
    pub settings: queue::Config,
    pub config: Config,
    /// The worker that claims; asked again for every claim.
    pub identity: Identity,
    pub bench: Arc<Bench>,
    /// The queue's idle fibers, shared with the other kind.
    pub idle: Arc<Semaphore>,
    /// The queue's other kind; wakes this one when there may be work.
    pub rival: Rival,
    /// Whether outcomes can be written.
    pub writable: watch::Receiver<bool>,
    /// Whether the worker hears of new work: then it looks less often for what it may have missed.
    pub session: Session,
    /// Claim nothing more. Comes before the stop of this stage, which waits for the stages before it.
    pub drain: CancellationToken,
    pub pulse: Pulse,
}

/// One of the two kinds of work that a queue has.
pub trait Claimed: Send + Sized + 'static {
    const WORK: Work;

    fn holding(&self) -> Holding;

    /// Seconds from being due to the claim, if that says anything.
    fn waited(&self) -> Option<f64>;

    /// Whether it is over so soon that it may wait for a fiber: then more of it is claimed while the fibers are busy.
    fn is_quick(&self, desk: &Desk) -> bool;

    /// Of one claim, at most; and as many may wait for a fiber.
    const AT_ONCE: usize;
    /// So many places to wait in are free before more is claimed ahead of the fibers.
    const REFILL: u32;
    /// How long one waits for a fiber before it is given back; `None`: as long as it takes.
    const KEPT: Option<Duration>;

    /// What a dispatcher remembers from one claim to the next.
    type Memory: Debug + Default + Send + Sync;

    /// Whether it may be claimed ahead of the fibers beside the other kind's work.
    fn goes_ahead(desk: &Desk) -> bool;

    /// Claims up to `count` and adds them to `claimed`, also those before an error.
    fn claim(
        turn: &mut Turn<'_>,
        memory: &mut Self::Memory,
        claimed: &mut Vec<Self>,
        count: usize,
    ) -> impl Future<Output = Result<(), QueryError>> + Send;

    /// Claims one that must run with nothing else in the process.
    fn claim_solo(
        turn: &mut Turn<'_>,
        claimed: &mut Vec<Self>,
    ) -> impl Future<Output = Result<(), QueryError>> + Send;

    /// Seconds until the next work of a queue is due that is not due now.
    fn next_due(client: &Object, queue: &str)
    -> impl Future<Output = Result<Option<f64>, QueryError>> + Send;

    /// Those that hold these tokens.
    fn find(client: &Object, tokens: &[Uuid]) -> impl Future<Output = Result<Vec<Self>, QueryError>> + Send;

    /// What one fiber runs, for each of the fibers: one, or several that their handler can take together. `idle`: the fibers that
    /// can start now.
    fn units(claimed: Vec<Self>, desk: &Desk, idle: usize) -> Vec<Vec<Self>>;

    /// Gives a unit back, not started.
    fn give_back(unit: Vec<Self>, bench: &Bench) -> impl Future<Output = ()> + Send;

    /// Runs a unit to its end.
    fn run(unit: Vec<Self>, bench: &Bench, company: Company) -> impl Future<Output = ()> + Send;
}

/// One claim under way.
#[derive(Debug)]
pub struct Turn<'a> {
    desk: &'a Desk,
    client: &'a Object,
    doubtful: &'a mut Doubtful,
    /// Sequence number of this claim within the dispatcher; every 16th ignores priority.
    number: u64,
    /// Leaves what is behind the other kind's work.
    deferring: bool,
    /// The idle fibers it claims for.
    idle: usize,
    /// There is work, and other claims have it locked at this moment.
    busy: bool,
}

impl Turn<'_> {
    fn ignores_priority(&self) -> bool {
        self.number.is_multiple_of(IGNORE_PRIORITY_EVERY)
    }

    /// Tokens for the next statement.
    fn announce(&self, count: usize) -> Vec<Uuid> {
        self.desk.bench.held.announce(count)
    }

    /// What a statement with these tokens came to.
    fn settle<W: Claimed>(
        &mut self,
        tokens: &[Uuid],
        claimed: Result<Vec<W>, QueryError>,
    ) -> Result<Vec<W>, QueryError> {
        match &claimed {
            Ok(claimed) => self.desk.bench.held.settle(tokens, claimed.iter().map(W::holding)),
            // It may have been committed without our knowing: the tokens stay announced.
            Err(_) => self.doubtful.add(tokens),
        }
        claimed
    }
}

/// What a look for work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looked {
    Claimed,
    Nothing,
    /// Nothing that no other claim had locked at that moment.
    Busy,
}

/// When work that waited for a fiber was last given back because no fiber became idle.
#[derive(Clone, Debug, Default)]
struct Stalled(Arc<Mutex<Option<Instant>>>);

impl Stalled {
    /// So long nothing is claimed ahead of the fibers.
    const FOR: Duration = Duration::from_secs(1);

    fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|since| since.elapsed() < Self::FOR)
    }
}

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

/// What something is claimed for.
#[derive(Debug)]
enum Permit {
    /// An idle fiber.
    Fiber(OwnedSemaphorePermit),
    /// A place to wait for one.
    Ahead(OwnedSemaphorePermit),
}

impl Permit {
    /// With a place for each of the others that one fiber runs together with the first; an idle fiber needs none.
    fn with_places(mut self, others: usize, permits: &mut Vec<Self>) -> Self {
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

/// Claims one kind of work for one queue and runs what it claims.
#[derive(Debug)]
pub struct Dispatcher<W: Claimed> {
    desk: Desk,
    fibers: JoinSet<()>,
    claims: u64,
    doubtful: Doubtful,
    /// When to look for solitary work again.
    next_solo_look: Instant,
    /// What the last claim brought is over soon.
    quick: bool,
    /// Places for quick work that waits for a fiber.
    ahead: Arc<Semaphore>,
    stalled: Stalled,
    memory: W::Memory,
}

/// When looks that found nothing follow each other, there is this long between two of them: a producer that enqueues one task after
/// another wakes both kinds of its queue each time.
const BETWEEN_EMPTY_LOOKS: Duration = Duration::from_millis(10);
/// Looks in a row that may find nothing before that.
const EMPTY_LOOKS: u32 = 20;
/// The longest time between two looks of an idle worker that hears of new work.
const LONGEST_IDLE_PAUSE: Duration = Duration::from_secs(60);
/// Until the next look when other claims had everything locked.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

impl<W: Claimed> Dispatcher<W> {
    pub fn new(desk: Desk) -> Self {
        Self {
            desk,
            fibers: JoinSet::new(),
            claims: 0,
            doubtful: Doubtful::default(),
            next_solo_look: Instant::now(),
            quick: false,
            ahead: Arc::new(Semaphore::new(W::AT_ONCE)),
            stalled: Stalled::default(),
            memory: W::Memory::default(),
        }
    }

    /// Claims until the drain, then lets what is in hand come to its end; returns when told to `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let drain = self.desk.drain.clone();
        self.dispatch(&drain).await;
        // From here on the drain has its own limit.
        self.desk.pulse.end();
        self.adopt_last().await;
        while let Some(ended) = self.fibers.join_next().await {
            report(ended);
        }
        stop.cancelled().await;
    }

    async fn dispatch(&mut self, stop: &CancellationToken) {
        let (mut failures, mut empty_looks, mut idle_looks) = (0, 0, 0);
        let pulse = self.desk.pulse.clone();
        while !stop.is_cancelled() {
            pulse.turn();
            match W::WORK {
                Work::Rows => {
                    failpoint!("claim.turn");
                }
                Work::Tasks => {
                    failpoint!("tasks.turn");
                }
            }
            let began = Instant::now();
            let pause = match self.round(stop).await {
                Ok(Looked::Claimed) => {
                    (failures, empty_looks, idle_looks) = (0, 0, 0);
                    continue;
                }
                Ok(Looked::Busy) => {
                    failures = 0;
                    empty_looks += 1;
                    BUSY_PAUSE
                }
                Ok(Looked::Nothing) => {
                    failures = 0;
                    empty_looks += 1;
                    idle_looks += 1;
                    self.idle_pause(idle_looks).await
                }
                Err(error) => {
                    failures += 1;
                    if failures == 1 {
                        let (queue, work) = (&self.desk.queue, W::WORK.as_str());
                        tracing::warn!(queue, work, error = describe(&error), "cannot claim; trying again");
                    }
                    backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, failures)
                }
            };
            // Until somebody submits, or it is time to look again.
            let woken = tokio::time::timeout(pause, self.desk.rival.woken());
            match stop.run_until_cancelled(pulse.outside(woken)).await {
                None => return,
                Some(Ok(())) => idle_looks = 0,
                Some(Err(_)) => empty_looks = 0,
            }
            if empty_looks >= EMPTY_LOOKS {
                let rest = BETWEEN_EMPTY_LOOKS.saturating_sub(began.elapsed());
                stop.run_until_cancelled(pulse.outside(tokio::time::sleep(rest))).await;
            }
        }
    }

    /// Until the next look when nothing wakes the worker. One that has nothing in hand and hears of new work looks less and less often, but
    /// not later than when something is due. What it has in hand may keep it from other work (one suspect at a time), and no
    /// notification says when that is over.
    async fn idle_pause(&self, looks: u32) -> Duration {
        let poll = self.desk.config.poll_interval;
        let hears = self.desk.session.has_stood_for(Duration::ZERO);
        if looks < 3 || !hears || self.desk.bench.held.oldest().is_some() {
            return poll;
        }
        let pause = poll.saturating_mul(1 << (looks - 2).min(6)).min(LONGEST_IDLE_PAUSE).max(poll);
        // What waits for a handler that rests is due already, and no due time says when to look.
        let pause = self.desk.bench.handlers.shortest_rest().map_or(pause, |rest| pause.min(rest));
        let due = async {
            let client = self.desk.bench.store.claims.get().await?;
            W::next_due(&client, &self.desk.queue).await
        };
        match self.desk.pulse.outside(due).await {
            Ok(Some(seconds)) => pause.min(Duration::try_from_secs_f64(seconds.max(0.001)).unwrap_or(pause)),
            Ok(None) => pause,
            Err(_) => poll,
        }
    }

    /// One look for work.
    async fn round(&mut self, stop: &CancellationToken) -> Result<Looked, QueryError> {
        while let Some(ended) = self.fibers.try_join_next() {
            report(ended);
        }
        let pulse = self.desk.pulse.clone();
        // Waiting for a fiber may be cut short; a claim that has begun is finished, for what it claimed must be started.
        let Some((permits, company)) = stop.run_until_cancelled(self.idle_fibers()).await else {
            return Ok(Looked::Nothing);
        };
        failpoint!("claim.fibers");
        // The last fibers may have become idle because of the stop.
        if stop.is_cancelled() {
            return Ok(Looked::Nothing);
        }
        pulse.outside(self.claim_for(permits, company)).await
    }

    /// Waits until a fiber is idle, outcomes can be written, the lease is valid and no suspect is to be alone; takes as many
    /// idle fibers as there are. Quick work is claimed ahead of them, so that the claim of the next blocks and the run of the
    /// last ones overlap.
    async fn idle_fibers(&self) -> (Vec<Permit>, Company) {
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

    /// Claims for every permit and starts what came.
    async fn claim_for(&mut self, mut permits: Vec<Permit>, company: Company) -> Result<Looked, QueryError> {
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

    fn start(&mut self, unit: Vec<W>, permit: Option<Permit>, company: Company) {
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

    /// What a claim whose reply was lost has claimed is ours all the same.
    async fn adopt(&mut self, client: &Object) -> Result<Vec<W>, QueryError> {
        if self.doubtful.is_empty() {
            return Ok(Vec::new());
        }
        let found = W::find(client, &self.doubtful.tokens()).await?;
        let held = &self.desk.bench.held;
        held.settle(&[], found.iter().map(W::holding));
        let is_found = |token| found.iter().any(|one| one.holding().token() == token);
        self.doubtful.settle(is_found).into_iter().for_each(|token| held.forget(token));
        if !found.is_empty() {
            let (queue, work) = (&self.desk.queue, W::WORK.as_str());
            tracing::info!(
                queue,
                work,
                count = found.len(),
                "adopted the work of a claim whose reply was lost"
            );
        }
        Ok(found)
    }

    /// Before the end: the work of claims whose reply was lost must not stay behind, owned by nobody's hand.
    async fn adopt_last(&mut self) {
        if self.doubtful.is_empty() {
            return;
        }
        let company = self.desk.bench.room.enter().await;
        let adopted = match self.desk.bench.store.claims.get().await {
            Ok(client) => self.adopt(&client).await,
            Err(error) => Err(error.into()),
        };
        match adopted {
            Ok(found) => found.into_iter().for_each(|one| self.start(vec![one], None, company.clone())),
            Err(error) => tracing::warn!(error = describe(&error), "lost claims are left to the recovery"),
        }
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

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a fiber panicked; what it held is freed by the next reconciliation");
    }
}
