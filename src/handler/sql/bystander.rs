//! Who broke a connection. A session that runs nothing stands beside those of the handlers: what became of it in the same
//! moment tells the loss of one connection from a crash of the server, and that from a network or a machine that is gone.
//!
//! When a backend crashes, PostgreSQL ends all others and announces it to each of them. So the work whose session heard the
//! announcement is innocent, and the work whose session heard nothing while the bystander's did is what crashed.

use crate::store::{
    connect::{Ending, Target, Watched},
    procedures,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// What the end of a connection says about the work that ran on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// This connection alone was lost, or its backend is the one that crashed: the work may be what did it.
    Own,
    /// The server, the network or another session: not this work.
    Elsewhere,
    /// There was no bystander in that moment.
    Unknown,
}

/// How long the server has to end the other sessions after the first one.
const MOMENT: Duration = Duration::from_secs(1);
/// A session that does not react to the end of all sessions is killed after five seconds, and then announces nothing.
const SLOW: Duration = Duration::from_secs(4);
/// After a failed connection the next try is not before this.
const REST: Duration = Duration::from_secs(5);

/// One idle session, opened with the first work and again when it was lost.
#[derive(Debug)]
pub(super) struct Bystander {
    target: Target,
    place: Mutex<Place>,
}

#[derive(Debug, Default)]
struct Place {
    session: Option<Arc<Watched>>,
    failed_at: Option<Instant>,
}

impl Bystander {
    /// `target` leads to the server itself: behind a transaction pooler a session that is idle is no session.
    pub(super) fn new(target: Target) -> Self {
        Self { target, place: Mutex::default() }
    }

    /// The session that is there now, before the work begins.
    pub(super) async fn present(&self) -> Option<Arc<Watched>> {
        let mut place = self.place.lock().await;
        if place.session.as_ref().is_some_and(|session| !session.is_closed()) {
            return place.session.clone();
        }
        if place.failed_at.is_some_and(|at| at.elapsed() < REST) {
            return None;
        }
        let opened = self.target.watched("musterd bystander").await;
        if let Err(error) = &opened {
            tracing::debug!(
                error = error as &dyn std::error::Error,
                "no session beside those of sql handlers"
            );
        }
        place.failed_at = opened.is_err().then(Instant::now);
        place.session = opened.ok().map(Arc::new);
        place.session.clone()
    }
}

/// What the loss of a connection means that ended in this way, beside the bystander that was there when its work began.
pub(super) async fn loss(ending: &Ending, bystander: Option<&Watched>) -> Loss {
    if ending.announced_at().is_some() {
        return Loss::Elsewhere;
    }
    let Some(bystander) = bystander else { return Loss::Unknown };
    let lost_at = ending.ended_at().unwrap_or_else(Instant::now);
    // The server ends the others a moment after the first: one that answers at once proves nothing.
    let ended = tokio::time::timeout(MOMENT, bystander.ending().wait()).await;
    if ended.is_err() && answers(bystander).await {
        return Loss::Own;
    }
    let other = bystander.ending();
    match (other.announced_at(), other.ended_at()) {
        (Some(announced), _) if lost_at.saturating_duration_since(announced) < SLOW => Loss::Own,
        (Some(_), _) => Loss::Elsewhere,
        // It was gone before, for a reason of its own.
        (None, Some(ended)) if lost_at.saturating_duration_since(ended) > SLOW => Loss::Unknown,
        (None, _) => Loss::Elsewhere,
    }
}

async fn answers(bystander: &Watched) -> bool {
    let asked = tokio::time::timeout(MOMENT, procedures::answers(bystander)).await;
    matches!(asked, Ok(Ok(())))
}
