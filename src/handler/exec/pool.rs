//! The processes of one handler: at most so many, kept between blocks, started anew with patience.

use super::{
    RESTART,
    process::{Lease, Process, Program},
};
use crate::backoff;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[derive(Clone, Debug)]
pub(super) struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    program: Program,
    places: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Process>,
    /// Processes in a row that were lost before they had answered anything.
    losses: u32,
    /// Nobody is started before this.
    not_before: Option<Instant>,
}

impl Pool {
    pub(super) fn new(program: Program, most: usize) -> Self {
        let places = Arc::new(Semaphore::new(most.max(1)));
        Self(Arc::new(Inner { program, places, state: Mutex::default() }))
    }

    /// A process that nobody else uses; the error says why there is none.
    pub(super) async fn lease(&self) -> Result<Lease, String> {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&self.0.places).acquire_owned().await else {
            return Err("no place".into());
        };
        let idle = self.lock().idle.pop();
        if let Some(process) = idle.filter(Process::is_alive) {
            return Ok(Lease::new(process, self.clone(), place));
        }
        self.patience().await;
        match self.0.program.start().await {
            Ok(process) => Ok(Lease::new(process, self.clone(), place)),
            Err(error) => {
                self.lost();
                Err(format!("cannot start {}: {error}", self.0.program.name()))
            }
        }
    }

    pub(super) fn give_back(&self, process: Process, place: OwnedSemaphorePermit) {
        let mut state = self.lock();
        state.losses = 0;
        state.not_before = None;
        state.idle.push(process);
        drop(state);
        drop(place);
    }

    /// A process was lost; the next one waits longer if this goes on.
    pub(super) fn lost(&self) {
        let mut state = self.lock();
        state.losses += 1;
        // The first loss after good work costs nothing.
        if state.losses > 1 {
            let (base, max) = RESTART;
            state.not_before = Some(Instant::now() + backoff::delay(base, max, state.losses - 1));
        }
    }

    /// A lost process had answered rows before.
    pub(super) fn had_answered(&self) {
        self.lock().losses = 0;
    }

    async fn patience(&self) {
        let until = self.lock().not_before;
        if let Some(until) = until {
            tokio::time::sleep_until(until.into()).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
