//! Finishes scopes: after every commit that may have been the last, exactly one worker writes the summary.
//!
//! The lock's holder may have an old snapshot while the worker with the news cannot get the lock. So both a held
//! lock and a stale count are tried again, each time with a new transaction; a sweep finds what that misses.

use crate::{
    config::Problems,
    failpoint,
    liveness::redis::StatusCache,
    metrics::Metrics,
    periodic::describe,
    store::{
        Store,
        batches::{self, Completion, Look},
    },
};
use deadpool_postgres::PoolError;
use futures::{StreamExt, stream::FuturesUnordered};
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    time::Duration,
};
use tokio::sync::mpsc;

/// The `[completion]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Tries when another worker holds the lock, or the count was stale.
    pub attempts: NonZeroU32,
    /// Time between those tries.
    #[serde(with = "humantime_serde")]
    pub retry_delay: Duration,
    /// The sweep runs at random between these.
    #[serde(with = "humantime_serde")]
    pub sweep_min: Duration,
    #[serde(with = "humantime_serde")]
    pub sweep_max: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            attempts: NonZeroU32::new(5).expect("five is not nought"),
            retry_delay: Duration::from_millis(50),
            sweep_min: Duration::from_secs(300),
            sweep_max: Duration::from_secs(600),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(!self.sweep_min.is_zero(), "completion.sweep_min", "must be above zero");
        problems.unless(
            self.sweep_min <= self.sweep_max,
            "completion.sweep_max",
            "must be at least completion.sweep_min",
        );
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CompleteError {
    #[error("no connection to finish a batch with")]
    Connect(#[from] PoolError),
    #[error("could not finish scope {id}")]
    Query { id: i64, source: tokio_postgres::Error },
    /// Not a fault: somebody else is at it, or the state changed under the count.
    #[error("scope {id} is still {why:?} after {tries} tries; the sweep will look again")]
    Contended { id: i64, why: Completion, tries: u32 },
}

/// Asks for scopes to be looked at. Never waits: asking twice is asking once.
#[derive(Clone, Debug)]
pub struct Checks(mpsc::UnboundedSender<i64>);

impl Checks {
    pub fn ask(&self, scope: i64) {
        // Refused only when the completer has ended, and then the sweep of another worker looks.
        let _ = self.0.send(scope);
    }
}

/// Finishes scopes one by one; the only caller of the completing transaction in the daemon.
#[derive(Clone, Debug)]
pub struct Completer {
    pub store: Store,
    pub config: Config,
    pub cache: Option<StatusCache>,
    pub metrics: Metrics,
}

impl Completer {
    /// Finishes `id` if it is over. Every try has a transaction, and so a snapshot, of its own.
    pub async fn complete(&self, id: i64) -> Result<Completion, CompleteError> {
        let mut last = Completion::Open;
        for attempt in 0..self.config.attempts.get() {
            if attempt > 0 {
                tokio::time::sleep(self.config.retry_delay).await;
            }
            last = self.try_complete(id).await?;
            if !matches!(last, Completion::Locked | Completion::Stale) {
                return Ok(last);
            }
        }
        Err(CompleteError::Contended { id, why: last, tries: self.config.attempts.get() })
    }

    async fn try_complete(&self, id: i64) -> Result<Completion, CompleteError> {
        let mut client = self.store.general.get().await?;
        let answer = self.try_complete_with(&mut client, id).await;
        if answer.is_err() {
            // The session may be in any state, or lead to a server that is read-only now; a new one is cheap.
            drop(deadpool_postgres::Object::take(client));
        }
        answer
    }

    async fn try_complete_with(
        &self,
        client: &mut deadpool_postgres::Object,
        id: i64,
    ) -> Result<Completion, CompleteError> {
        let failed = |source| CompleteError::Query { id, source };
        let closed = match batches::look(client, id).await.map_err(failed)? {
            Look::Nothing => return Ok(Completion::Open),
            Look::Parent => None,
            Look::Closed(closed) => Some(closed),
        };
        failpoint!("complete.counted");
        let answer = batches::complete(client, id, closed.as_ref()).await.map_err(failed)?;
        failpoint!("complete.committed");
        if answer == Completion::Completed {
            self.metrics.batches_completed.inc();
            tracing::info!(scope = id, rows = closed.as_ref().map(|c| c.rows), "finished");
            self.tell(client, id).await;
        }
        Ok(answer)
    }

    /// After the commit, outside every lock: the cache is a courtesy, and its failure nobody's loss.
    async fn tell(&self, client: &deadpool_postgres::Object, id: i64) {
        let Some(cache) = &self.cache else { return };
        match batches::progress(&***client, id).await {
            Ok(Some(progress)) => cache.put(&progress).await,
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(scope = id, error = describe(&error), "the status cache was not written")
            }
        }
    }
}

/// Scopes looked at side by side.
const SIDE_BY_SIDE: usize = 4;

/// Takes the requests of the whole daemon; a request for a scope that is being looked at is not lost.
#[derive(Debug)]
pub struct CheckLoop {
    completer: Completer,
    asked: mpsc::UnboundedReceiver<i64>,
}

pub fn channel(completer: Completer) -> (Checks, CheckLoop) {
    let (sender, asked) = mpsc::unbounded_channel();
    (Checks(sender), CheckLoop { completer, asked })
}

impl CheckLoop {
    /// Looks at what is asked for until nobody can ask any more and nothing is left to look at.
    pub async fn run(mut self) {
        let mut desk = Desk::default();
        let mut looks = FuturesUnordered::new();
        let mut open = true;
        while open || desk.has_work() {
            if looks.len() < SIDE_BY_SIDE && desk.may_start() {
                for id in self.worth_a_look(&mut desk).await {
                    let completer = self.completer.clone();
                    looks.push(async move { (id, completer.complete(id).await) });
                }
            }
            let pause = desk.paused_until;
            tokio::select! {
                asked = self.asked.recv(), if open => match asked {
                    Some(id) => desk.ask(id),
                    None => open = false,
                },
                Some((id, answer)) = looks.next() => {
                    desk.looked_at(id, &answer);
                    if matches!(answer, Ok(Completion::Completed)) && let Some(parent) = self.parent_of(id).await {
                        desk.ask(parent);
                    }
                }
                () = tokio::time::sleep_until(pause), if !desk.pending.is_empty() && !desk.may_start() => {}
                // Nobody can ask, nothing is under way, and what was pending was not over, or may start again.
                else => {}
            }
            while let Ok(id) = self.asked.try_recv() {
                desk.ask(id);
            }
            if !open && desk.failures > LAST_TRIES {
                tracing::warn!(left = desk.pending.len(), "scopes are left to the sweep of another worker");
                return;
            }
        }
    }

    /// One cheap question for many scopes; most of them are not over.
    async fn worth_a_look(&self, desk: &mut Desk) -> Vec<i64> {
        let ids: Vec<i64> = desk.pending.drain().collect();
        match self.sort_out(&ids).await {
            Ok(over) => {
                desk.failures = 0;
                desk.under_way.extend(over.iter().map(|id| (*id, false)));
                over
            }
            Err(error) => {
                if desk.failures == 0 {
                    tracing::warn!(error = describe(&error), "scopes could not be looked at; trying again");
                }
                desk.pending.extend(ids);
                desk.pause();
                Vec::new()
            }
        }
    }

    async fn sort_out(&self, ids: &[i64]) -> Result<Vec<i64>, CompleteError> {
        let client = self.completer.store.general.get().await?;
        let failed = |source| CompleteError::Query { id: ids.first().copied().unwrap_or_default(), source };
        let (over, spent) = batches::worth_a_look(&client, ids).await.map_err(failed)?;
        for batch in spent {
            tracing::warn!(batch = batch.id, action = ?batch.action, "more rows failed than the batch allows");
            batches::apply_budget(&client, batch).await.map_err(failed)?;
        }
        Ok(over)
    }

    async fn parent_of(&self, id: i64) -> Option<i64> {
        let client = self.completer.store.general.get().await.ok()?;
        batches::parent_of(&client, id).await.ok().flatten()
    }
}

/// When nobody asks any more, a database that is away gets this many more tries.
const LAST_TRIES: u32 = 3;

/// What has been asked for, and what is being looked at.
#[derive(Debug)]
struct Desk {
    pending: HashSet<i64>,
    /// By scope under way: whether it was asked for again meanwhile.
    under_way: HashMap<i64, bool>,
    failures: u32,
    paused_until: tokio::time::Instant,
}

impl Default for Desk {
    fn default() -> Self {
        Self {
            pending: HashSet::new(),
            under_way: HashMap::new(),
            failures: 0,
            paused_until: tokio::time::Instant::now(),
        }
    }
}

impl Desk {
    fn ask(&mut self, id: i64) {
        match self.under_way.get_mut(&id) {
            Some(again) => *again = true,
            None => {
                self.pending.insert(id);
            }
        }
    }

    fn looked_at(&mut self, id: i64, answer: &Result<Completion, CompleteError>) {
        report(id, answer);
        let again = self.under_way.remove(&id) == Some(true);
        let failed = matches!(answer, Err(CompleteError::Connect(_) | CompleteError::Query { .. }));
        if again || failed {
            self.pending.insert(id);
        }
        if failed {
            self.pause();
        }
    }

    fn pause(&mut self) {
        self.failures += 1;
        self.paused_until = tokio::time::Instant::now()
            + crate::backoff::delay(Duration::from_millis(50), crate::store::LONGEST_BACKOFF, self.failures);
    }

    fn may_start(&self) -> bool {
        !self.pending.is_empty() && self.paused_until <= tokio::time::Instant::now()
    }

    fn has_work(&self) -> bool {
        !self.pending.is_empty() || !self.under_way.is_empty()
    }
}

fn report(id: i64, answer: &Result<Completion, CompleteError>) {
    match answer {
        Ok(answer) => tracing::debug!(scope = id, ?answer, "looked at"),
        Err(error @ CompleteError::Contended { .. }) => tracing::info!(scope = id, "{error}"),
        Err(error) => {
            tracing::warn!(scope = id, error = describe(error), "could not be finished; the sweep will try")
        }
    }
}
