//! Starts every part by name, knows what the death of each means, and stops them in the data's direction.

mod drain;

use crate::{health::Health, signal::Stop};
use drain::Running;
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, time::Duration};
use tokio_util::sync::CancellationToken;

/// The `[shutdown]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// After SIGTERM, time to finish what has started.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { grace: Duration::from_secs(25) }
    }
}

/// The order in which parts stop, each named for what then ends: the data's own direction, the heartbeat after everything it vouches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// What looks for work that was missed or left behind: recovery, registry, reconcile, sweep.
    Upkeep,
    /// The claims of every queue; each ends when its fibers have finished what they hold.
    Claims,
    /// The batcher, when the last outcome is written.
    Writes,
    /// The completer, when the last scope is looked at, and the listener, whose lock keeps a draining worker from being taken for dead.
    Completion,
    /// The look at handlers that do not stop.
    Timeouts,
    Heartbeat,
    Http,
}

impl Stage {
    const ALL: [Self; 7] = [
        Self::Upkeep,
        Self::Claims,
        Self::Writes,
        Self::Completion,
        Self::Timeouts,
        Self::Heartbeat,
        Self::Http,
    ];
}

/// What it means that a part ended before it was asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDeath {
    /// Start it again, with a growing wait.
    Restart,
    /// The daemon cannot do its work without it: drain and exit non-zero.
    Stop,
}

pub type PartResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Starts a part; it ends when the token is cancelled, or when what feeds it has ended.
pub struct Start(Box<dyn FnMut(CancellationToken) -> BoxFuture<'static, PartResult> + Send>);

impl std::fmt::Debug for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Start")
    }
}

impl Start {
    /// A part that can be made any number of times.
    pub fn again<F>(mut start: impl FnMut(CancellationToken) -> F + Send + 'static) -> Self
    where
        F: Future<Output = PartResult> + Send + 'static,
    {
        Self(Box::new(move |stop| start(stop).boxed()))
    }

    /// A part that owns something there is only one of.
    pub fn once<F>(start: impl FnOnce(CancellationToken) -> F + Send + 'static) -> Self
    where
        F: Future<Output = PartResult> + Send + 'static,
    {
        let mut start = Some(start);
        Self(Box::new(move |stop| match start.take() {
            Some(start) => start(stop).boxed(),
            None => futures::future::ready(Err("cannot be started twice".into())).boxed(),
        }))
    }
}

struct Part {
    name: Cow<'static, str>,
    stage: Stage,
    on_death: OnDeath,
    start: Start,
}

/// A part whose death ended the daemon.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{part} died: {reason}")]
pub struct PartDied {
    pub part: String,
    pub reason: String,
}

/// What is in hand while the daemon drains, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub blocks: usize,
    /// Rows given back since the process started.
    pub given_back: u64,
}

/// Counts what is in hand.
pub struct Census(Box<dyn Fn() -> Count + Send + Sync>);

impl std::fmt::Debug for Census {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.count().fmt(f)
    }
}

impl Census {
    pub fn new(count: impl Fn() -> Count + Send + Sync + 'static) -> Self {
        Self(Box::new(count))
    }

    fn count(&self) -> Count {
        (self.0)()
    }
}

impl Default for Census {
    fn default() -> Self {
        Self::new(Count::default)
    }
}

/// How a run ended.
#[derive(Debug, Default)]
pub struct Ended {
    pub died: Option<PartDied>,
    /// Parts that were still running when the last patience was gone.
    pub stuck: Vec<Stage>,
    pub drained_in: Duration,
    pub rows_given_back: u64,
    pub owned: Owned,
}

/// What the database says the worker owned when it was over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owned {
    #[default]
    Nothing,
    /// Blocks and tasks left to the recovery.
    Something(i64),
    /// It could not be asked.
    Unknown,
}

impl Owned {
    /// For a log line; none when it is not known.
    pub fn as_number(self) -> Option<i64> {
        match self {
            Self::Nothing => Some(0),
            Self::Something(left) => Some(left),
            Self::Unknown => None,
        }
    }
}

impl Ended {
    /// The names of those stages, for a log line; none when there are none.
    pub fn stuck_stages(&self) -> Option<String> {
        let names: Vec<String> = self.stuck.iter().map(|stage| format!("{stage:?}")).collect();
        (!names.is_empty()).then(|| names.join(","))
    }

    pub fn is_clean(&self) -> bool {
        self.died.is_none() && self.stuck.is_empty() && self.owned == Owned::Nothing
    }
}

/// The parts of the daemon before they run.
pub struct Supervisor {
    health: Health,
    census: Census,
    parts: Vec<Part>,
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|part| &part.name)).finish()
    }
}

impl Supervisor {
    pub fn new(health: Health) -> Self {
        Self { health, census: Census::default(), parts: Vec::new() }
    }

    /// What the drain counts at each of its stages.
    pub fn census(mut self, census: Census) -> Self {
        self.census = census;
        self
    }

    /// Adds a part. One that is to be restarted can be started again.
    pub fn add(&mut self, name: impl Into<Cow<'static, str>>, stage: Stage, on_death: OnDeath, start: Start) {
        self.parts.push(Part { name: name.into(), stage, on_death, start });
    }

    /// Runs every part until `stop`, or until one dies that the daemon cannot do without; then drains.
    pub async fn run(self, stop: Stop, grace: Duration) -> Ended {
        let mut running = Running::start(self.parts, &self.health);
        self.health.ready(STARTING);
        tracing::info!("ready");
        let died = tokio::select! {
            () = stop.drain.cancelled() => None,
            died = running.first_death() => {
                tracing::error!(part = died.part, reason = died.reason, "a part died that the daemon needs: draining");
                Some(died)
            }
        };
        self.health.unready(DRAINING, "draining");
        running.drain(died, &stop, grace, &self.census).await
    }
}

/// The name under which [`Health`] knows a daemon that has not started all its parts yet.
pub const STARTING: &str = "start";
/// The same of one that stops.
const DRAINING: &str = "shutdown";

/// After the grace what runs is asked to give back; this is how long it may take to do so.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
