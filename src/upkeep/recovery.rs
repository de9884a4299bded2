//! Finds workers that died, declares them dead, and frees what they held: by SQL only, never by call.
//!
//! Two ways to judge. The slow one: nothing in `seen_at` for a TTL, and no heartbeat in Redis either. The fast one: the
//! session lock is gone for three seconds of looks, and no beat has come since. Both leave everybody in peace while
//! PostgreSQL, or the judge itself, has only just come back.

mod suspects;

use crate::{
    flow::complete::Checks,
    liveness::{self, identity::Identity, lease::Lease, roll::Roll, session::Session},
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{
        Store, batches,
        recovery::{self, Freed},
    },
};
use deadpool_postgres::{Object, PoolError};
use std::time::{Duration, Instant};
use suspects::Suspects;

/// Time between two looks at the locks.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time between two looks for blocks of owners that do not live, beside those after a death.
const ORPHANS_EVERY: Duration = Duration::from_secs(5);
/// Workers that ended this long ago are taken off the list.
const REMEMBERED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug)]
pub struct Recovery {
    pub store: Store,
    pub config: liveness::Config,
    pub identity: Identity,
    pub lease: Lease,
    pub session: Session,
    pub roll: Option<Roll>,
    pub checks: Checks,
    pub metrics: Metrics,
    pub pace: Pace,
}

/// When was what done last; and who is under suspicion.
#[derive(Debug, Default)]
pub struct Pace {
    judged: Option<Instant>,
    freed: Option<Instant>,
    suspects: Suspects,
}

#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    #[error("no connection to look for dead workers with")]
    Connect(#[from] PoolError),
    #[error("could not look for dead workers or free what they held")]
    Query(#[from] tokio_postgres::Error),
}

impl Periodic for Recovery {
    const NAME: &'static str = "recovery";
    type Error = RecoveryError;

    async fn tick(&mut self) -> Result<Tally, RecoveryError> {
        // Who cannot renew is in no position to judge others.
        if !self.lease.is_valid() {
            return Ok(Tally(0));
        }
        let mut client = self.store.general.get().await?;
        let mut buried = self.judge_by_lock(&client).await?;
        let slow = is_due(self.pace.judged, self.config.recovery_interval) && self.may_judge_by_silence();
        if slow {
            buried.extend(self.judge_by_silence(&client).await?);
        }
        let freed = match slow || !buried.is_empty() || is_due(self.pace.freed, ORPHANS_EVERY) {
            true => self.free(&mut client).await?,
            false => Freed::default(),
        };
        if slow || !buried.is_empty() {
            // Somebody may have died between the last commit of a scope and its completion.
            for scope in batches::unfinished(&client).await? {
                self.checks.ask(scope);
            }
        }
        if slow {
            recovery::strike_off(&client, REMEMBERED_FOR).await?;
            self.tidy_redis(&client).await?;
            self.pace.judged = Some(Instant::now());
        }
        for id in &buried {
            self.clear_redis(id).await;
        }
        Ok(Tally(buried.len() as u64 + freed.blocks + freed.tasks + freed.failed))
    }
}

impl Recovery {
    async fn judge_by_lock(&mut self, client: &Object) -> Result<Vec<String>, RecoveryError> {
        let settle = self.config.settle;
        // Our own session stands, and has stood: a lock that is gone is not our own bad sight.
        if !self.session.has_stood_for(settle) || !self.lease.is_sound_for(settle) {
            self.pace.suspects.clear();
            return Ok(Vec::new());
        }
        let me = self.identity.id();
        let lockless = recovery::lockless(client, me.as_str(), settle).await?;
        let mut buried = Vec::new();
        for suspect in self.pace.suspects.look(lockless, self.roll.as_ref()).await {
            if recovery::bury_if_lockless(client, &suspect).await? {
                self.mourn(&suspect.id, "its session lock is gone");
                buried.push(suspect.id);
            }
        }
        Ok(buried)
    }

    /// After an outage everybody is silent. The others need a beat before we may judge them by it.
    fn may_judge_by_silence(&self) -> bool {
        let config = &self.config;
        self.lease.is_sound_for(config.settle.max(config.heartbeat_interval).min(config.heartbeat_ttl))
    }

    async fn judge_by_silence(&self, client: &Object) -> Result<Vec<String>, RecoveryError> {
        let (ttl, settle) = (self.config.heartbeat_ttl, self.config.settle);
        let mut buried = Vec::new();
        for id in recovery::silent(client, self.identity.id().as_str(), ttl, settle.min(ttl)).await? {
            if self.beats_in_redis(&id).await {
                tracing::debug!(worker = id, "silent in PostgreSQL, alive in Redis; left in peace");
            } else if recovery::bury_if_silent(client, &id, ttl).await? {
                self.mourn(&id, "it has been silent for longer than the TTL");
                buried.push(id);
            }
        }
        Ok(buried)
    }

    /// Redis can only speak for a worker. When it cannot be asked, PostgreSQL's word alone must do.
    async fn beats_in_redis(&self, id: &str) -> bool {
        match &self.roll {
            Some(roll) => matches!(roll.heartbeat_left(id).await, Ok(Some(_))),
            None => false,
        }
    }

    fn mourn(&self, id: &str, why: &str) {
        self.metrics.liveness.buried.inc();
        tracing::warn!(worker = id, why, "declared dead");
    }

    /// Frees page after page, until what is left is locked by somebody else.
    async fn free(&mut self, client: &mut Object) -> Result<Freed, RecoveryError> {
        self.pace.freed = Some(Instant::now());
        let tasks = recovery::free_tasks(client, self.config.max_crashes).await?;
        tasks.scopes.iter().for_each(|scope| self.checks.ask(*scope));
        let mut sum = Freed { tasks: tasks.freed, failed: tasks.failed, ..Freed::default() };
        loop {
            let orphans = recovery::orphans(client).await?;
            if orphans.is_empty() {
                break;
            }
            let freed = recovery::free_if_held(client, &orphans, self.config.max_crashes).await?;
            for batch in &freed.batches {
                self.checks.ask(*batch);
            }
            sum.blocks += freed.blocks;
            sum.lines += freed.lines;
            sum.failed += freed.failed;
            if freed.blocks == 0 {
                break;
            }
        }
        if sum != Freed::default() {
            self.metrics.liveness.recovered_blocks.inc_by(sum.blocks);
            self.metrics.liveness.killer_rows.inc_by(sum.failed);
            tracing::warn!(
                blocks = sum.blocks,
                rows = sum.lines,
                tasks = sum.tasks,
                failed = sum.failed,
                "freed what the dead held"
            );
        }
        Ok(sum)
    }

    /// Names on the roll that do not live and do not beat: left over by a Redis that was away when they were buried.
    async fn tidy_redis(&self, client: &Object) -> Result<(), RecoveryError> {
        let Some(roll) = &self.roll else { return Ok(()) };
        let Ok(members) = roll.members().await else { return Ok(()) };
        let living = recovery::living(client, &members).await?;
        for id in members.iter().filter(|id| !living.contains(id)) {
            if matches!(roll.heartbeat_left(id).await, Ok(None)) {
                self.clear_redis(id).await;
            }
        }
        Ok(())
    }

    async fn clear_redis(&self, id: &str) {
        let Some(roll) = &self.roll else { return };
        let cleared = async {
            roll.strike(id).await?;
            roll.forget_rows(id).await
        };
        if let Err(error) = cleared.await {
            tracing::debug!(worker = id, %error, "its keys are left to run out");
        }
    }
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|last| last.elapsed() >= every)
}
