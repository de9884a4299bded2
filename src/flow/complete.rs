//! Finishes scopes: after every commit that may have been the last, exactly one worker writes the summary.
//!
//! The lock's holder may have an old snapshot while the worker with the news cannot get the lock. So both a held
//! lock and a stale count are tried again, each time with a new transaction; a sweep finds what that misses.
//! Batches with output files go through a lane of their own: see `complete/lane.rs`.

mod checks;
mod lane;

pub use checks::{CheckLoop, Checks, channel};

use crate::{
    config::Problems,
    failpoint,
    flow::outputs::{OutputsError, Uploader},
    json::Json,
    liveness::redis::StatusCache,
    metrics::Metrics,
    periodic::describe,
    store::{
        Store,
        batches::{self, Closed, Completion, Look},
    },
};
use deadpool_postgres::PoolError;
use serde::{Deserialize, Serialize};
use std::{
    num::NonZeroU32,
    time::{Duration, Instant},
};

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
    #[error("the outputs of batch {id} could not be uploaded")]
    Outputs { id: i64, source: OutputsError },
    /// Not a fault: somebody else is at it, or the state changed under the count.
    #[error("scope {id} is still {why:?} after {tries} tries; the sweep will look again")]
    Contended { id: i64, why: Completion, tries: u32 },
}

/// Finishes scopes one by one; the only caller of the completing transaction in the daemon.
#[derive(Clone, Debug)]
pub struct Completer {
    pub store: Store,
    pub uploader: Uploader,
    pub config: Config,
    pub cache: Option<StatusCache>,
    pub metrics: Metrics,
}

impl Completer {
    /// Finishes `id` if it is over and has no files to upload. Every try has a transaction, and so a snapshot, of
    /// its own.
    pub async fn complete(&self, id: i64) -> Result<Completion, CompleteError> {
        let mut last = Completion::Open;
        for attempt in 0..self.config.attempts.get() {
            self.pause_before(attempt).await;
            last = self.try_complete(id).await?;
            if !matches!(last, Completion::Locked | Completion::Stale) {
                return Ok(last);
            }
        }
        Err(CompleteError::Contended { id, why: last, tries: self.config.attempts.get() })
    }

    /// The same, with its files uploaded first. What is uploaded is of one snapshot; a stale one is uploaded anew.
    pub async fn complete_with_outputs(&self, id: i64) -> Result<Completion, CompleteError> {
        let failed = |source| CompleteError::Outputs { id, source };
        let (mut last, mut ready) = (Completion::Open, None);
        for attempt in 0..self.config.attempts.get() {
            self.pause_before(attempt).await;
            let uploaded = match ready.take() {
                Some(uploaded) => uploaded,
                None => match self.uploader.upload(id).await.map_err(failed)? {
                    Some(uploaded) => uploaded,
                    None => return Ok(Completion::Open),
                },
            };
            failpoint!("outputs.uploaded");
            let mut client = self.store.general.get().await?;
            let (closed, summary) = (&uploaded.closed, uploaded.summary.as_ref());
            last = self.finish(&mut client, id, Some(closed), summary).await?;
            match last {
                Completion::Locked => ready = Some(uploaded),
                Completion::Completed => return Ok(last),
                // Somebody else was first, or there is more to come: these files may never be referred to.
                _ => self.uploader.remove_if_overtaken(&client, &uploaded).await,
            }
            if !matches!(last, Completion::Locked | Completion::Stale) {
                return Ok(last);
            }
        }
        Err(CompleteError::Contended { id, why: last, tries: self.config.attempts.get() })
    }

    async fn pause_before(&self, attempt: u32) {
        if attempt > 0 {
            tokio::time::sleep(self.config.retry_delay).await;
        }
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
        let closed = match batches::look(&***client, id).await.map_err(failed)? {
            Look::Nothing => return Ok(Completion::Open),
            Look::Closed(closed) if closed.outputs => return Ok(Completion::NeedsUpload),
            Look::Parent => None,
            Look::Closed(closed) => Some(closed),
        };
        self.finish(client, id, closed.as_ref(), None).await
    }

    async fn finish(
        &self,
        client: &mut deadpool_postgres::Object,
        id: i64,
        closed: Option<&Closed>,
        outputs: Option<&Json>,
    ) -> Result<Completion, CompleteError> {
        let failed = |source| CompleteError::Query { id, source };
        let began = Instant::now();
        failpoint!("complete.counted");
        let answer = batches::complete(client, id, closed, outputs).await.map_err(failed)?;
        failpoint!("complete.committed");
        if answer == Completion::Completed {
            self.metrics.batches_completed.inc();
            self.metrics.walk.completions.observe(began.elapsed().as_secs_f64());
            tracing::info!(scope = id, rows = closed.map(|c| c.rows), "finished");
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

    /// What uploads that were given up have left is removed, as far as that goes within the time there is.
    async fn settle(&self) {
        if tokio::time::timeout(SETTLE_LIMIT, self.uploader.objects.settle()).await.is_err() {
            tracing::warn!("unfinished uploads are left behind: the store does not answer");
        }
    }

    /// The scope to look at after this one ended; the sweep finds it when this question fails.
    async fn parent_of(&self, id: i64) -> Option<i64> {
        let client = self.store.general.get().await.ok()?;
        batches::parent_of(&client, id).await.ok().flatten()
    }
}

/// Less than the supervisor allows a stage that was told to give back.
const SETTLE_LIMIT: Duration = Duration::from_secs(3);
