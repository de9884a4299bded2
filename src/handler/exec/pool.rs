//! The processes of one handler: at most so many, kept between blocks, replaced when they are worn.
//!
//! A program that has written more than it was asked for may do so again, at any time. From then on a process of it serves one block or
//! task only, unless its replies name what they answer: no line of an earlier request can be taken for a reply to a later one.
//!
//! A program that cannot work makes its handler rest, longer each time, and blames no row: what waits for it is given back.

use super::{
    MAX_REPLY_BYTES,
    blame::{Blame, Suspects},
    lease::{Lease, Loss},
    process::Process,
    program::Program,
};
use crate::{backoff, handler::Config};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The first wait before a program that cannot work is started again, and the longest.
const RESTART: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

#[derive(Clone, Debug)]
pub(super) struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    program: Program,
    max_reply_bytes: usize,
    max_requests: Option<u64>,
    max_age: Option<Duration>,
    places: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Process>,
    /// Processes in a row that were lost before they had answered anything.
    losses: u32,
    /// No process is started before this.
    not_before: Option<Instant>,
    /// What the last of them ended with.
    trouble: String,
    suspects: Suspects,
    has_warned_of_outage: bool,
    /// A process has written more than it was asked for.
    has_spare_lines: bool,
}

/// Why no process works now, and for how long it is pointless to start another.
#[derive(Clone, Debug)]
pub(super) struct Outage {
    pub(super) error: String,
    pub(super) after: Duration,
}

impl Pool {
    pub(super) fn new(program: Program, config: &Config, most: usize) -> Self {
        Self(Arc::new(Inner {
            program,
            max_reply_bytes: config.max_reply_bytes.unwrap_or(MAX_REPLY_BYTES),
            max_requests: config.max_requests.map(|most| u64::from(most.get())),
            max_age: config.max_age,
            places: Arc::new(Semaphore::new(most.max(1))),
            state: Mutex::default(),
        }))
    }

    pub(super) fn max_reply_bytes(&self) -> usize {
        self.0.max_reply_bytes
    }

    pub(super) fn max_requests(&self) -> Option<u64> {
        self.0.max_requests
    }

    /// A process that no other caller uses.
    pub(super) async fn lease(&self) -> Result<Lease, Outage> {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&self.0.places).acquire_owned().await else {
            return Err(Outage { error: "no place".to_owned(), after: RESTART.0 });
        };
        while let Some(process) = self.pop_idle() {
            if self.must_not_be_reused(&process) {
                process.retire();
            } else if self.is_fit(&process) {
                return Ok(Lease::new(process, self.clone(), place));
            }
        }
        if let Some(after) = self.rest() {
            return Err(Outage { error: self.lock().trouble.clone(), after });
        }
        let started = self.0.program.start().await;
        match started.and_then(|owned| Process::new(&self.0.program.handler, owned)) {
            Ok(process) => Ok(Lease::new(process, self.clone(), place)),
            Err(error) => {
                self.lost();
                let reason = format!("cannot start {}: {error}", self.0.program.name());
                Err(self.outage(&reason, reason.clone()))
            }
        }
    }

    fn pop_idle(&self) -> Option<Process> {
        self.lock().idle.pop()
    }

    /// Takes a process back, if it can serve another request.
    pub(super) fn give_back(&self, process: Process, place: OwnedSemaphorePermit) {
        let is_worn = self.0.max_requests.is_some_and(|most| process.requests >= most)
            || self.0.max_age.is_some_and(|most| process.age() >= most);
        // Asked first, whatever becomes of this process: a spare line says something about the others of its program, too.
        let is_fit = self.is_fit(&process);
        if is_worn || self.must_not_be_reused(&process) {
            process.retire();
        } else if is_fit {
            self.lock().idle.push(process);
        }
        drop(place);
    }

    /// Whether it lives and has said nothing that was not asked for.
    fn is_fit(&self, process: &Process) -> bool {
        if !process.is_alive() {
            return false;
        }
        let is_silent = process.is_silent();
        if !is_silent {
            self.wrote_too_much(process.last_request());
        }
        is_silent
    }

    /// Whether the next reply could be one of an earlier request.
    fn must_not_be_reused(&self, process: &Process) -> bool {
        process.requests > 0 && !process.names_requests && self.lock().has_spare_lines
    }

    /// A process has written more than it was asked for; the request that it was given last, by its batch or task.
    pub(super) fn wrote_too_much(&self, last: i64) {
        if !std::mem::replace(&mut self.lock().has_spare_lines, true) {
            tracing::warn!(
                handler = self.0.program.handler,
                last,
                "the program writes more to stdout than it is asked for: the outcome of its last request may be one of these lines; \
                 from now on each of its processes serves one block or task, unless its replies repeat the idempotency_key"
            );
        }
    }

    /// A process was lost that had answered nothing. The next one waits longer if this goes on.
    pub(super) fn lost(&self) {
        let mut state = self.lock();
        state.losses = state.losses.saturating_add(1);
        // The first loss after good work costs nothing.
        if state.losses > 1 {
            let (base, max) = RESTART;
            state.not_before = Some(Instant::now() + backoff::delay(base, max, state.losses - 1));
        }
    }

    /// A process has answered for the first time: the program works.
    pub(super) fn answered(&self) {
        let mut state = self.lock();
        (state.losses, state.not_before) = (0, None);
        state.suspects.program_works();
        if std::mem::take(&mut state.has_warned_of_outage) {
            tracing::info!(handler = self.0.program.handler, "the program works again");
        }
    }

    /// Whether the program is to blame, or the row or task that a process died with.
    pub(super) fn judge(&self, request: (i64, Option<i32>), loss: &Loss) -> Blame {
        if !loss.silent {
            return Blame::Request;
        }
        self.lock().suspects.judge(request, loss.had_read)
    }

    /// The program does not work: said once, until it does again.
    pub(super) fn outage(&self, reason: &str, error: String) -> Outage {
        let mut state = self.lock();
        state.trouble.clone_from(&error);
        let until = *state.not_before.get_or_insert_with(|| Instant::now() + RESTART.0);
        if !std::mem::replace(&mut state.has_warned_of_outage, true) {
            let handler = &self.0.program.handler;
            tracing::warn!(
                handler,
                reason,
                "the program does not work; what it is to do waits, and no attempt is charged"
            );
        }
        Outage { error, after: until.saturating_duration_since(Instant::now()).max(RESTART.0 / 2) }
    }

    /// How long it is pointless to start another process.
    pub(super) fn rest(&self) -> Option<Duration> {
        let state = self.lock();
        let until = state.not_before.filter(|_| state.idle.is_empty())?;
        until.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
