//! Starts every part by name, knows what the death of each means, and stops them in the data's direction.

use crate::signal::Stop;
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    name: &'static str,
    stage: Stage,
    on_death: OnDeath,
    start: Start,
}

/// Why the daemon is not ready, by the part that says so. Empty is ready.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<std::collections::BTreeMap<&'static str, String>>>);

impl Health {
    pub fn unready(&self, part: &'static str, reason: impl Into<String>) {
        self.lock().insert(part, reason.into());
    }

    pub fn ready(&self, part: &'static str) {
        self.lock().remove(part);
    }

    pub fn not_ready_because(&self) -> Vec<String> {
        self.lock().iter().map(|(part, reason)| format!("{part}: {reason}")).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<&'static str, String>> {
        // A panic elsewhere leaves the map whole: inserts and removals are single steps.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A part whose death ended the daemon.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{part} died: {reason}")]
pub struct PartDied {
    pub part: &'static str,
    pub reason: String,
}

/// How a run ended.
#[derive(Debug, Default)]
pub struct Ended {
    pub died: Option<PartDied>,
    /// Parts that were still running when the last patience was gone.
    pub stuck: Vec<Stage>,
    pub drained_in: Duration,
}

impl Ended {
    pub fn is_clean(&self) -> bool {
        self.died.is_none() && self.stuck.is_empty()
    }
}

/// The parts of the daemon before they run.
pub struct Supervisor {
    health: Health,
    parts: Vec<Part>,
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|part| part.name)).finish()
    }
}

impl Supervisor {
    pub fn new(health: Health) -> Self {
        Self { health, parts: Vec::new() }
    }

    /// Adds a part that can be started any number of times.
    pub fn part<F>(
        &mut self,
        name: &'static str,
        stage: Stage,
        mut start: impl FnMut(CancellationToken) -> F + Send + 'static,
    ) where
        F: Future<Output = PartResult> + Send + 'static,
    {
        let start: Start = Box::new(move |stop| start(stop).boxed());
        self.parts.push(Part { name, stage, on_death: OnDeath::Restart, start });
    }

    /// Adds a part that owns something there is only one of; its death stops the daemon.
    pub fn once<F>(
        &mut self,
        name: &'static str,
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
        self.parts.push(Part { name, stage, on_death: OnDeath::Stop, start });
    }

    /// Runs every part until `stop`, or until one dies that the daemon cannot do without; then drains.
    pub async fn run(self, stop: Stop, grace: Duration) -> Ended {
        let mut running = Running::start(self.parts);
        self.health.ready(STARTING);
        tracing::info!("ready");
        let died = tokio::select! {
            () = stop.drain.cancelled() => None,
            died = running.first_death() => {
                tracing::error!(part = died.part, reason = died.reason, "a part died that the daemon needs: draining");
                Some(died)
            }
        };
        self.health.unready("shutdown", "draining");
        running.drain(died, &stop, grace).await
    }
}

/// The name under which [`Health`] knows a daemon that has not started all its parts yet.
pub const STARTING: &str = "start";

/// After the grace what runs is told to give back; this is how long it may take to do so.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(5);

struct Running {
    stages: Vec<(Stage, CancellationToken, JoinSet<()>)>,
    draining: Arc<AtomicBool>,
    deaths: tokio::sync::mpsc::UnboundedReceiver<PartDied>,
}

impl Running {
    fn start(parts: Vec<Part>) -> Self {
        let draining = Arc::new(AtomicBool::new(false));
        let (report, deaths) = tokio::sync::mpsc::unbounded_channel();
        let mut stages: Vec<_> =
            Stage::ALL.into_iter().map(|stage| (stage, CancellationToken::new(), JoinSet::new())).collect();
        for part in parts {
            let (draining, report) = (Arc::clone(&draining), report.clone());
            if let Some((_, token, set)) = stages.iter_mut().find(|(stage, ..)| *stage == part.stage) {
                set.spawn(keep(part, token.clone(), draining, report));
            }
        }
        Self { stages, draining, deaths }
    }

    async fn first_death(&mut self) -> PartDied {
        match self.deaths.recv().await {
            Some(died) => died,
            // No part is left to report: only possible when there was none.
            None => std::future::pending().await,
        }
    }

    /// Stops stage after stage. At the end of the grace `stop.now` asks for what runs to be given back.
    async fn drain(mut self, died: Option<PartDied>, stop: &Stop, grace: Duration) -> Ended {
        self.draining.store(true, Ordering::SeqCst);
        // Also when a part's death is what began it: whoever takes in work stops at this word.
        stop.drain.cancel();
        let began = Instant::now();
        let give_back_at = tokio::time::Instant::now() + grace;
        let mut stuck = Vec::new();
        for (stage, token, set) in &mut self.stages {
            if set.is_empty() {
                continue;
            }
            let stage_began = Instant::now();
            token.cancel();
            if !ends_before(set, stop, give_back_at).await {
                stop.now.cancel();
                if tokio::time::timeout(GIVE_BACK_LIMIT, all_ended(set)).await.is_err() {
                    tracing::error!(?stage, "did not stop in time; abandoned");
                    stuck.push(*stage);
                    set.shutdown().await;
                }
            }
            tracing::info!(stage = ?stage, took_ms = stage_began.elapsed().as_millis() as u64, "stopped");
        }
        Ended { died, stuck, drained_in: began.elapsed() }
    }
}

/// Whether all of a stage ended before the grace was over and before anybody asked to give back at once.
async fn ends_before(set: &mut JoinSet<()>, stop: &Stop, deadline: tokio::time::Instant) -> bool {
    tokio::select! {
        biased;
        () = all_ended(set) => true,
        () = stop.now.cancelled() => false,
        () = tokio::time::sleep_until(deadline) => false,
    }
}

async fn all_ended(set: &mut JoinSet<()>) {
    while set.join_next().await.is_some() {}
}

/// Runs one part and does what its policy says each time it ends unasked.
async fn keep(
    mut part: Part,
    stop: CancellationToken,
    draining: Arc<AtomicBool>,
    report: tokio::sync::mpsc::UnboundedSender<PartDied>,
) {
    let mut deaths = 0;
    loop {
        let began = Instant::now();
        let ended = AssertUnwindSafe((part.start)(stop.clone())).catch_unwind().await;
        if stop.is_cancelled() || draining.load(Ordering::SeqCst) {
            if let Some(reason) = reason_of(ended) {
                tracing::warn!(part = part.name, reason, "ended with an error while stopping");
            }
            return;
        }
        let reason = reason_of(ended).unwrap_or_else(|| "it returned without being asked to".into());
        if part.on_death == OnDeath::Stop {
            // Nobody listens any more only when the daemon is already going down.
            let _ = report.send(PartDied { part: part.name, reason });
            return;
        }
        // A part that lived for a while starts with a clean record.
        deaths = if began.elapsed() > Duration::from_secs(60) { 1 } else { deaths + 1 };
        let wait = crate::backoff::delay(Duration::from_millis(100), Duration::from_secs(5), deaths);
        tracing::error!(part = part.name, reason, ?wait, "a part died; starting it again");
        if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
            return;
        }
    }
}

fn reason_of(ended: Result<PartResult, Box<dyn Any + Send>>) -> Option<String> {
    match ended {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(crate::periodic::describe(error.as_ref())),
        Err(panic) => Some(format!("panicked: {}", panic_message(panic.as_ref()))),
    }
}

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
