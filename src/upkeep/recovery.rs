//! Finds workers that died, declares them dead, and frees what they held: by SQL only, never by call.
//!
//! Two ways to judge. The slow one: nothing in `seen_at` for a TTL, and no heartbeat in Redis either. The fast one: the
//! session lock is gone for three seconds of looks, and no beat has come since. Both judge no worker while
//! PostgreSQL, or the judge itself, has only just come back.

mod suspects;

use crate::{
    error_text::describe,
    failpoint::is_mutant,
    flow::complete::Checks,
    liveness::{self, identity::Identity, lease::Lease, roll::Roll, session::Session},
    metrics::Metrics,
    periodic::{Periodic, Tally},
    store::{
        Store, batches,
        recovery::{self, Freed, Ran},
    },
};
use deadpool_postgres::{Object, PoolError};
use std::{
    collections::HashSet,
    time::{Duration, Instant},
};
use suspects::Suspects;
use uuid::Uuid;

/// Time between two looks at the locks while one of them is gone.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time between two looks at the locks while all of them are held.
const LOCKS_EVERY: Duration = Duration::from_secs(4);
/// Time between two looks for blocks and tasks of owners that do not live, beside those after a death.
const ORPHANS_EVERY: Duration = Duration::from_secs(20);
/// Redis has this long to say what a dead worker was running.
const PATIENCE: Duration = Duration::from_secs(1);
/// A beat that comes later than this after its time is a sign of trouble.
const LATE_BEAT: Duration = Duration::from_secs(5);
/// Workers that ended this long ago are taken off the list.
const REMEMBERED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone, Debug)]
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
#[derive(Clone, Debug, Default)]
pub struct Pace {
    judged: Option<Instant>,
    locks_seen: Option<Instant>,
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
        let mut declared_dead = self.judge_by_lock(&client).await?;
        let slow = is_due(self.pace.judged, self.config.recovery_interval) && self.may_judge_by_silence();
        if slow {
            declared_dead.extend(self.judge_by_silence(&client).await?);
        }
        let ran = self.what_ran(&client, &declared_dead).await?;
        let freed = match slow || !declared_dead.is_empty() || is_due(self.pace.freed, ORPHANS_EVERY) {
            true => self.free(&mut client, &ran).await?,
            false => Freed::default(),
        };
        if slow || !declared_dead.is_empty() {
            // A worker may have died between the last commit of a scope and its completion.
            for scope in batches::unfinished(&client).await? {
                self.checks.ask(scope);
            }
        }
        if slow {
            recovery::strike_off(&client, REMEMBERED_FOR).await?;
            self.pace.judged = Some(Instant::now());
        }
        if let Some(roll) = &self.roll {
            for id in &declared_dead {
                roll.clear(id).await;
            }
        }
        Ok(Tally(declared_dead.len() as u64 + freed.blocks + freed.tasks + freed.failed))
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
        if self.pace.suspects.is_empty() && !is_due(self.pace.locks_seen, LOCKS_EVERY) {
            return Ok(Vec::new());
        }
        self.pace.locks_seen = Some(Instant::now());
        let me = self.identity.id();
        let lockless = recovery::lockless(client, me.as_str(), settle).await?;
        let mut declared_dead = Vec::new();
        for suspect in self.pace.suspects.look(lockless, self.roll.as_ref()).await {
            if recovery::declare_dead_if_lockless(client, &suspect).await? {
                self.report_dead(&suspect.id, "its session lock is gone");
                declared_dead.push(suspect.id);
            }
        }
        Ok(declared_dead)
    }

    /// After an outage everybody is silent. The others need a beat before we may judge them by it.
    fn may_judge_by_silence(&self) -> bool {
        let config = &self.config;
        self.lease.is_sound_for(config.settle.max(config.heartbeat_interval).min(config.heartbeat_ttl))
    }

    async fn judge_by_silence(&self, client: &Object) -> Result<Vec<String>, RecoveryError> {
        let (ttl, settle) = (self.config.heartbeat_ttl, self.config.settle);
        // Our own beats come as often as theirs.
        let own = self.config.heartbeat_interval + LATE_BEAT.min(ttl / 4);
        let me = self.identity.id();
        let mut declared_dead = Vec::new();
        for id in recovery::silent(client, me.as_str(), ttl, settle.min(ttl), own).await? {
            if self.beats_in_redis(&id).await {
                tracing::debug!(
                    worker = id,
                    "a worker is silent in PostgreSQL and alive in Redis; it is not declared dead"
                );
            } else if recovery::declare_dead_if_silent(client, me.as_str(), &id, ttl, own).await? {
                self.report_dead(&id, "it has been silent for longer than the TTL");
                declared_dead.push(id);
            }
        }
        Ok(declared_dead)
    }

    /// Redis can only speak for a worker. When it cannot be asked, PostgreSQL's word alone must do.
    async fn beats_in_redis(&self, id: &str) -> bool {
        match &self.roll {
            Some(roll) => matches!(roll.heartbeat_left(id).await, Ok(Some(_))),
            None => false,
        }
    }

    fn report_dead(&self, id: &str, why: &str) {
        self.metrics.liveness.declared_dead.inc();
        tracing::warn!(worker = id, why, "worker declared dead");
    }

    /// What workers that died were running, as they said in Redis. The database says what they held, and that alone is freed; this says
    /// what comes first of it, since a process dies of what it runs.
    async fn what_ran(&self, client: &Object, dead: &[String]) -> Result<Ran, RecoveryError> {
        let mut ran = Ran::default();
        let Some(roll) = &self.roll else { return Ok(ran) };
        for id in dead {
            let Ok(Ok(tracked)) = tokio::time::timeout(PATIENCE, roll.tracked(id)).await else { continue };
            let (blocks, claims) = recovery::owned(client, id).await?;
            let owned: HashSet<Uuid> = blocks.iter().map(|block| block.token).chain(claims).collect();
            let in_redis = tracked.tokens.difference(&owned).count();
            let in_postgres = owned.difference(&tracked.tokens).count();
            if in_redis + in_postgres > 0 {
                self.metrics.liveness.only_in_redis.inc_by(in_redis as u64);
                self.metrics.liveness.only_in_postgres.inc_by(in_postgres as u64);
                tracing::info!(
                    worker = id,
                    only_in_redis = in_redis,
                    only_in_postgres = in_postgres,
                    "Redis and PostgreSQL differ in what a dead worker had in hand; PostgreSQL is right"
                );
            }
            ran.tokens.extend(tracked.tokens.intersection(&owned));
            ran.tasks.extend(tracked.tasks);
        }
        Ok(ran)
    }

    /// Frees page after page, until what is left is locked by another transaction.
    async fn free(&mut self, client: &mut Object, ran: &Ran) -> Result<Freed, RecoveryError> {
        self.pace.freed = Some(Instant::now());
        if !recovery::has_orphans(client).await? {
            return Ok(Freed::default());
        }
        // Tasks that cannot be freed now keep no block from it.
        let tasks = recovery::free_tasks(client, self.config.max_crashes, ran).await;
        let mut sum = self.free_blocks(client, ran).await?;
        let tasks = tasks?;
        tasks.scopes.iter().for_each(|scope| self.checks.ask(*scope));
        sum.tasks = tasks.freed;
        sum.failed += tasks.failed;
        if sum != Freed::default() {
            self.metrics.liveness.recovered_blocks.inc_by(sum.blocks);
            self.metrics.liveness.failed_after_crashes.inc_by(sum.failed);
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
}

impl Recovery {
    async fn free_blocks(&self, client: &mut Object, ran: &Ran) -> Result<Freed, RecoveryError> {
        let mut sum = Freed::default();
        loop {
            let mut orphans = recovery::orphans(client).await?;
            if is_mutant("redis_only_witness") {
                orphans.retain(|(_, token)| ran.tokens.contains(token));
            }
            if orphans.is_empty() {
                return Ok(sum);
            }
            let freed = match recovery::free_if_held(client, &orphans, self.config.max_crashes, ran).await {
                Err(error) if orphans.len() > 1 && error.code().is_some() => {
                    self.free_apart(client, &orphans, ran).await?
                }
                freed => freed?,
            };
            freed.batches.iter().for_each(|batch| self.checks.ask(*batch));
            sum.add(&freed);
            if freed.blocks == 0 {
                return Ok(sum);
            }
        }
    }

    /// One block of a group cannot be freed: the others are.
    async fn free_apart(
        &self,
        client: &mut Object,
        orphans: &[(i64, Uuid)],
        ran: &Ran,
    ) -> Result<Freed, RecoveryError> {
        let mut sum = Freed::default();
        for orphan in orphans {
            match recovery::free_if_held(client, &[*orphan], self.config.max_crashes, ran).await {
                Ok(freed) => {
                    freed.batches.iter().for_each(|batch| self.checks.ask(*batch));
                    sum.add(&freed);
                }
                Err(error) if error.code().is_none() => return Err(error.into()),
                Err(error) => {
                    let said = describe(&error);
                    tracing::warn!(block = orphan.0, token = %orphan.1, error = said.lines().next(),
                        "a block of a dead worker cannot be freed now; the next look tries it again");
                }
            }
        }
        Ok(sum)
    }
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|last| last.elapsed() >= every)
}
