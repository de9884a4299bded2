//! The dispatcher of one kind of a queue's work, its rows or its tasks: claims for idle fibers, and sleeps when there is
//! nothing. Both kinds of a queue share its fibers.

mod doubtful;
mod rows;
mod tasks;

use super::{fiber::Bench, held::Holding, rivals::Rival, solo::Company};
use crate::{
    backoff,
    config::Problems,
    failpoint,
    liveness::identity::Identity,
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
    sync::Arc,
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

/// Blocks or tasks of one claim, at most.
const AT_ONCE: usize = 8;
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

    /// Whether there may be something, before a fiber is taken away from the other kind.
    fn is_due(desk: &Desk) -> impl Future<Output = Result<bool, QueryError>> + Send;

    /// Claims up to `count` and adds them to `claimed`, also those before an error.
    fn claim(
        turn: &mut Turn<'_>,
        claimed: &mut Vec<Self>,
        count: usize,
    ) -> impl Future<Output = Result<(), QueryError>> + Send;

    /// Claims one that must run with nothing else in the process.
    fn claim_solo(
        turn: &mut Turn<'_>,
        claimed: &mut Vec<Self>,
    ) -> impl Future<Output = Result<(), QueryError>> + Send;

    /// Those that hold these tokens.
    fn find(client: &Object, tokens: &[Uuid]) -> impl Future<Output = Result<Vec<Self>, QueryError>> + Send;

    /// Runs it to its end.
    fn run(self, bench: &Bench, company: Company) -> impl Future<Output = ()> + Send;
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

/// What something is claimed for.
#[derive(Debug)]
enum Permit {
    /// An idle fiber.
    Fiber(OwnedSemaphorePermit),
    /// A place to wait for one.
    Ahead(OwnedSemaphorePermit),
}

/// Claims one kind of work for one queue and runs what it claims.
#[derive(Debug)]
pub struct Dispatcher<W> {
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
    work: std::marker::PhantomData<fn() -> W>,
}

impl<W: Claimed> Dispatcher<W> {
    pub fn new(desk: Desk) -> Self {
        Self {
            desk,
            fibers: JoinSet::new(),
            claims: 0,
            doubtful: Doubtful::default(),
            next_solo_look: Instant::now(),
            quick: false,
            ahead: Arc::new(Semaphore::new(AT_ONCE)),
            work: std::marker::PhantomData,
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
        let mut failures = 0;
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
            let pause = match self.round(stop).await {
                Ok(0) => {
                    failures = 0;
                    self.desk.config.poll_interval
                }
                Ok(_) => {
                    failures = 0;
                    continue;
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
            if stop.run_until_cancelled(pulse.outside(woken)).await.is_none() {
                return;
            }
        }
    }

    /// One look for work. Returns how much was claimed.
    async fn round(&mut self, stop: &CancellationToken) -> Result<usize, QueryError> {
        while let Some(ended) = self.fibers.try_join_next() {
            report(ended);
        }
        let pulse = self.desk.pulse.clone();
        if self.doubtful.is_empty() && !pulse.outside(W::is_due(&self.desk)).await? {
            self.desk.rival.claimed(0, false);
            return Ok(0);
        }
        // Waiting for a fiber may be cut short; a claim that has begun is finished, for what it claimed must be started.
        let Some((permits, company)) = stop.run_until_cancelled(self.idle_fibers()).await else {
            return Ok(0);
        };
        failpoint!("claim.fibers");
        // The last fibers may have become idle because of the stop.
        if stop.is_cancelled() {
            return Ok(0);
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
        let ahead = (self.quick && !self.desk.rival.defers()).then_some(&self.ahead);
        let all_busy =
            || idle.available_permits() == 0 && ahead.is_none_or(|ahead| ahead.available_permits() == 0);
        let first = async {
            tokio::select! {
                biased;
                fiber = Arc::clone(idle).acquire_owned() => fiber.map(Permit::Fiber),
                place = Arc::clone(&self.ahead).acquire_owned(), if ahead.is_some() => place.map(Permit::Ahead),
            }
        };
        let Ok(first) = pulse.outside_while(all_busy, first).await else {
            return std::future::pending().await;
        };
        let more = || match Arc::clone(idle).try_acquire_owned() {
            Ok(fiber) => Some(Permit::Fiber(fiber)),
            Err(_) => Arc::clone(ahead?).try_acquire_owned().ok().map(Permit::Ahead),
        };
        let permits = std::iter::once(first).chain(std::iter::from_fn(more)).take(AT_ONCE).collect();
        let company = pulse.outside(bench.room.enter()).await;
        pulse.outside_while(|| !bench.lease.is_valid(), bench.lease.valid()).await;
        (permits, company)
    }

    /// Claims for every permit and starts what came. Returns how much.
    async fn claim_for(&mut self, mut permits: Vec<Permit>, company: Company) -> Result<usize, QueryError> {
        let (began, moment) = (Instant::now(), Moment::now());
        let client = self.desk.bench.store.claims.get().await?;
        let mut claimed = Vec::new();
        if let Err(error) = self.claim_into(&mut claimed, &client, permits.len()).await {
            // The session may be in any state, or lead to a server that is read-only now; a new one is cheap.
            drop(Object::take(client));
            if claimed.is_empty() {
                return Err(error);
            }
            // What was claimed before the error is ours, and nobody else would run it. The error will come again.
        }
        self.tell(&claimed, began, moment);
        let count = claimed.len();
        self.quick = count > 0 && claimed.iter().all(|one| one.is_quick(&self.desk));
        // The idle fibers first.
        permits.sort_by_key(|permit| matches!(permit, Permit::Fiber(_)));
        for one in claimed {
            self.start(one, permits.pop(), company.clone());
        }
        Ok(count)
    }

    async fn claim_into(
        &mut self,
        claimed: &mut Vec<W>,
        client: &Object,
        count: usize,
    ) -> Result<(), QueryError> {
        claimed.extend(self.adopt(client).await?);
        if claimed.len() >= count {
            return Ok(());
        }
        self.claims += 1;
        let mut turn = Turn {
            desk: &self.desk,
            client,
            doubtful: &mut self.doubtful,
            number: self.claims,
            deferring: false,
        };
        // Solitary work is rare: looked for now and then, and not behind everything else, or a busy worker never would. A
        // look that fails must not keep the others from being claimed.
        let solo = if self.next_solo_look <= Instant::now() {
            self.next_solo_look = Instant::now() + turn.desk.config.poll_interval;
            W::claim_solo(&mut turn, claimed).await
        } else {
            Ok(())
        };
        turn.deferring = !turn.ignores_priority() && turn.desk.rival.defers();
        let missing = count.saturating_sub(claimed.len());
        if missing > 0 {
            W::claim(&mut turn, claimed, missing).await?;
        }
        turn.desk.rival.claimed(claimed.len(), turn.deferring);
        solo
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

    fn start(&mut self, one: W, permit: Option<Permit>, company: Company) {
        let (bench, idle) = (Arc::clone(&self.desk.bench), Arc::clone(&self.desk.idle));
        self.fibers.spawn(async move {
            let fiber = match permit {
                Some(Permit::Ahead(place)) => {
                    // Refused only when the queue is gone, and the process with it.
                    let fiber = idle.acquire_owned().await.ok();
                    drop(place);
                    fiber
                }
                Some(Permit::Fiber(fiber)) => Some(fiber),
                None => None,
            };
            one.run(&bench, company).await;
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
            Ok(found) => found.into_iter().for_each(|one| self.start(one, None, company.clone())),
            Err(error) => tracing::warn!(error = describe(&error), "lost claims are left to the recovery"),
        }
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a fiber panicked; what it held will be recovered");
    }
}
