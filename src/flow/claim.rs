//! The dispatcher of one kind of a queue's work, its rows or its tasks: claims for idle fibers, and sleeps when there is
//! nothing. Both kinds of a queue share its fibers.

mod doubtful;
mod permits;
mod rows;
mod start;
mod tasks;

use super::{fiber::Bench, rivals::Rival, solo::Company};
use crate::{
    backoff,
    error_text::describe,
    failpoint,
    held::Holding,
    liveness::{identity::Identity, session::Session},
    metrics::Work,
    problems::Problems,
    pulse::Pulse,
    queue,
    store::query::QueryError,
};
use deadpool_postgres::Object;
use doubtful::Doubtful;
use permits::Stalled;
use serde::{Deserialize, Serialize};
use std::{
    fmt::Debug,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Semaphore, watch},
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

    /// Claims until the drain, then lets what is in hand come to its end; returns when asked to `stop`.
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
                    backoff::of_database(failures)
                }
            };
            // Until work is submitted, or it is time to look again.
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
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a fiber panicked; what it held is freed by the next reconciliation");
    }
}
