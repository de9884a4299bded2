//! Finishes scopes: after every commit that may have been the last, exactly one worker writes the summary.
//!
//! The lock's holder may have an old snapshot while the worker with the news cannot get the lock. So both a held
//! lock and a stale count are tried again, each time with a new transaction; a sweep finds what that misses.
//! Batches with output files go through a lane of their own: see `complete/lane.rs`.

mod checks;
mod desk;
mod lane;
mod sort;

pub use checks::{CheckLoop, Checks, channel};

use crate::{
    error_text::describe,
    failpoint,
    flow::outputs::{OutputsError, Uploader},
    liveness::redis::StatusCache,
    metrics::Metrics,
    problems::Problems,
    store::{
        Store,
        batches::{self, Advisory, Completion, Look, ScopeEnd, Unbalanced},
        events,
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
            attempts: NonZeroU32::new(5).expect("five is not zero"),
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
    /// The group it was tried with failed; it is tried again.
    #[error("scope {id} was not looked at: the database did not answer")]
    WithOthers { id: i64 },
    /// Not a fault: another transaction is at it, or the state changed under the count.
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

/// What became of one scope.
pub type Finished = (i64, Result<Completion, CompleteError>);

impl Completer {
    /// Finishes those of `ids` that are over and have no files to upload, together. Every try has a transaction, and so a
    /// snapshot, of its own. Never waits for a lock: a scope that is locked by another transaction holds up only itself.
    pub async fn complete_all(&self, ids: Vec<i64>) -> Vec<Finished> {
        let (mut left, mut finished) = (ids, Vec::new());
        let attempts = self.config.attempts.get();
        for attempt in 1..=attempts {
            self.pause_before(attempt).await;
            // At last without the advisory lock, which any session may hold for as long as it likes.
            let advisory = if attempt == attempts { Advisory::Skip } else { Advisory::Ask };
            let answers = self.try_once(&std::mem::take(&mut left), advisory).await;
            for (id, answer) in answers {
                match answer {
                    Ok(Completion::Locked | Completion::Stale) if attempt < attempts => left.push(id),
                    Ok(why @ (Completion::Locked | Completion::Stale)) => {
                        finished.push((id, Err(CompleteError::Contended { id, why, tries: attempts })));
                    }
                    answer => finished.push((id, answer)),
                }
            }
            if left.is_empty() {
                break;
            }
        }
        finished
    }

    /// The same for one scope.
    pub async fn complete(&self, id: i64) -> Result<Completion, CompleteError> {
        self.complete_all(vec![id]).await.pop().map_or(Ok(Completion::Open), |(_, answer)| answer)
    }

    /// The same for one batch, with its files uploaded first. What is uploaded is of one snapshot; a stale one is uploaded
    /// again. `insist`: whether or not another worker seems to be uploading it.
    pub async fn complete_with_outputs(&self, id: i64, insist: bool) -> Result<Completion, CompleteError> {
        let (mut last, mut ready) = (Completion::Open, None);
        let attempts = self.config.attempts.get();
        for attempt in 1..=attempts {
            self.pause_before(attempt).await;
            let uploaded = match ready.take() {
                Some(uploaded) => uploaded,
                None => match self.uploader.upload(id, insist).await {
                    Ok(Some(uploaded)) => uploaded,
                    Ok(None) => return self.nothing_to_upload(id).await,
                    Err(source) => return self.without_outputs(id, source).await,
                },
            };
            failpoint!("outputs.uploaded");
            let mut client = self.store.general.get().await?;
            let end = ScopeEnd { id, closed: Some(&uploaded.closed), outputs: uploaded.summary.as_ref() };
            let advisory = if attempt == attempts { Advisory::Skip } else { Advisory::Ask };
            last = self.finish_one(&mut client, end, advisory).await?;
            match last {
                Completion::Locked => ready = Some(uploaded),
                Completion::Completed => return Ok(last),
                // Another worker was first, or there is more to come: these files may never be referred to.
                _ => self.uploader.remove_if_overtaken(&client, &uploaded).await,
            }
            if !matches!(last, Completion::Locked | Completion::Stale) {
                return Ok(last);
            }
        }
        Err(CompleteError::Contended { id, why: last, tries: attempts })
    }

    /// It is not over any more, or its lines do not add up, which is logged as it is of a batch without files.
    async fn nothing_to_upload(&self, id: i64) -> Result<Completion, CompleteError> {
        let client = self.store.general.get().await?;
        let looks = batches::look(&client, &[id]).await;
        match looks.map_err(|source| CompleteError::Query { id, source })?.first() {
            Some(Look::Unbalanced(found)) => {
                self.report_unbalanced(&client, found).await;
                Ok(Completion::Unbalanced)
            }
            _ => Ok(Completion::Open),
        }
    }

    /// A batch that is being aborted does not wait for a store that refuses its files.
    async fn without_outputs(&self, id: i64, source: OutputsError) -> Result<Completion, CompleteError> {
        let failed = |source| CompleteError::Query { id, source };
        let mut client = self.store.general.get().await?;
        match batches::look(&client, &[id]).await.map_err(failed)?.first() {
            Some(Look::Closed(closed)) if closed.aborting && source.is_of_store() => {
                tracing::warn!(
                    batch = id,
                    error = describe(&source),
                    "the aborted batch ends without its outputs"
                );
                let end = ScopeEnd { id, closed: Some(closed), outputs: None };
                self.finish_one(&mut client, end, Advisory::Ask).await
            }
            _ => Err(CompleteError::Outputs { id, source }),
        }
    }

    async fn pause_before(&self, attempt: u32) {
        if attempt > 1 {
            tokio::time::sleep(self.config.retry_delay).await;
        }
    }

    async fn try_once(&self, ids: &[i64], advisory: Advisory) -> Vec<Finished> {
        let mut client = match self.store.general.get().await {
            Ok(client) => client,
            Err(error) => return all_failed(ids, error.into()),
        };
        let mut finished = Vec::with_capacity(ids.len());
        match batches::look(&client, ids).await {
            Ok(looks) => self.finish_looked(&mut client, ids, &looks, advisory, &mut finished).await,
            // One of them may be the cause: each alone.
            Err(error) if ids.len() > 1 && error.code().is_some() => {
                for id in ids {
                    match batches::look(&client, &[*id]).await {
                        Ok(looks) => {
                            self.finish_looked(&mut client, &[*id], &looks, advisory, &mut finished).await
                        }
                        Err(source) => finished.push((*id, Err(CompleteError::Query { id: *id, source }))),
                    }
                }
            }
            Err(source) => {
                let id = ids.first().copied().unwrap_or_default();
                finished.extend(all_failed(ids, CompleteError::Query { id, source }));
            }
        }
        if finished.iter().any(|(_, answer)| answer.is_err()) {
            // The session may be in any state, or lead to a server that is read-only now; a new one is cheap.
            drop(deadpool_postgres::Object::take(client));
        }
        finished
    }

    async fn finish_looked(
        &self,
        client: &mut deadpool_postgres::Object,
        ids: &[i64],
        looks: &[Look],
        advisory: Advisory,
        finished: &mut Vec<Finished>,
    ) {
        let is_open = |id: &&i64| !looks.iter().any(|look| look.id() == **id);
        finished.extend(ids.iter().filter(is_open).map(|id| (*id, Ok(Completion::Open))));
        let (mut plain, mut alone) = (Vec::new(), Vec::new());
        for look in looks {
            match look {
                Look::Closed(closed) if closed.outputs => {
                    finished.push((closed.id, Ok(Completion::NeedsUpload)));
                }
                Look::Closed(closed) => {
                    plain.push(ScopeEnd { id: closed.id, closed: Some(closed), outputs: None })
                }
                Look::Unbalanced(found) => {
                    self.report_unbalanced(client, found).await;
                    finished.push((found.id, Ok(Completion::Unbalanced)));
                }
                // It may abort its children, whose locks come in an order of their own: one at a time.
                Look::Parent(id) => alone.push(ScopeEnd { id: *id, closed: None, outputs: None }),
            }
        }
        match self.finish(client, &plain, advisory).await {
            Ok(answers) => finished.extend(answers.into_iter().map(|(id, answer)| (id, Ok(answer)))),
            // A group that cannot be finished is taken apart.
            Err(_) => alone.extend(plain),
        }
        for end in alone {
            finished.push((end.id, self.finish_one(client, end, advisory).await));
        }
    }

    async fn report_unbalanced(&self, client: &deadpool_postgres::Object, found: &Unbalanced) {
        self.metrics.batches_unbalanced.inc();
        tracing::error!(
            batch = found.id,
            missing = found.missing.len(),
            first_missing = found.missing.first(),
            doubled = found.doubled,
            outside = found.outside,
            "the lines of a batch do not add up; it stays open, and the sweep lets missing lines run again"
        );
        if let Err(error) = events::record_unbalanced(&***client, found).await {
            tracing::warn!(
                batch = found.id,
                error = describe(&error),
                "no event was written of a batch that does not add up"
            );
        }
    }

    async fn finish_one(
        &self,
        client: &mut deadpool_postgres::Object,
        end: ScopeEnd<'_>,
        advisory: Advisory,
    ) -> Result<Completion, CompleteError> {
        let answers = self.finish(client, &[end], advisory).await?;
        Ok(answers.first().map_or(Completion::Missing, |(_, answer)| *answer))
    }

    async fn finish(
        &self,
        client: &mut deadpool_postgres::Object,
        ends: &[ScopeEnd<'_>],
        advisory: Advisory,
    ) -> Result<Vec<(i64, Completion)>, CompleteError> {
        if ends.is_empty() {
            return Ok(Vec::new());
        }
        let failed = |source| CompleteError::Query { id: ends.first().map_or(0, |end| end.id), source };
        let began = Instant::now();
        failpoint!("complete.counted", client, failed);
        let answers = batches::complete(client, ends, advisory).await.map_err(failed)?;
        failpoint!("complete.committed", client, failed);
        for (id, _) in answers.iter().filter(|(_, answer)| *answer == Completion::Completed) {
            let rows =
                ends.iter().find(|end| end.id == *id).and_then(|end| end.closed).map(|closed| closed.rows);
            self.metrics.batches_completed.inc();
            self.metrics.walk.completions.observe(began.elapsed().as_secs_f64());
            tracing::info!(scope = id, rows, "finished");
        }
        Ok(answers)
    }

    /// After the commit, outside every lock: the cache is a courtesy, and its failure does no harm.
    async fn fill_cache(&self, ids: &[i64]) {
        let Some(cache) = &self.cache else { return };
        for id in ids {
            let progress = async {
                let client = self.store.general.get().await?;
                batches::progress(&**client, *id)
                    .await
                    .map_err(|source| CompleteError::Query { id: *id, source })
            };
            match progress.await {
                Ok(Some(progress)) => cache.put(&progress).await,
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(scope = id, error = describe(&error), "the status cache was not written")
                }
            }
        }
    }

    /// What uploads that were given up have left is removed, as far as that goes within the time there is.
    async fn wait_for_cleanup(&self) {
        if tokio::time::timeout(CLEANUP_LIMIT, self.uploader.objects.wait_for_cleanup()).await.is_err() {
            tracing::warn!("unfinished uploads are left behind: the store does not answer");
        }
    }

    /// The scopes to look at after these ended; the sweep finds them when this question fails.
    async fn parents_of(&self, ids: &[i64]) -> Vec<i64> {
        let asked = async {
            let client = self.store.general.get().await.ok()?;
            batches::parents_of(&client, ids).await.ok()
        };
        asked.await.unwrap_or_default()
    }
}

/// The first hears why, the others that they were tried with it.
fn all_failed(ids: &[i64], error: CompleteError) -> Vec<Finished> {
    let mut error = Some(error);
    ids.iter().map(|id| (*id, Err(error.take().unwrap_or(CompleteError::WithOthers { id: *id })))).collect()
}

/// Less than the supervisor allows a stage that was asked to give back.
const CLEANUP_LIMIT: Duration = Duration::from_secs(3);
