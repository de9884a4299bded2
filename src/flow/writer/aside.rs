//! Writes that cannot be done now: kept, still held, and tried again beside the flushes. One of them holds up only itself.

use super::{Acknowledge, Note, flusher::Answer, flusher::Flusher};
use crate::{backoff, store::flush::BlockWrite};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Blocks aside at a time; beyond it a flush waits for one of them.
const MOST: usize = 64;

/// Further writes of the blocks that are aside, by token.
type Queues = Arc<Mutex<HashMap<Uuid, VecDeque<(BlockWrite, Note)>>>>;

#[derive(Debug)]
pub(super) struct Aside {
    flusher: Flusher,
    after: Acknowledge,
    queues: Queues,
    tasks: JoinSet<()>,
}

impl Aside {
    pub(super) fn new(flusher: Flusher, after: Acknowledge) -> Self {
        Self { flusher, after, queues: Queues::default(), tasks: JoinSet::new() }
    }

    /// Takes a write whose block is aside already; gives back any other.
    pub(super) fn join(&self, write: BlockWrite, note: Note) -> Option<(BlockWrite, Note)> {
        match lock(&self.queues).get_mut(&write.block.token) {
            Some(queue) => {
                queue.push_back((write, note));
                None
            }
            None => Some((write, note)),
        }
    }

    /// Puts a write aside; waits when there are too many.
    pub(super) async fn put(&mut self, write: BlockWrite, note: Note, reason: String) {
        tracing::warn!(token = %write.block.token, batch = write.block.batch, rows = write.outcomes.len(), error = reason,
            "a block cannot be written now; it is put aside and tried again, the others go on");
        while self.tasks.try_join_next().is_some() {}
        while self.tasks.len() >= MOST {
            self.tasks.join_next().await;
        }
        let token = write.block.token;
        lock(&self.queues).insert(token, VecDeque::from([(write, note)]));
        let (flusher, after, queues) = (self.flusher.clone(), self.after.clone(), Arc::clone(&self.queues));
        let gauge = flusher.metrics.batcher.aside.clone();
        gauge.inc();
        self.tasks.spawn(async move {
            write_all(&flusher, &after, &queues, token).await;
            gauge.dec();
        });
    }

    /// Waits until everything is written.
    pub(super) async fn finish(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Writes of one block in their order, each until it is done.
async fn write_all(flusher: &Flusher, after: &Acknowledge, queues: &Queues, token: Uuid) {
    loop {
        let next = {
            let mut queues = lock(queues);
            let next = queues.get_mut(&token).and_then(VecDeque::pop_front);
            if next.is_none() {
                queues.remove(&token);
            }
            next
        };
        let Some((mut write, mut note)) = next else { return };
        let mut tries = 0;
        loop {
            tries += 1;
            tokio::time::sleep(backoff::of_database(tries)).await;
            match flusher.write_alone(&mut write, &mut note).await {
                Answer::Aside(reason) => tracing::debug!(%token, tries, error = reason, "still aside"),
                answer => {
                    after.acknowledge(&write, note, answer);
                    break;
                }
            }
        }
    }
}

fn lock(queues: &Queues) -> MutexGuard<'_, HashMap<Uuid, VecDeque<(BlockWrite, Note)>>> {
    queues.lock().unwrap_or_else(PoisonError::into_inner)
}
