//! The parts while they run, and their end: stage after stage, in the direction of the data.

use super::{Census, Ended, GIVE_BACK_LIMIT, OnDeath, Owned, Part, PartDied, PartResult, Stage};
use crate::{
    error_text::{describe, panic_message},
    failpoint::is_mutant,
    health::Health,
    signal::Stop,
};
use futures::FutureExt;
use std::{
    any::Any,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

/// However late it is, a stage gets this long: the heartbeat has its farewell to say.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
/// A part that died this often in a row does not do its work: the daemon is not ready.
const MANY_DEATHS: u32 = 5;
/// A part that has lived for longer does it.
const LIVED: Duration = Duration::from_secs(60);

pub(super) struct Running {
    stages: Vec<(Stage, CancellationToken, JoinSet<()>)>,
    draining: Arc<AtomicBool>,
    deaths: mpsc::UnboundedReceiver<PartDied>,
}

impl Running {
    pub(super) fn start(parts: Vec<Part>, health: &Health) -> Self {
        let draining = Arc::new(AtomicBool::new(false));
        let (report, deaths) = mpsc::unbounded_channel();
        let mut stages: Vec<_> =
            Stage::ALL.into_iter().map(|stage| (stage, CancellationToken::new(), JoinSet::new())).collect();
        for part in parts {
            let keeper =
                Keeper { draining: Arc::clone(&draining), report: report.clone(), health: health.clone() };
            if let Some((_, token, set)) = stages.iter_mut().find(|(stage, ..)| *stage == part.stage) {
                set.spawn(keeper.keep(part, token.clone()));
            }
        }
        Self { stages, draining, deaths }
    }

    pub(super) async fn first_death(&mut self) -> PartDied {
        match self.deaths.recv().await {
            Some(died) => died,
            // No part is left to report: only possible when there was none.
            None => std::future::pending().await,
        }
    }

    /// Stops stage after stage. At the end of the grace `stop.now` asks for what runs to be given back; what has not
    /// ended a little later is abandoned.
    pub(super) async fn drain(
        mut self,
        died: Option<PartDied>,
        stop: &Stop,
        grace: Duration,
        census: &Census,
    ) -> Ended {
        self.draining.store(true, Ordering::SeqCst);
        // Also when a part's death is what began it: what takes in work stops at this word.
        stop.drain.cancel();
        let began = Instant::now();
        let at_the_start = census.count();
        tracing::info!(blocks_in_hand = at_the_start.blocks, grace_s = grace.as_secs(), "draining");
        let mut patience = Patience { give_back_at: tokio::time::Instant::now() + grace, gave_back: None };
        let mut stuck = Vec::new();
        if is_mutant("heartbeat_first") {
            self.stages.sort_by_key(|(stage, ..)| *stage != Stage::Heartbeat);
        }
        for (stage, token, set) in &mut self.stages {
            if set.is_empty() {
                continue;
            }
            let stage_began = Instant::now();
            token.cancel();
            if !patience.outlasts(set, stop).await {
                tracing::error!(?stage, "did not stop in time; abandoned");
                stuck.push(*stage);
                set.shutdown().await;
            }
            let now = census.count();
            tracing::info!(stage = ?stage, took_ms = stage_began.elapsed().as_millis() as u64, blocks_in_hand = now.blocks,
                rows_given_back = now.given_back, "stage stopped");
        }
        Ended {
            died,
            stuck,
            drained_in: began.elapsed(),
            rows_given_back: census.count().given_back - at_the_start.given_back,
            owned: Owned::Nothing,
        }
    }
}

/// How long the stages may take, all together.
struct Patience {
    give_back_at: tokio::time::Instant,
    /// When what runs was asked to be given back.
    gave_back: Option<tokio::time::Instant>,
}

impl Patience {
    /// Whether all of a stage ended in time.
    async fn outlasts(&mut self, set: &mut JoinSet<()>, stop: &Stop) -> bool {
        if self.gave_back.is_none() {
            tokio::select! {
                biased;
                () = all_ended(set) => return true,
                () = stop.now.cancelled() => {}
                () = tokio::time::sleep_until(self.give_back_at) => {}
            }
            tracing::warn!("giving back what is still running");
            stop.now.cancel();
            self.gave_back = Some(tokio::time::Instant::now());
        }
        let now = tokio::time::Instant::now();
        let deadline = self.gave_back.unwrap_or(now) + GIVE_BACK_LIMIT;
        tokio::time::timeout_at(deadline.max(now + LEAST_PATIENCE), all_ended(set)).await.is_ok()
    }
}

async fn all_ended(set: &mut JoinSet<()>) {
    while set.join_next().await.is_some() {}
}

/// What looks after one part.
struct Keeper {
    draining: Arc<AtomicBool>,
    report: mpsc::UnboundedSender<PartDied>,
    health: Health,
}

impl Keeper {
    /// Runs one part and does what its policy says each time it ends unasked.
    async fn keep(self, mut part: Part, stop: CancellationToken) {
        let mut deaths = 0;
        loop {
            let began = Instant::now();
            let ended = self.run(&mut part, deaths, &stop).await;
            if stop.is_cancelled() || self.draining.load(Ordering::SeqCst) {
                let reason = reason_of(ended);
                if let Some(reason) = reason {
                    tracing::warn!(part = %part.name, reason, "ended with an error while stopping");
                }
                return;
            }
            let reason = reason_of(ended).unwrap_or_else(|| "it returned without being asked to".into());
            if part.on_death == OnDeath::Stop {
                // No receiver is left only when the daemon is already going down.
                let _ = self.report.send(PartDied { part: part.name.into_owned(), reason });
                return;
            }
            // A part that lived for a while starts with a clean record.
            deaths = if began.elapsed() > LIVED { 1 } else { deaths + 1 };
            let wait = crate::backoff::delay(Duration::from_millis(100), Duration::from_secs(5), deaths);
            tracing::error!(part = %part.name, reason, ?wait, "a part died; starting it again");
            if deaths >= MANY_DEATHS {
                let said = format!("died {deaths} times in a row: {reason}");
                self.health.unready(format!("part {}", part.name), said);
            }
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
        }
    }
}

impl Keeper {
    /// Runs a part until it ends. One that had died many times and has lived for a while now makes the daemon ready again.
    async fn run(
        &self,
        part: &mut Part,
        deaths: u32,
        stop: &CancellationToken,
    ) -> Result<PartResult, Box<dyn Any + Send>> {
        let name = format!("part {}", part.name);
        let mut run = pin!(AssertUnwindSafe((part.start.0)(stop.clone())).catch_unwind());
        tokio::select! {
            biased;
            ended = &mut run => ended,
            () = tokio::time::sleep(LIVED), if deaths >= MANY_DEATHS => {
                self.health.ready(&name);
                run.await
            }
        }
    }
}

fn reason_of(ended: Result<PartResult, Box<dyn Any + Send>>) -> Option<String> {
    match ended {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(describe(error.as_ref())),
        Err(panic) => Some(format!("panicked: {}", panic_message(panic.as_ref()))),
    }
}
