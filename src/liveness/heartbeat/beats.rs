//! Beats in PostgreSQL by the clock, and at once when another worker could take us for dead.

use super::Heartbeat;
use crate::state::WorkerState;
use crate::{
    backoff,
    error_text::describe,
    store::{
        connect::{ConnectError, OneShot},
        workers::{self, Beat},
    },
    worker_id::WorkerId,
};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The name under which the readiness knows us.
const PART: &str = "heartbeat";
/// Without the session lock only beats keep others from declaring us dead: they look every second, for three.
const WITHOUT_LOCK: Duration = Duration::from_secs(1);
/// After a failed beat the next one follows soon: the others wait `settle` for it, not longer.
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
enum BeatError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("could not write the heartbeat")]
    Write(#[from] tokio_postgres::Error),
    #[error("PostgreSQL did not answer within {0:?}")]
    Silent(Duration),
}

/// `beaten` is notified of every beat as it begins.
pub(super) async fn beat(heart: &Heartbeat, beaten: &Notify, stop: &CancellationToken) {
    let mut beats = Beats { heart, beaten, connection: None, failures: 0, taken_at: Instant::now() };
    let mut session = heart.session.watch();
    let mut draining = heart.drain.is_cancelled();
    let mut trouble = heart.health.watch();
    let pulse = heart.health.pulse(PART);
    loop {
        let began = tokio::time::Instant::now();
        pulse.outside(beats.beat()).await;
        let next = began + beats.wait();
        let news = async {
            tokio::select! {
                () = stop.cancelled() => return true,
                () = tokio::time::sleep_until(next) => {}
                _ = session.changed() => {}
                // An operator who asks why nothing moves should not have to wait for the next beat.
                _ = trouble.changed() => {}
                () = heart.drain.cancelled(), if !draining => draining = true,
            }
            false
        };
        if pulse.outside(news).await {
            break;
        }
    }
    pulse.end();
    if let Some(connection) = beats.connection {
        connection.close().await;
    }
}

struct Beats<'a> {
    heart: &'a Heartbeat,
    beaten: &'a Notify,
    connection: Option<OneShot>,
    failures: u32,
    /// When the last beat was taken, by our own clock.
    taken_at: Instant,
}

impl Beats<'_> {
    fn wait(&self) -> Duration {
        let heart = self.heart;
        let usual = heart.config.heartbeat_interval;
        match self.failures {
            0 if heart.session.is_missing() => usual.min(WITHOUT_LOCK),
            0 => usual,
            failures => backoff::delay(Duration::from_millis(100), LONGEST_BACKOFF, failures).min(usual),
        }
    }

    async fn beat(&mut self) {
        let id = self.heart.identity.id();
        self.beaten.notify_one();
        match self.beat_postgres(&id).await {
            Ok(Beat::Taken { gap }) => self.taken(gap),
            Ok(Beat::Refused) => self.take_a_new_name(&id).await,
            Err(error) => self.failed(&error),
        }
    }

    async fn beat_postgres(&mut self, id: &WorkerId) -> Result<Beat, BeatError> {
        let sent = Instant::now();
        let state = if self.heart.drain.is_cancelled() { WorkerState::Draining } else { WorkerState::Alive };
        let limit = limit(self.heart.config.heartbeat_ttl);
        let trouble = self.heart.health.trouble();
        let beat = async {
            let client = self.client().await?;
            Ok(workers::beat_if_living(client, id, state, trouble.as_deref()).await?)
        };
        let beaten = tokio::time::timeout(limit, beat).await.unwrap_or(Err(BeatError::Silent(limit)));
        match &beaten {
            Ok(Beat::Taken { .. }) => self.heart.lease.renew(sent),
            Ok(Beat::Refused) => {}
            // The session may be in any state; a new one is cheap.
            Err(_) => self.connection = None,
        }
        beaten
    }

    async fn client(&mut self) -> Result<&tokio_postgres::Client, ConnectError> {
        if self.connection.as_ref().is_none_or(|connection| connection.is_closed()) {
            self.connection = None;
        }
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.heart.target.open("musterd heartbeat").await?,
        };
        Ok(&**self.connection.insert(connection))
    }

    fn taken(&mut self, gap: f64) {
        let heart = self.heart;
        if self.failures > 0 {
            tracing::info!(failures = self.failures, "the heartbeat is taken again");
        }
        self.failures = 0;
        heart.health.ready(PART);
        heart.metrics.liveness.beat_taken();
        // The server's clock went on without us (a paused machine, or a clock that was set forward), and perhaps without everybody:
        // the others must have their chance to beat before we judge them by that clock.
        let ours = std::mem::replace(&mut self.taken_at, Instant::now()).elapsed();
        if gap > heart.config.heartbeat_ttl.as_secs_f64()
            || gap > (ours + limit(heart.config.heartbeat_ttl)).as_secs_f64()
        {
            heart.lease.failed();
        }
    }

    fn failed(&mut self, error: &BeatError) {
        let heart = self.heart;
        self.failures += 1;
        heart.lease.failed();
        heart.metrics.liveness.beats_failed.inc();
        let state = if heart.lease.is_valid() { "late" } else { "lost; nothing new is started" };
        heart.health.unready(PART, format!("the database does not take the heartbeat; the lease is {state}"));
        if self.failures == 1 {
            tracing::warn!(error = describe(error), "the heartbeat was not taken; trying again");
        }
    }

    /// Others found us silent and have, or will have, our blocks. Nothing of what we hold can be written any more.
    async fn take_a_new_name(&mut self, old: &WorkerId) {
        let heart = self.heart;
        let lost = heart.held.fence_all();
        let new = WorkerId::new();
        tracing::warn!(old = %old, new = %new, blocks = lost,
            "this worker was declared dead; its blocks are given up and it goes on under a new name");
        heart.metrics.liveness.renamed.inc();
        let sent = Instant::now();
        let enlisted = async {
            let client = self.client().await?;
            Ok::<_, BeatError>(workers::enlist(client, &new, &heart.enlisted).await?)
        };
        if let Err(error) = enlisted.await {
            self.connection = None;
            return self.failed(&error);
        }
        // What was claimed with the old name until here belongs to a dead owner: others free it, the reconciliation
        // gives it up.
        heart.identity.change(new);
        heart.lease.renew(sent);
        self.failures = 0;
        heart.health.ready(PART);
        self.beaten.notify_one();
    }
}

/// A beat that takes longer is given up: there must be time for another before the TTL is over.
fn limit(ttl: Duration) -> Duration {
    Duration::from_secs(5).min(ttl / 4)
}
