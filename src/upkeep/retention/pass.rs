//! One pass, of the daemon or of `musterd prune`: first the rows, then the tasks, then the events.

use super::RetentionError;
use crate::{
    error_text::describe,
    failpoint,
    flow::{archive, outputs},
    json::Json,
    metrics::Metrics,
    objects::{self, ObjectError},
    store::{
        Store,
        retention::{self, Due, Page, Step, Wanted},
    },
};
use deadpool_postgres::Object;
use serde::Serialize;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Batches looked up at a time.
const BATCHES: i32 = 100;
/// Tasks, and events, of one transaction.
const TASKS: i32 = 1_000;
const LONGEST_REST: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Pass {
    pub store: Store,
    pub objects: objects::Store,
    pub metrics: Metrics,
    /// How many times as long as a step takes it rests after it.
    pub rests: f64,
    /// Time after which the walk through all tasks begins at the first one again.
    pub walk_every: Duration,
    pub stop: CancellationToken,
    pub meter: Meter,
}

/// What a pass has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gone {
    pub batches: u64,
    pub rows: u64,
    /// About what those rows took.
    pub bytes: u64,
    pub archived: u64,
    /// Tasks whose payload, result and error were emptied.
    pub bodies: u64,
    /// Tasks and batches of which nothing is left.
    pub records: u64,
    pub events: u64,
    /// Held tasks and batches that were aborted.
    pub abandoned: u64,
    /// Why some data stayed; one reason of possibly many.
    pub trouble: Option<String>,
    /// Another worker does a pass just now; this one ended early.
    pub busy: bool,
}

impl Gone {
    pub fn total(&self) -> u64 {
        self.batches + self.bodies + self.records + self.events + self.abandoned
    }
}

/// How far a pass is, for a progress bar: rows and tasks.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    pub fn done(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

/// Whether to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Go,
    /// Asked to stop, or another worker is at it.
    End,
}

impl Pass {
    pub async fn run(&self) -> Result<Gone, RetentionError> {
        let mut gone = Gone::default();
        let Some(wanted) = retention::wanted(&**self.store.general.get().await?).await? else {
            return Ok(gone);
        };
        let ran = self.steps(wanted, &mut gone).await;
        let detail = (gone.total() > 0).then(|| Json::of(&gone).ok()).flatten();
        if let Err(error) = &ran {
            gone.trouble.get_or_insert_with(|| describe(error));
        }
        self.metrics.retention.end_pass(gone.trouble.is_some());
        retention::end_pass(&**self.store.general.get().await?, detail.as_ref(), gone.trouble.as_deref())
            .await?;
        ran.map(|_| gone)
    }

    async fn steps(&self, wanted: Wanted, gone: &mut Gone) -> Result<On, RetentionError> {
        if self.batches(wanted, gone).await? == On::End || self.tasks(gone).await? == On::End {
            return Ok(On::End);
        }
        self.events(gone).await
    }

    async fn batches(&self, wanted: Wanted, gone: &mut Gone) -> Result<On, RetentionError> {
        let mut after = 0;
        loop {
            let found = retention::due(&**self.store.general.get().await?, after, BATCHES).await?;
            let Some(last) = found.last() else { return Ok(On::Go) };
            after = last.id;
            for due in &found {
                if self.batch(wanted, due, gone).await? == On::End {
                    return Ok(On::End);
                }
            }
        }
    }

    async fn batch(&self, wanted: Wanted, due: &Due, gone: &mut Gone) -> Result<On, RetentionError> {
        if !due.is_going {
            let archive = match wanted.archive {
                false => None,
                true => {
                    let writing = archive::archive(&self.store.uploads, &self.objects, due);
                    match self.stop.run_until_cancelled(writing).await {
                        None => return Ok(On::End),
                        Some(Ok(archive)) => Some(archive),
                        Some(Err(error)) => {
                            self.stays(due, "archived", &error, gone);
                            return Ok(self.rest(Duration::ZERO).await);
                        }
                    }
                }
            };
            failpoint!("retention.archived");
            gone.archived += u64::from(archive.is_some());
            match retention::give_up(&mut *self.client().await?, due, archive.as_ref()).await? {
                Step::Busy => return Ok(self.busy(gone)),
                Step::Done(false) => return Ok(On::Go),
                Step::Done(true) => {}
            }
            failpoint!("retention.given_up");
        }
        if wanted.outputs {
            let deleted = self.objects.delete_folder(&outputs::home(due.id, due.uid)?).await;
            match deleted {
                Ok(()) => retention::outputs_gone(&**self.store.general.get().await?, due.id).await?,
                Err(error) => {
                    self.stays(due, "rid of its output files", &error, gone);
                    return Ok(self.rest(Duration::ZERO).await);
                }
            }
        }
        self.rows(due, gone).await
    }

    async fn rows(&self, due: &Due, gone: &mut Gone) -> Result<On, RetentionError> {
        let mut from = 1;
        loop {
            let began = Instant::now();
            let bite = match retention::rows(&mut *self.client().await?, due.id, from).await? {
                Step::Busy => return Ok(self.busy(gone)),
                Step::Done(bite) => bite,
            };
            let next = bite.next.unwrap_or(due.rows.saturating_add(1));
            let rows = u64::try_from(next.saturating_sub(from)).unwrap_or_default();
            gone.rows += rows;
            gone.bytes += u64::try_from(bite.bytes).unwrap_or_default();
            self.meter.add(rows);
            self.metrics.retention.rows(rows, u64::try_from(bite.bytes).unwrap_or_default());
            if bite.next.is_none() {
                gone.batches += 1;
                self.metrics.retention.count("batches", 1);
                return Ok(self.rest(began.elapsed()).await);
            }
            // The batch is locked by another transaction: the next pass finds it again.
            if next == from {
                return Ok(On::Go);
            }
            if self.rest(began.elapsed()).await == On::End {
                return Ok(On::End);
            }
            from = next;
        }
    }

    async fn tasks(&self, gone: &mut Gone) -> Result<On, RetentionError> {
        let mut after = retention::next_walk(&**self.store.general.get().await?, self.walk_every).await?;
        loop {
            let began = Instant::now();
            let page = match retention::tasks(&mut *self.client().await?, after, TASKS).await? {
                Step::Busy => return Ok(self.busy(gone)),
                Step::Done(page) => page,
            };
            self.count(&page, gone);
            for id in &page.abandoned {
                if retention::abort_abandoned(&**self.store.general.get().await?, *id).await? {
                    gone.abandoned += 1;
                    self.metrics.retention.count("abandoned", 1);
                    tracing::warn!(id, "aborted a task or batch that was held for too long");
                }
            }
            let Some(last) = page.last else { return Ok(On::Go) };
            if self.rest(began.elapsed()).await == On::End {
                return Ok(On::End);
            }
            after = last;
        }
    }

    fn count(&self, page: &Page, gone: &mut Gone) {
        let [bodies, records] = [page.bodies, page.records].map(|n| u64::try_from(n).unwrap_or_default());
        gone.bodies += bodies;
        gone.records += records;
        self.meter.add(bodies + records);
        self.metrics.retention.count("bodies", bodies);
        self.metrics.retention.count("records", records);
    }

    async fn events(&self, gone: &mut Gone) -> Result<On, RetentionError> {
        let mut after = 0;
        loop {
            let began = Instant::now();
            let (last, events) = match retention::events(&mut *self.client().await?, after, TASKS).await? {
                Step::Busy => return Ok(self.busy(gone)),
                Step::Done(page) => page,
            };
            gone.events += u64::try_from(events).unwrap_or_default();
            self.metrics.retention.count("events", u64::try_from(events).unwrap_or_default());
            let Some(last) = last else { return Ok(On::Go) };
            if self.rest(began.elapsed()).await == On::End {
                return Ok(On::End);
            }
            after = last;
        }
    }

    /// Another batch may do better: this one is named, and tried again by the next pass.
    fn stays(
        &self,
        due: &Due,
        what: &'static str,
        error: &(dyn std::error::Error + 'static),
        gone: &mut Gone,
    ) {
        let error = describe(error);
        tracing::warn!(batch = due.id, error, "a batch could not be {what}; its data stays");
        gone.trouble.get_or_insert_with(|| format!("batch {} could not be {what}: {error}", due.id));
    }

    fn busy(&self, gone: &mut Gone) -> On {
        gone.busy = true;
        On::End
    }

    async fn rest(&self, took: Duration) -> On {
        let rest = took.mul_f64(self.rests).min(LONGEST_REST);
        match self.stop.run_until_cancelled(tokio::time::sleep(rest)).await {
            Some(()) => On::Go,
            None => On::End,
        }
    }

    async fn client(&self) -> Result<Object, RetentionError> {
        Ok(self.store.general.get().await?)
    }
}

impl From<ObjectError> for RetentionError {
    fn from(error: ObjectError) -> Self {
        Self::Key(error)
    }
}
