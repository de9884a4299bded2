//! Who asked for which scope to be looked at, and the loop that looks. No request is lost, none is run twice at once.
//!
//! Nothing is awaited between two polls of the jobs: a job that holds a connection and is not polled would keep it
//! from the one that is waited for.

use super::{CompleteError, Completer, lane::UploadLane};
use crate::{
    backoff,
    periodic::describe,
    pulse::Pulse,
    store::{
        LONGEST_BACKOFF,
        batches::{self, Completion, Over},
    },
};
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

/// Scopes finished side by side: each takes a connection from the fibers that read rows.
const SIDE_BY_SIDE: usize = 2;
/// When nobody asks any more, a database that is away gets this many more tries.
const LAST_TRIES: u32 = 3;

/// Asks for scopes to be looked at. Never waits: asking twice is asking once.
#[derive(Clone, Debug)]
pub struct Checks(mpsc::UnboundedSender<i64>);

impl Checks {
    pub fn ask(&self, scope: i64) {
        // Refused only when the completer has ended, and then the sweep of another worker looks.
        let _ = self.0.send(scope);
    }
}

/// Takes the requests of the whole daemon.
#[derive(Debug)]
pub struct CheckLoop {
    completer: Completer,
    asked: mpsc::UnboundedReceiver<i64>,
    pulse: Pulse,
}

pub fn channel(completer: Completer) -> (Checks, CheckLoop) {
    let (sender, asked) = mpsc::unbounded_channel();
    (Checks(sender), CheckLoop { completer, asked, pulse: Pulse::default() })
}

type Jobs = FuturesUnordered<BoxFuture<'static, Done>>;

/// What a job came to.
enum Done {
    /// Of the scopes asked for, those that are over.
    Sorted { asked: BTreeSet<i64>, over: Result<Vec<Over>, CompleteError> },
    Looked {
        id: i64,
        answer: Result<Completion, CompleteError>,
        parent: Option<i64>,
        /// Whether files were uploaded first, or were to be.
        upload: bool,
    },
}

impl CheckLoop {
    /// Has its turns watched.
    pub fn watched(self, pulse: Pulse) -> Self {
        Self { pulse, ..self }
    }

    /// Looks at what is asked for until nobody can ask any more and nothing is left to look at, or until `now`: then
    /// uploads that are under way are given up.
    pub async fn run(mut self, now: CancellationToken) {
        let mut desk = Desk::default();
        let mut jobs = Jobs::new();
        let mut open = true;
        while open || desk.has_work() {
            self.pulse.turn();
            crate::failpoint!("completer.turn");
            desk.start_jobs(&self.completer, &mut jobs);
            let (paused_until, turn) = (desk.paused_until, desk.lane.next_due());
            tokio::select! {
                asked = self.asked.recv(), if open => match asked {
                    Some(id) => desk.ask(id),
                    None => open = false,
                },
                Some(done) = jobs.next() => desk.note(done),
                () = tokio::time::sleep_until(paused_until), if desk.is_waiting() => {}
                () = tokio::time::sleep_until(turn.unwrap_or(paused_until)), if turn.is_some() => {}
                () = now.cancelled(), if !open => break,
                // Nothing but a sign of life.
                () = tokio::time::sleep(self.pulse.tick()) => {}
                // The pause ended just now.
                else => {}
            }
            while let Ok(id) = self.asked.try_recv() {
                desk.ask(id);
            }
            if !open {
                desk.abandon_resting();
            }
            if !open && desk.failures > LAST_TRIES {
                tracing::warn!(left = desk.pending.len(), "scopes are left to the sweep of another worker");
                break;
            }
        }
        drop(jobs);
        self.pulse.end();
        self.completer.settle().await;
    }
}

/// What has been asked for, and what is being done about it.
#[derive(Debug)]
struct Desk {
    pending: BTreeSet<i64>,
    /// One cheap question about many scopes is under way.
    sorting: bool,
    /// Over, and not looked at yet.
    ready: BTreeSet<i64>,
    /// By scope being finished: whether it was asked for again meanwhile.
    under_way: HashMap<i64, bool>,
    /// Of those, the ones that have files to upload.
    lane: UploadLane,
    failures: u32,
    paused_until: Instant,
}

impl Default for Desk {
    fn default() -> Self {
        Self {
            pending: BTreeSet::new(),
            sorting: false,
            ready: BTreeSet::new(),
            under_way: HashMap::new(),
            lane: UploadLane::default(),
            failures: 0,
            paused_until: Instant::now(),
        }
    }
}

impl Desk {
    fn ask(&mut self, id: i64) {
        match self.under_way.get_mut(&id) {
            Some(again) => *again = true,
            // Its look is still to come and will see what this request is about.
            None if self.ready.contains(&id) => {}
            None => {
                self.pending.insert(id);
            }
        }
    }

    fn start_jobs(&mut self, completer: &Completer, jobs: &mut Jobs) {
        if self.paused_until > Instant::now() {
            return;
        }
        if !self.sorting && !self.pending.is_empty() {
            self.sorting = true;
            jobs.push(sort(completer.clone(), std::mem::take(&mut self.pending)).boxed());
        }
        while let Some(id) = self.lane.next() {
            jobs.push(look(completer.clone(), id, true).boxed());
        }
        while self.looks() < SIDE_BY_SIDE
            && let Some(id) = self.ready.pop_first()
        {
            self.under_way.insert(id, false);
            jobs.push(look(completer.clone(), id, false).boxed());
        }
    }

    fn note(&mut self, done: Done) {
        match done {
            Done::Sorted { over: Ok(over), .. } => {
                self.sorting = false;
                self.failures = 0;
                // One that is being finished just now has its own word about being asked for again.
                for Over { id, outputs } in over {
                    match self.under_way.get_mut(&id) {
                        Some(again) => *again = true,
                        None if outputs => self.enter_lane(id),
                        None => _ = self.ready.insert(id),
                    }
                }
            }
            Done::Sorted { asked, over: Err(error) } => {
                self.sorting = false;
                if self.failures == 0 {
                    tracing::warn!(error = describe(&error), "scopes could not be looked at; trying again");
                }
                self.pending.extend(asked);
                self.pause();
            }
            Done::Looked { id, answer, parent, upload } => {
                match &answer {
                    // It rests in the lane, which has told why.
                    Err(CompleteError::Outputs { source, .. }) => return self.lane.failed(id, source),
                    Ok(Completion::NeedsUpload) => return self.enter_lane(id),
                    _ if upload => self.lane.left(id, matches!(answer, Ok(Completion::Completed))),
                    _ => {}
                }
                report(id, &answer);
                let again = self.under_way.remove(&id) == Some(true);
                let failed = matches!(answer, Err(CompleteError::Connect(_) | CompleteError::Query { .. }));
                if again || failed {
                    self.pending.insert(id);
                }
                if failed {
                    self.pause();
                }
                if let Some(parent) = parent {
                    self.ask(parent);
                }
            }
        }
    }

    fn enter_lane(&mut self, id: i64) {
        self.under_way.entry(id).or_insert(false);
        self.lane.enter(id);
    }

    /// Scopes being finished that have nothing to upload.
    fn looks(&self) -> usize {
        self.under_way.len() - self.lane.len()
    }

    fn abandon_resting(&mut self) {
        let resting = self.lane.abandon_resting();
        if !resting.is_empty() {
            tracing::warn!(
                batches = resting.len(),
                "outputs could not be uploaded; another worker's sweep will try"
            );
        }
        self.under_way.retain(|id, _| !resting.contains(id));
    }

    fn pause(&mut self) {
        self.failures += 1;
        self.paused_until =
            Instant::now() + backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, self.failures);
    }

    /// Nothing can be started before the pause is over.
    fn is_waiting(&self) -> bool {
        (!self.pending.is_empty() || !self.ready.is_empty()) && self.paused_until > Instant::now()
    }

    fn has_work(&self) -> bool {
        self.sorting || !self.pending.is_empty() || !self.ready.is_empty() || !self.under_way.is_empty()
    }
}

/// One cheap question for many scopes; most of them are not over.
async fn sort(completer: Completer, asked: BTreeSet<i64>) -> Done {
    let ids: Vec<i64> = asked.iter().copied().collect();
    let over = async {
        let client = completer.store.general.get().await?;
        let failed = |source| CompleteError::Query { id: ids.first().copied().unwrap_or_default(), source };
        let (over, spent) = batches::worth_a_look(&client, &ids).await.map_err(failed)?;
        for batch in spent {
            tracing::warn!(batch = batch.id, action = ?batch.action, "more rows failed than the batch allows");
            batches::apply_budget(&client, batch).await.map_err(failed)?;
        }
        Ok(over)
    }
    .await;
    Done::Sorted { asked, over }
}

/// Finishes one scope; the next to look at is then its parent.
async fn look(completer: Completer, id: i64, upload: bool) -> Done {
    let answer = match upload {
        true => completer.complete_with_outputs(id).await,
        false => completer.complete(id).await,
    };
    let parent = match answer {
        Ok(Completion::Completed) => completer.parent_of(id).await,
        _ => None,
    };
    Done::Looked { id, answer, parent, upload }
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
