//! Which scopes are to be looked at, and the loop that looks. No request is lost, none is run twice at once, and a scope that
//! cannot be finished now rests by itself.
//!
//! Nothing is awaited between two polls of the jobs: a job that holds a connection and is not polled would keep it
//! from the one that is waited for.

use super::{
    Completer,
    desk::{Desk, Jobs},
};
use crate::pulse::Pulse;
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// When no part can ask any more, a database that is away gets this many more tries.
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

impl CheckLoop {
    /// Has its turns watched.
    pub fn watched(self, pulse: Pulse) -> Self {
        Self { pulse, ..self }
    }

    /// Looks at what is asked for until no part can ask any more and nothing is left to look at, or until `now`: then
    /// uploads that are under way are given up.
    pub async fn run(mut self, now: CancellationToken) {
        let mut desk = Desk::default();
        let mut jobs = Jobs::new();
        let mut open = true;
        while open || desk.has_work() {
            self.pulse.turn();
            crate::failpoint!("completer.turn");
            desk.start_jobs(&self.completer, &mut jobs);
            let (paused_until, turn) = (desk.paused_until, desk.next_due());
            tokio::select! {
                asked = self.asked.recv(), if open => match asked {
                    Some(id) => desk.ask(id),
                    None => open = false,
                },
                Some(done) = jobs.next() => desk.note(done, &self.completer, &mut jobs),
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
        self.completer.wait_for_cleanup().await;
    }
}
