//! The dispatcher of one queue: claims blocks for its idle fibers, and sleeps when there is nothing.

use super::{fiber::Bench, held::Held, rivals::Rival, solo::Company};
use crate::{
    backoff,
    config::Problems,
    failpoint,
    handler::Intake,
    liveness::identity::Identity,
    metrics::Work,
    periodic::describe,
    pulse::Pulse,
    queue::{self, Mode},
    spans::{Moment, Span},
    store::{
        LONGEST_BACKOFF,
        blocks::{self, Block, BlockError, Priorities, Size, Wanted},
        tasks::{self, Scope},
    },
};
use serde::{Deserialize, Serialize};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
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

/// Blocks of one claim, at most.
const AT_ONCE: usize = 8;
/// Every so many claims priority does not count, so that nothing waits for ever.
const IGNORE_PRIORITY_EVERY: u64 = 16;
/// A claim whose reply was lost may still be under way; after this long it is not.
const DOUBTFUL_FOR: Duration = Duration::from_secs(60);

/// Claims for one queue and runs what it claims.
#[derive(Debug)]
pub struct Dispatcher {
    pub queue: String,
    pub settings: queue::Config,
    pub config: Config,
    /// Who claims; asked anew for every claim.
    pub identity: Identity,
    pub bench: Arc<Bench>,
    /// The queue's idle fibers, shared with its tasks.
    pub idle: Arc<Semaphore>,
    /// The queue's tasks; wakes this side when somebody submitted.
    pub rival: Rival,
    /// Whether outcomes can be written.
    pub writable: watch::Receiver<bool>,
    /// Claim nothing more. Comes before the stop of this stage, which waits for the stages before it.
    pub drain: CancellationToken,
    pub pulse: Pulse,
}

/// The state of a running dispatcher.
struct Running {
    dispatcher: Dispatcher,
    idle: Arc<Semaphore>,
    fibers: JoinSet<()>,
    claims: u64,
    /// Tokens sent with claims whose reply never came.
    doubtful: Vec<(Uuid, Instant)>,
    /// When to look for a solitary block again.
    next_solo_look: Instant,
}

impl Dispatcher {
    /// Claims until the drain, then lets the blocks in hand come to their end; returns when told to `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let (drain, idle) = (self.drain.clone(), Arc::clone(&self.idle));
        let mut running = Running {
            dispatcher: self,
            idle,
            fibers: JoinSet::new(),
            claims: 0,
            doubtful: Vec::new(),
            next_solo_look: Instant::now(),
        };
        running.dispatch(&drain).await;
        // From here on the drain has its own limit.
        running.dispatcher.pulse.end();
        running.adopt_last().await;
        while let Some(ended) = running.fibers.join_next().await {
            report(ended);
        }
        stop.cancelled().await;
    }
}

impl Running {
    /// A claim that has begun is finished: what it claimed must be started or given back.
    async fn dispatch(&mut self, stop: &CancellationToken) {
        let mut failures = 0;
        let pulse = self.dispatcher.pulse.clone();
        while let Some((permits, company)) = stop.run_until_cancelled(self.idle_fibers()).await {
            failpoint!("claim.fibers");
            if stop.is_cancelled() {
                // The last fibers became idle because of it.
                return;
            }
            pulse.turn();
            failpoint!("claim.turn");
            let pause = match pulse.outside(self.claim_for(permits, company)).await {
                Ok(claimed) => {
                    failures = 0;
                    if claimed > 0 {
                        continue;
                    }
                    self.dispatcher.config.poll_interval
                }
                Err(error) => {
                    failures += 1;
                    if failures == 1 {
                        let queue = &self.dispatcher.queue;
                        tracing::warn!(queue, error = describe(&error), "cannot claim; trying again");
                    }
                    backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, failures)
                }
            };
            // Until somebody submits, or it is time to look again.
            let woken = tokio::time::timeout(pause, self.dispatcher.rival.woken());
            if stop.run_until_cancelled(pulse.outside(woken)).await.is_none() {
                return;
            }
        }
    }

    /// Before the end: blocks of claims whose reply was lost must not stay behind, owned by nobody's hand.
    async fn adopt_last(&mut self) {
        if self.doubtful.is_empty() {
            return;
        }
        let held = self.dispatcher.bench.held.clone();
        let company = self.dispatcher.bench.room.enter().await;
        let adopted = match self.dispatcher.bench.store.claims.get().await {
            Ok(client) => self.adopt(&client, &held).await,
            Err(error) => Err(error.into()),
        };
        match adopted {
            Ok(blocks) => blocks.into_iter().for_each(|block| self.start(block, None, company.clone())),
            Err(error) => tracing::warn!(error = describe(&error), "lost claims are left to the recovery"),
        }
    }

    /// Waits until a fiber is idle, outcomes can be written, the lease is valid and nobody is to be alone; takes as many
    /// idle fibers as there are.
    async fn idle_fibers(&mut self) -> (Vec<OwnedSemaphorePermit>, Company) {
        while let Some(ended) = self.fibers.try_join_next() {
            report(ended);
        }
        let pulse = self.dispatcher.pulse.clone();
        // The gate's other end lives in the batcher; without it there is nothing to claim for.
        let mut gate = self.dispatcher.writable.clone();
        let shut = || !*self.dispatcher.writable.borrow();
        if pulse.outside_while(shut, gate.wait_for(|open| *open)).await.is_err() {
            std::future::pending::<()>().await;
        }
        let all_busy = || self.idle.available_permits() == 0;
        let idle = Arc::clone(&self.idle).acquire_owned();
        let Ok(first) = pulse.outside_while(all_busy, idle).await else {
            return std::future::pending().await;
        };
        let mut permits = vec![first];
        while permits.len() < AT_ONCE
            && let Ok(more) = Arc::clone(&self.idle).try_acquire_owned()
        {
            permits.push(more);
        }
        let bench = &self.dispatcher.bench;
        let company = pulse.outside(bench.room.enter()).await;
        pulse.outside_while(|| !bench.lease.is_valid(), bench.lease.valid()).await;
        (permits, company)
    }

    /// Claims a block for every permit and starts it. Returns how many there were.
    async fn claim_for(
        &mut self,
        mut permits: Vec<OwnedSemaphorePermit>,
        company: Company,
    ) -> Result<usize, BlockError> {
        let (began, moment) = (Instant::now(), Moment::now());
        let claimed = self.claim(permits.len()).await?;
        let count = claimed.len();
        let (metrics, queue) = (&self.dispatcher.bench.metrics, &self.dispatcher.queue);
        metrics.walk.claimed(queue, Work::Rows, began.elapsed());
        metrics.blocks.inc_by(count as u64);
        let waits = claimed.iter().filter_map(|block| block.waited);
        waits.for_each(|waited| metrics.walk.picked_up(queue, Work::Rows, waited));
        if count > 0 {
            Span::since("claim", None, moment).name("queue", queue).number("blocks", count as i64).end();
        }
        for block in claimed {
            self.start(block, permits.pop(), company.clone());
        }
        Ok(count)
    }

    fn start(&mut self, block: Block, permit: Option<OwnedSemaphorePermit>, company: Company) {
        let bench = Arc::clone(&self.dispatcher.bench);
        self.fibers.spawn(async move {
            bench.run(block, company).await;
            drop(permit);
        });
    }

    async fn claim(&mut self, count: usize) -> Result<Vec<Block>, BlockError> {
        let client = self.dispatcher.bench.store.claims.get().await?;
        let mut claimed = Vec::new();
        let Err(error) = self.claim_into(&mut claimed, &client, count).await else { return Ok(claimed) };
        // The session may be in any state, or lead to a server that is read-only now; a new one is cheap.
        drop(deadpool_postgres::Object::take(client));
        if claimed.is_empty() {
            return Err(error);
        }
        // What was claimed before the error is ours, and nobody else would run it. The error will come again.
        Ok(claimed)
    }

    async fn claim_into(
        &mut self,
        claimed: &mut Vec<Block>,
        client: &deadpool_postgres::Object,
        count: usize,
    ) -> Result<(), BlockError> {
        let held = self.dispatcher.bench.held.clone();
        claimed.extend(self.adopt(client, &held).await?);
        if claimed.len() >= count {
            return Ok(());
        }
        // A look for the rare solitary block that fails must not keep the others from being claimed.
        let solo = self.claim_solo(client, &held).await.map(|solo| claimed.extend(solo));
        self.claims += 1;
        let any_priority = self.claims.is_multiple_of(IGNORE_PRIORITY_EVERY);
        let deferring = !any_priority && self.dispatcher.rival.defers();
        let Some(scope) = self.scope(client, any_priority, deferring).await? else {
            self.dispatcher.rival.claimed(claimed.len(), deferring);
            return solo;
        };
        let by_turns = [Kind::Free, Kind::Fresh];
        let order = if self.claims.is_multiple_of(2) { by_turns } else { [Kind::Fresh, Kind::Free] };
        for (place, kind) in order.into_iter().enumerate() {
            let missing = count.saturating_sub(claimed.len());
            if missing == 0 {
                break;
            }
            let priorities = match place {
                _ if any_priority => Priorities::Ignored,
                0 => Priorities::NotBehindTheOther,
                _ => Priorities::Best,
            };
            let beside = Beside { scope, deferring };
            claimed.extend(self.claim_kind(client, &held, kind, missing, priorities, beside).await?);
        }
        self.dispatcher.rival.claimed(claimed.len(), deferring);
        solo
    }

    /// Solitary blocks are rare: looked for now and then, and not behind everything else, or a busy worker never would.
    async fn claim_solo(
        &mut self,
        client: &deadpool_postgres::Object,
        held: &Held,
    ) -> Result<Vec<Block>, BlockError> {
        if Instant::now() < self.next_solo_look {
            return Ok(Vec::new());
        }
        self.next_solo_look = Instant::now() + self.dispatcher.config.poll_interval;
        let beside = Beside { scope: Scope::Any, deferring: false };
        self.claim_kind(client, held, Kind::Solo, 1, Priorities::Best, beside).await
    }

    /// Whose rows may be claimed; `None`: nobody's, a structured queue's next work is a task.
    async fn scope(
        &self,
        client: &deadpool_postgres::Object,
        any_priority: bool,
        deferring: bool,
    ) -> Result<Option<Scope>, BlockError> {
        if self.dispatcher.settings.mode == Mode::Parallel {
            return Ok(Some(Scope::Any));
        }
        let handlers = &self.dispatcher.bench.handlers;
        let looked = tasks::Looked {
            queue: &self.dispatcher.queue,
            commands: &handlers.commands(),
            row_commands: &handlers.row_commands(),
            any_priority,
            tasks: deferring,
        };
        let focus = tasks::focus(client, &looked).await;
        let focus =
            focus.map_err(|source| BlockError::Query { operation: "find the scope to work on", source })?;
        Ok(focus.map(Scope::Of))
    }

    async fn claim_kind(
        &mut self,
        client: &deadpool_postgres::Object,
        held: &Held,
        kind: Kind,
        count: usize,
        priorities: Priorities,
        beside: Beside,
    ) -> Result<Vec<Block>, BlockError> {
        let dispatcher = &self.dispatcher;
        let task_commands = beside.deferring.then(|| dispatcher.bench.handlers.commands());
        let commands = dispatcher.bench.handlers.row_commands();
        let durable = dispatcher.bench.handlers.durable_commands();
        let size = |command: &String| {
            let (target, largest) =
                (dispatcher.config.target_block_time, dispatcher.settings.block_size.get());
            let size = dispatcher.bench.pace.size(command, target, largest);
            match dispatcher.bench.handlers.get(command).map(|entry| entry.handler.intake()) {
                // What costs per call must not shrink to calls of a single row because one call is slow.
                Some(Intake::Together(rows)) => size.at_least((rows.get() as i32).min(largest as i32)),
                _ => size,
            }
        };
        let sizes: Vec<Size> = commands.iter().map(size).collect();
        let tokens = held.announce(count);
        let worker = dispatcher.identity.id();
        let wanted = Wanted {
            queue: &dispatcher.queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            durable: &durable,
            sizes: &sizes,
            fibers: dispatcher.settings.fibers.get() as i32,
            scope: beside.scope,
            behind_tasks: task_commands.as_deref(),
        };
        let claimed = match kind {
            Kind::Fresh => blocks::carve(client, &wanted, priorities).await,
            Kind::Free => blocks::take(client, &wanted, priorities).await,
            Kind::Solo => blocks::take_solo(client, &wanted).await.map(|found| found.into_iter().collect()),
        };
        if claimed.is_err() {
            // The statement may have committed without our knowing; the tokens stay announced.
            self.doubtful.extend(tokens.iter().map(|token| (*token, Instant::now())));
        }
        let claimed = claimed?;
        held.settle(&tokens, &claimed.iter().map(|block| block.reference).collect::<Vec<_>>());
        Ok(claimed)
    }

    /// Blocks of claims whose reply was lost are ours all the same.
    async fn adopt(
        &mut self,
        client: &deadpool_postgres::Object,
        held: &Held,
    ) -> Result<Vec<Block>, BlockError> {
        if self.doubtful.is_empty() {
            return Ok(Vec::new());
        }
        let tokens: Vec<Uuid> = self.doubtful.iter().map(|(token, _)| *token).collect();
        let found = blocks::find(client, &tokens).await?;
        let references: Vec<_> = found.iter().map(|block| block.reference).collect();
        held.settle(&[], &references);
        let is_found = |token: &Uuid| references.iter().any(|reference| reference.token == *token);
        self.doubtful.retain(|(token, since)| {
            let keep = !is_found(token) && since.elapsed() < DOUBTFUL_FOR;
            if !keep && !is_found(token) {
                held.forget(*token);
            }
            keep
        });
        if !found.is_empty() {
            tracing::info!(
                queue = self.dispatcher.queue,
                blocks = found.len(),
                "adopted blocks of a claim whose reply was lost"
            );
        }
        Ok(found)
    }
}

/// What a claim of rows leaves to others.
#[derive(Clone, Copy, Debug)]
struct Beside {
    scope: Scope,
    /// Rows that are behind tasks are left.
    deferring: bool,
}

/// The kinds of work a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Free,
    Fresh,
    /// Must run with nothing else in the process.
    Solo,
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a fiber panicked; its block will be recovered");
    }
}
