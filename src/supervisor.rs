//! Starts every part by name, knows what the death of each means, and stops them in the data's direction.

mod drain;
mod health;

pub use health::{Health, PartReport, PartState};

use crate::signal::Stop;
use drain::Running;
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use std::{any::Any, borrow::Cow, time::Duration};
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

/// The order in which parts stop: the data's own direction, the heartbeat after everything it vouches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    Claim,
    Work,
    Write,
    Finish,
    Upkeep,
    Heartbeat,
    Http,
}

impl Stage {
    const ALL: [Self; 7] =
        [Self::Claim, Self::Work, Self::Write, Self::Finish, Self::Upkeep, Self::Heartbeat, Self::Http];
}

/// What it means that a part ended before it was asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDeath {
    /// Start it again, with a growing wait.
    Restart,
    /// The daemon cannot do its work without it: drain and exit non-zero.
    Stop,
}

type PartResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;
type Start = Box<dyn FnMut(CancellationToken) -> BoxFuture<'static, PartResult> + Send>;

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

    /// Adds a part that can be started any number of times.
    pub fn part<F>(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        stage: Stage,
        mut start: impl FnMut(CancellationToken) -> F + Send + 'static,
    ) where
        F: Future<Output = PartResult> + Send + 'static,
    {
        let start: Start = Box::new(move |stop| start(stop).boxed());
        self.parts.push(Part { name: name.into(), stage, on_death: OnDeath::Restart, start });
    }

    /// Adds a part that owns something there is only one of; its death stops the daemon.
    pub fn once<F>(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        stage: Stage,
        start: impl FnOnce(CancellationToken) -> F + Send + 'static,
    ) where
        F: Future<Output = PartResult> + Send + 'static,
    {
        let mut start = Some(start);
        let start: Start = Box::new(move |stop| match start.take() {
            Some(start) => start(stop).boxed(),
            None => futures::future::ready(Err("cannot be started twice".into())).boxed(),
        });
        self.parts.push(Part { name: name.into(), stage, on_death: OnDeath::Stop, start });
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
/// The same of one whose flushes fail.
pub const WRITES: &str = "writes";

/// After the grace what runs is told to give back; this is how long it may take to do so.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(5);

/// What a panic said, when it said it in words.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests;
