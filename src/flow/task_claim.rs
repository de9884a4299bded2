//! The dispatcher of a queue's tasks: shares the fibers with the queue's blocks.

use super::{fiber::Bench, rivals::Rival, solo::Company};
use crate::{
    backoff,
    liveness::identity::Identity,
    metrics::Work,
    periodic::describe,
    pulse::Pulse,
    queue::{self, Mode},
    spans::{Moment, Span},
    store::{
        LONGEST_BACKOFF,
        tasks::{self, Looked, Scope, Task, WantedTasks},
    },
};
use deadpool_postgres::{Object, PoolError};
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

/// Tasks of one claim, at most.
const AT_ONCE: usize = 8;
/// Every so many claims priority does not count, so that nothing waits for ever.
const IGNORE_PRIORITY_EVERY: u64 = 16;
/// A claim whose reply was lost may still be under way; after this long it is not.
const DOUBTFUL_FOR: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum TaskClaimError {
    #[error("no connection to claim with")]
    Connect(#[from] PoolError),
    #[error("could not claim tasks")]
    Query(#[from] tokio_postgres::Error),
}

/// Claims tasks for one queue and runs them.
#[derive(Debug)]
pub struct TaskDispatcher {
    pub queue: String,
    pub settings: queue::Config,
    pub poll_interval: Duration,
    /// Who claims; asked anew for every claim.
    pub identity: Identity,
    pub bench: Arc<Bench>,
    /// The queue's idle fibers, shared with its blocks.
    pub idle: Arc<Semaphore>,
    /// The queue's rows; wakes this side when somebody enqueued.
    pub rival: Rival,
    /// Whether outcomes can be written.
    pub writable: watch::Receiver<bool>,
    /// Stop claiming; what is in hand comes to its end.
    pub drain: CancellationToken,
    pub pulse: Pulse,
}

struct Running {
    dispatcher: TaskDispatcher,
    fibers: JoinSet<()>,
    claims: u64,
    /// Tokens sent with claims whose reply never came.
    doubtful: Vec<(Uuid, Instant)>,
    /// When to look for a solitary task again.
    next_solo_look: Instant,
}

impl TaskDispatcher {
    /// Claims until the drain, then lets the tasks in hand come to their end; returns when told to `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let drain = self.drain.clone();
        let mut running = Running {
            dispatcher: self,
            fibers: JoinSet::new(),
            claims: 0,
            doubtful: Vec::new(),
            next_solo_look: Instant::now(),
        };
        running.dispatch(&drain).await;
        // From here on the drain has its own limit.
        running.dispatcher.pulse.end();
        running.adopt_last().await;
        while running.fibers.join_next().await.is_some() {}
        stop.cancelled().await;
    }
}

impl Running {
    async fn dispatch(&mut self, stop: &CancellationToken) {
        let mut failures = 0;
        let pulse = self.dispatcher.pulse.clone();
        while !stop.is_cancelled() {
            pulse.turn();
            crate::failpoint!("tasks.turn");
            let pause = match self.round(stop).await {
                Ok(claimed) => {
                    failures = 0;
                    if claimed > 0 {
                        continue;
                    }
                    self.dispatcher.poll_interval
                }
                Err(error) => {
                    failures += 1;
                    if failures == 1 {
                        let queue = &self.dispatcher.queue;
                        tracing::warn!(queue, error = describe(&error), "cannot claim tasks; trying again");
                    }
                    backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, failures)
                }
            };
            let woken = tokio::time::timeout(pause, self.dispatcher.rival.woken());
            if stop.run_until_cancelled(pulse.outside(woken)).await.is_none() {
                return;
            }
        }
    }

    /// Looks whether there is anything before it takes a fiber away from the queue's rows.
    async fn round(&mut self, stop: &CancellationToken) -> Result<usize, TaskClaimError> {
        while self.fibers.try_join_next().is_some() {}
        let pulse = self.dispatcher.pulse.clone();
        let due = pulse.outside(self.is_anything_due()).await?;
        if !due && self.doubtful.is_empty() {
            self.dispatcher.rival.claimed(0, false);
            return Ok(0);
        }
        // Waiting for a fiber may be cut short; a claim that has begun is finished.
        match stop.run_until_cancelled(self.idle_fibers()).await {
            Some((permits, company)) => pulse.outside(self.claim_for(permits, company)).await,
            None => Ok(0),
        }
    }

    async fn is_anything_due(&self) -> Result<bool, TaskClaimError> {
        let client = self.dispatcher.bench.store.general.get().await?;
        Ok(tasks::due(&client, &self.dispatcher.queue).await?)
    }

    /// Waits until a fiber is idle, outcomes can be written, the lease is valid and nobody is to be alone.
    async fn idle_fibers(&mut self) -> (Vec<OwnedSemaphorePermit>, Company) {
        let dispatcher = &self.dispatcher;
        let pulse = &dispatcher.pulse;
        let mut gate = dispatcher.writable.clone();
        let shut = || !*dispatcher.writable.borrow();
        if pulse.outside_while(shut, gate.wait_for(|open| *open)).await.is_err() {
            std::future::pending::<()>().await;
        }
        let all_busy = || dispatcher.idle.available_permits() == 0;
        let idle = Arc::clone(&dispatcher.idle).acquire_owned();
        let Ok(first) = pulse.outside_while(all_busy, idle).await else {
            return std::future::pending().await;
        };
        let mut permits = vec![first];
        while permits.len() < AT_ONCE
            && let Ok(more) = Arc::clone(&self.dispatcher.idle).try_acquire_owned()
        {
            permits.push(more);
        }
        let bench = &dispatcher.bench;
        let company = pulse.outside(bench.room.enter()).await;
        pulse.outside_while(|| !bench.lease.is_valid(), bench.lease.valid()).await;
        (permits, company)
    }

    async fn claim_for(
        &mut self,
        mut permits: Vec<OwnedSemaphorePermit>,
        company: Company,
    ) -> Result<usize, TaskClaimError> {
        let (began, moment) = (Instant::now(), Moment::now());
        let client = self.dispatcher.bench.store.claims.get().await?;
        let mut claimed = Vec::new();
        let ended = self.claim_into(&mut claimed, &client, permits.len()).await;
        if ended.is_err() {
            // The session may be in any state; a new one is cheap.
            drop(Object::take(client));
        }
        let count = claimed.len();
        let (walk, queue) = (&self.dispatcher.bench.metrics.walk, &self.dispatcher.queue);
        walk.claimed(queue, Work::Tasks, began.elapsed());
        let waits = claimed.iter().filter_map(|task| task.waited);
        waits.for_each(|waited| walk.picked_up(queue, Work::Tasks, waited));
        if count > 0 {
            Span::since("claim", None, moment).name("queue", queue).number("tasks", count as i64).end();
        }
        for task in claimed {
            self.start(task, permits.pop(), company.clone());
        }
        // What was claimed before the error is ours, and nobody else would run it. The error will come again.
        if count > 0 { Ok(count) } else { ended.map(|()| 0) }
    }

    async fn claim_into(
        &mut self,
        claimed: &mut Vec<Task>,
        client: &Object,
        count: usize,
    ) -> Result<(), TaskClaimError> {
        claimed.extend(self.adopt(client).await?);
        claimed.extend(self.claim_solo(client).await?);
        let missing = count.saturating_sub(claimed.len());
        if missing > 0 {
            claimed.extend(self.claim(client, missing).await?);
        }
        Ok(())
    }

    /// Solitary tasks are rare: looked for now and then, and not behind everything else, or a busy worker never would.
    async fn claim_solo(&mut self, client: &Object) -> Result<Option<Task>, TaskClaimError> {
        if Instant::now() < self.next_solo_look {
            return Ok(None);
        }
        self.next_solo_look = Instant::now() + self.dispatcher.poll_interval;
        let dispatcher = &self.dispatcher;
        let commands = dispatcher.bench.handlers.commands();
        let tokens = dispatcher.bench.held.announce(1);
        let worker = dispatcher.identity.id();
        let wanted = WantedTasks {
            queue: &dispatcher.queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            scope: Scope::Any,
            ignore_priority: false,
            behind_rows: None,
        };
        let taken = tasks::take_solo(client, &wanted).await;
        self.settle(&tokens, taken.map(|task| task.into_iter().collect()))
            .map(|taken| taken.into_iter().next())
    }

    /// What a claim with these tokens came to.
    fn settle(
        &mut self,
        tokens: &[Uuid],
        claimed: Result<Vec<Task>, tokio_postgres::Error>,
    ) -> Result<Vec<Task>, TaskClaimError> {
        match claimed {
            Ok(claimed) => {
                let references: Vec<_> = claimed.iter().map(|task| task.reference).collect();
                self.dispatcher.bench.held.settle_tasks(tokens, &references);
                Ok(claimed)
            }
            Err(error) => {
                // The statement may have committed without our knowing; the tokens stay announced.
                self.doubtful.extend(tokens.iter().map(|token| (*token, Instant::now())));
                Err(error.into())
            }
        }
    }

    async fn claim(&mut self, client: &Object, count: usize) -> Result<Vec<Task>, TaskClaimError> {
        self.claims += 1;
        let dispatcher = &self.dispatcher;
        let any_priority = self.claims.is_multiple_of(IGNORE_PRIORITY_EVERY);
        let deferring = !any_priority && dispatcher.rival.defers();
        let commands = dispatcher.bench.handlers.commands();
        let row_commands = dispatcher.bench.handlers.row_commands();
        let scope = match dispatcher.settings.mode {
            Mode::Parallel => Scope::Any,
            Mode::Structured => {
                let queue = &dispatcher.queue;
                let looked = Looked {
                    queue,
                    commands: &commands,
                    row_commands: &row_commands,
                    any_priority,
                    tasks: true,
                };
                tasks::focus(client, &looked).await?.map_or(Scope::TopLevel, Scope::Of)
            }
        };
        // Of top-level work the focus has decided already which kind is next.
        let behind_rows = deferring && scope != Scope::TopLevel;
        let tokens = dispatcher.bench.held.announce(count);
        let worker = dispatcher.identity.id();
        let wanted = WantedTasks {
            queue: &dispatcher.queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            scope,
            ignore_priority: any_priority,
            behind_rows: behind_rows.then_some(&*row_commands),
        };
        let claimed = tasks::claim(client, &wanted).await;
        let claimed = self.settle(&tokens, claimed)?;
        self.dispatcher.rival.claimed(claimed.len(), deferring);
        Ok(claimed)
    }

    fn start(&mut self, task: Task, permit: Option<OwnedSemaphorePermit>, company: Company) {
        let bench = Arc::clone(&self.dispatcher.bench);
        self.fibers.spawn(async move {
            bench.run_task(task, company).await;
            drop(permit);
        });
    }

    /// Tasks of claims whose reply was lost are ours all the same.
    async fn adopt(&mut self, client: &Object) -> Result<Vec<Task>, TaskClaimError> {
        if self.doubtful.is_empty() {
            return Ok(Vec::new());
        }
        let held = &self.dispatcher.bench.held;
        let tokens: Vec<Uuid> = self.doubtful.iter().map(|(token, _)| *token).collect();
        let found = tasks::find(client, &tokens).await?;
        let references: Vec<_> = found.iter().map(|task| task.reference).collect();
        held.settle_tasks(&[], &references);
        self.doubtful.retain(|(token, since)| {
            let is_found = references.iter().any(|reference| reference.token == *token);
            let keep = !is_found && since.elapsed() < DOUBTFUL_FOR;
            if !keep && !is_found {
                held.forget(*token);
            }
            keep
        });
        Ok(found)
    }

    async fn adopt_last(&mut self) {
        if self.doubtful.is_empty() {
            return;
        }
        let company = self.dispatcher.bench.room.enter().await;
        let adopted = match self.dispatcher.bench.store.claims.get().await {
            Ok(client) => self.adopt(&client).await,
            Err(error) => Err(error.into()),
        };
        match adopted {
            Ok(tasks) => tasks.into_iter().for_each(|task| self.start(task, None, company.clone())),
            Err(error) => tracing::warn!(error = describe(&error), "lost claims are left to the recovery"),
        }
    }
}
