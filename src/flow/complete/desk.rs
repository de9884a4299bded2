//! The desk of the check loop: which scopes were asked for, which are being looked at, and which rest.
//!
//! A scope that cannot be finished now, for a reason of its own, rests by itself, longer each time; a database that is away
//! pauses everything.

use super::{
    CompleteError, Completer, Finished,
    lane::UploadLane,
    sort::{Sorted, sort_apart},
};
use crate::{
    backoff,
    error_text::describe,
    failpoint::is_mutant,
    store::{
        batches::{Completion, Over},
        facts::{self, Budget},
        query::QueryError,
    },
};
use futures::{FutureExt, future::BoxFuture, stream::FuturesUnordered};
use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};
use tokio::time::Instant;

/// Looks side by side: each takes a connection from the fibers that read rows.
const SIDE_BY_SIDE: usize = 2;
/// Scopes of one look: finished by one transaction.
const AT_ONCE: usize = 64;
/// The rest of a scope that could not be finished: doubled with each further failure, and never longer.
const SHORTEST_REST: Duration = Duration::from_millis(200);
const LONGEST_REST: Duration = Duration::from_secs(30);
/// The uploads that may find another worker at it before the lock of that worker is not believed any more.
const BUSY_UPLOADS: u32 = 3;

pub(super) type Jobs = FuturesUnordered<BoxFuture<'static, Done>>;

/// What a job came to.
pub(super) enum Done {
    Sorted {
        asked: BTreeSet<i64>,
        found: Result<Sorted, CompleteError>,
    },
    Looked {
        finished: Vec<Finished>,
        completed: Vec<i64>,
        parents: Vec<i64>,
    },
    Uploaded {
        id: i64,
        answer: Result<Completion, CompleteError>,
        parents: Vec<i64>,
    },
    /// Ended scopes are in the status cache, as far as it could be reached.
    Cached,
    /// The batch may be asked again at once, or only after a rest.
    Budget {
        id: i64,
        answer: Result<Budget, QueryError>,
    },
}

/// What has been asked for, and what is being done about it.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) pending: BTreeSet<i64>,
    /// One cheap question about many scopes is under way.
    sorting: bool,
    /// Over, and not looked at yet.
    ready: BTreeSet<i64>,
    /// Looks under way.
    looks: usize,
    /// By scope being finished: whether it was asked for again meanwhile.
    under_way: HashMap<i64, bool>,
    /// Of those, the ones that have files to upload.
    lane: UploadLane,
    /// Ended scopes that are being put into the status cache.
    caching: usize,
    /// Budgets that are being checked.
    budgets: BTreeSet<i64>,
    /// Scopes that could not be finished, or asked, for a reason of their own.
    resting: HashMap<i64, Rest>,
    pub(super) failures: u32,
    pub(super) paused_until: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    due: Instant,
    failures: u32,
}

impl Default for Desk {
    fn default() -> Self {
        Self {
            pending: BTreeSet::new(),
            sorting: false,
            ready: BTreeSet::new(),
            looks: 0,
            under_way: HashMap::new(),
            lane: UploadLane::default(),
            caching: 0,
            budgets: BTreeSet::new(),
            resting: HashMap::new(),
            failures: 0,
            paused_until: Instant::now(),
        }
    }
}

impl Desk {
    pub(super) fn ask(&mut self, id: i64) {
        if let Some(again) = self.under_way.get_mut(&id) {
            *again = !is_mutant("no_dirty_bit");
        } else if !self.ready.contains(&id) && !self.is_at_rest(id) {
            // Otherwise its look is still to come and will see what this request is about.
            self.pending.insert(id);
        }
    }

    pub(super) fn start_jobs(&mut self, completer: &Completer, jobs: &mut Jobs) {
        if self.paused_until > Instant::now() {
            return;
        }
        self.wake_rested();
        if !self.sorting && !self.pending.is_empty() {
            self.sorting = true;
            jobs.push(sort(completer.clone(), std::mem::take(&mut self.pending)).boxed());
        }
        while let Some((id, failures)) = self.lane.next() {
            jobs.push(upload(completer.clone(), id, failures >= BUSY_UPLOADS).boxed());
        }
        while self.looks < SIDE_BY_SIDE && !self.ready.is_empty() {
            let ids: Vec<i64> = std::iter::from_fn(|| self.ready.pop_first()).take(AT_ONCE).collect();
            self.under_way.extend(ids.iter().map(|id| (*id, false)));
            self.looks += 1;
            jobs.push(look(completer.clone(), ids).boxed());
        }
    }

    pub(super) fn note(&mut self, done: Done, completer: &Completer, jobs: &mut Jobs) {
        match done {
            Done::Sorted { asked, found: Ok(Sorted { over, spent, refused }) } => {
                self.sorting = false;
                self.failures = 0;
                // What is not over, and not spent, has no reason to rest.
                let is_found = |id: &i64| {
                    over.iter().any(|over| over.id == *id) || spent.contains(id) || refused.contains(id)
                };
                self.resting.retain(|id, _| !asked.contains(id) || is_found(id));
                refused.into_iter().for_each(|id| self.rest(id));
                // One that is being finished just now has its own word about being asked for again.
                for Over { id, outputs } in over {
                    match self.under_way.get_mut(&id) {
                        Some(again) => *again = !is_mutant("no_dirty_bit"),
                        None if outputs => self.enter_lane(id),
                        None => _ = self.ready.insert(id),
                    }
                }
                for id in spent {
                    if self.budgets.insert(id) {
                        jobs.push(check_budget(completer.clone(), id).boxed());
                    }
                }
            }
            Done::Sorted { asked, found: Err(error) } => {
                self.sorting = false;
                if self.failures == 0 {
                    tracing::warn!(error = describe(&error), "scopes could not be looked at; trying again");
                }
                self.pending.extend(asked);
                self.pause();
            }
            Done::Cached => self.caching -= 1,
            Done::Looked { finished, completed, parents } => {
                self.looks -= 1;
                self.cache(completed, completer, jobs);
                for (id, answer) in finished {
                    match answer {
                        Ok(Completion::NeedsUpload) => self.enter_lane(id),
                        answer => self.looked(id, &answer),
                    }
                }
                parents.into_iter().for_each(|parent| self.ask(parent));
            }
            Done::Uploaded { id, answer: Err(CompleteError::Outputs { source, .. }), .. } => {
                // It rests in the lane, which has logged why.
                self.lane.failed(id, &source);
            }
            Done::Uploaded { id, answer, parents } => {
                let completed = matches!(answer, Ok(Completion::Completed));
                self.lane.left(id, completed);
                self.cache(completed.then_some(id).into_iter().collect(), completer, jobs);
                self.looked(id, &answer);
                parents.into_iter().for_each(|parent| self.ask(parent));
            }
            Done::Budget { id, answer } => self.budget_checked(id, answer),
        }
    }

    fn budget_checked(&mut self, id: i64, answer: Result<Budget, QueryError>) {
        self.budgets.remove(&id);
        match answer {
            Ok(Budget::Busy) => self.rest(id),
            Ok(Budget::Stopped) => {
                tracing::warn!(batch = id, "more rows failed than the batch allows; it was stopped");
                self.rested(id);
                self.ask(id);
            }
            Ok(Budget::Canary) => {
                tracing::info!(batch = id, "the canary of a batch has ended");
                self.rested(id);
                self.ask(id);
            }
            Ok(Budget::Within { .. }) => self.rested(id),
            Err(error) => {
                tracing::warn!(batch = id, error = describe(&error), "a budget could not be checked");
                self.rest(id);
            }
        }
    }

    /// Beside everything else: a cache that does not answer delays no end.
    fn cache(&mut self, completed: Vec<i64>, completer: &Completer, jobs: &mut Jobs) {
        if !completed.is_empty() && completer.cache.is_some() {
            self.caching += 1;
            let completer = completer.clone();
            jobs.push(async move { completer.fill_cache(&completed).await }.map(|()| Done::Cached).boxed());
        }
    }

    /// A scope was looked at: what follows for it.
    fn looked(&mut self, id: i64, answer: &Result<Completion, CompleteError>) {
        report(id, answer);
        let again = self.under_way.remove(&id) == Some(true);
        match answer {
            Err(CompleteError::Connect(_) | CompleteError::WithOthers { .. }) => {
                self.pending.insert(id);
                self.pause();
            }
            // A reason of its own: it rests, the others go on.
            Err(CompleteError::Query { .. } | CompleteError::Contended { .. }) => self.rest(id),
            _ => {
                self.rested(id);
                if again {
                    self.pending.insert(id);
                }
            }
        }
    }

    fn rest(&mut self, id: i64) {
        let failures = self.resting.get(&id).map_or(0, |rest| rest.failures) + 1;
        let due = Instant::now() + backoff::delay(SHORTEST_REST, LONGEST_REST, failures);
        self.resting.insert(id, Rest { due, failures });
    }

    fn rested(&mut self, id: i64) {
        self.resting.remove(&id);
    }

    /// It will be asked about when its rest is over, which serves this request too.
    fn is_at_rest(&self, id: i64) -> bool {
        self.resting.get(&id).is_some_and(|rest| rest.due > Instant::now())
    }

    /// Those whose rest is over are asked about again; how often they failed is remembered until they are finished.
    fn wake_rested(&mut self) {
        let now = Instant::now();
        for (id, rest) in &mut self.resting {
            if rest.due <= now && !self.under_way.contains_key(id) && !self.budgets.contains(id) {
                self.pending.insert(*id);
                rest.due = now + LONGEST_REST;
            }
        }
    }

    /// When something can be started, as far as that is known.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = self.resting.values().map(|rest| rest.due).chain(self.lane.next_due()).min();
        // Nothing is started during a pause.
        due.map(|due| due.max(self.paused_until))
    }

    fn enter_lane(&mut self, id: i64) {
        self.under_way.entry(id).or_insert(false);
        self.lane.enter(id);
    }

    pub(super) fn abandon_resting(&mut self) {
        let resting = self.lane.abandon_resting();
        if !resting.is_empty() {
            tracing::warn!(
                batches = resting.len(),
                "outputs could not be uploaded; another worker's sweep will try"
            );
        }
        self.under_way.retain(|id, _| !resting.contains(id));
        self.resting.clear();
    }

    fn pause(&mut self) {
        self.failures += 1;
        self.paused_until = Instant::now() + backoff::of_database(self.failures);
    }

    /// Nothing can be started before the pause is over.
    pub(super) fn is_waiting(&self) -> bool {
        (!self.pending.is_empty() || !self.ready.is_empty()) && self.paused_until > Instant::now()
    }

    pub(super) fn has_work(&self) -> bool {
        self.sorting
            || !self.pending.is_empty()
            || !self.ready.is_empty()
            || !self.under_way.is_empty()
            || !self.budgets.is_empty()
            || self.caching > 0
    }
}

/// One cheap question for many scopes; most of them are not over.
async fn sort(completer: Completer, asked: BTreeSet<i64>) -> Done {
    let ids: Vec<i64> = asked.iter().copied().collect();
    Done::Sorted { asked, found: sort_apart(&completer, ids).await }
}

/// Stops a batch whose budget is spent, and judges a canary that has ended; it does not wait for a lock.
async fn check_budget(completer: Completer, id: i64) -> Done {
    let answer = async { facts::check_budget(&completer.store.general.get().await?, id).await }.await;
    Done::Budget { id, answer }
}

/// Finishes scopes; the next to look at are then their parents.
async fn look(completer: Completer, ids: Vec<i64>) -> Done {
    let finished = completer.complete_all(ids).await;
    let is_completed =
        |answer: &Result<Completion, CompleteError>| matches!(answer, Ok(Completion::Completed));
    let completed: Vec<i64> =
        finished.iter().filter(|(_, answer)| is_completed(answer)).map(|(id, _)| *id).collect();
    let parents = if completed.is_empty() { Vec::new() } else { completer.parents_of(&completed).await };
    Done::Looked { finished, completed, parents }
}

/// Finishes one batch with its files.
async fn upload(completer: Completer, id: i64, insist: bool) -> Done {
    let answer = completer.complete_with_outputs(id, insist).await;
    let parents = match answer {
        Ok(Completion::Completed) => completer.parents_of(&[id]).await,
        _ => Vec::new(),
    };
    Done::Uploaded { id, answer, parents }
}

fn report(id: i64, answer: &Result<Completion, CompleteError>) {
    match answer {
        Ok(answer) => tracing::debug!(scope = id, ?answer, "looked at"),
        Err(error @ CompleteError::Contended { .. }) => tracing::info!(scope = id, "{error}"),
        Err(error) => {
            tracing::warn!(scope = id, error = describe(error), "could not be finished; trying again")
        }
    }
}
