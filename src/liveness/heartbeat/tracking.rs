//! Keeps the set in Redis equal to what fibers run: added when a fiber begins, removed only after its end was committed.
//!
//! It compares, it does not follow: whatever was lost on the way, the next comparison repairs, and the walk of a row
//! never waits for Redis.

use super::{Heartbeat, Roll};
use crate::{
    held::Holding,
    liveness::{roll::Away, tracked},
    worker_id::WorkerId,
};
use std::{collections::HashSet, time::Duration};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Changes of this long go to Redis together.
const GATHER: Duration = Duration::from_millis(50);
/// When Redis was away, how long until it is asked again.
const AGAIN: Duration = Duration::from_secs(1);

pub(super) async fn track(
    heart: &Heartbeat,
    roll: Option<&Roll>,
    missing: &Notify,
    stop: &CancellationToken,
) {
    let Some(roll) = roll else { return };
    let mut changes = heart.held.watch();
    let mut copy = Copy { roll, rows_ttl: heart.config.rows_ttl, of: heart.identity.id(), written: None };
    loop {
        let pause = match copy.update(heart).await {
            Ok(()) => GATHER,
            Err(error) => {
                tracing::debug!(%error, "what is in hand was not written to Redis");
                // What is there now is not known.
                copy.written = None;
                AGAIN
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
        let again = copy.written.is_none();
        tokio::select! {
            () = stop.cancelled() => break,
            _ = changes.changed(), if !again => {}
            () = missing.notified() => copy.written = None,
            () = std::future::ready(()), if again => {}
        }
    }
    // The last ends are committed by now: they are taken off whatever the shutdown says.
    if let Err(error) = copy.update(heart).await {
        tracing::debug!(%error, "the set in Redis is left as it is");
    }
}

struct Copy<'a> {
    roll: &'a Roll,
    rows_ttl: Duration,
    of: WorkerId,
    /// What the set holds; `None` when that is not known.
    written: Option<HashSet<String>>,
}

impl Copy<'_> {
    async fn update(&mut self, heart: &Heartbeat) -> Result<(), Away> {
        let id = heart.identity.id();
        if id != self.of {
            // Another name, another set; the old one is left to the worker that recovers it.
            self.of = id;
            self.written = None;
        }
        let held: HashSet<String> = heart.held.running().into_iter().map(member).collect();
        let known = match self.written.take() {
            Some(known) => known,
            None => {
                self.roll.forget_rows(self.of.as_str()).await?;
                HashSet::new()
            }
        };
        let ended: Vec<String> = known.difference(&held).cloned().collect();
        let added: Vec<String> = held.difference(&known).cloned().collect();
        self.roll.untrack(&self.of, ended).await?;
        self.roll.track(&self.of, added, self.rows_ttl).await?;
        self.written = Some(held);
        Ok(())
    }
}

/// What it is, of which batch or which task, and by which token.
fn member(holding: Holding) -> String {
    match holding {
        Holding::Block(block) => tracked::block(block.batch, block.token),
        Holding::Task(task) => tracked::task(task.id, task.token),
    }
}
