//! Writes the outcomes of tasks.
//!
//! One transaction for all of them. When another transaction has one of the tasks locked, the others are written without it and it is
//! put aside; when a value cannot be stored, halves are written until the task at fault is alone.

use super::{
    Acknowledge, OutcomeWriter,
    flusher::{Failed, Flusher, Tries, cannot_be_stored},
};
use crate::state::State;
use crate::{
    backoff,
    store::{
        fault,
        tasks::{self, Finish, Locked, TaskEnd, TaskRef, TaskWrite},
    },
};
use std::{collections::HashMap, time::Duration};
use tokio::task::JoinSet;

/// What a write of tasks came to.
#[derive(Debug)]
struct Written {
    finish: Finish,
    /// A reply was lost on the way: a task that is not ours any more may have been finished by us.
    unsure: bool,
    /// Those that others have locked are left, and still ours.
    passed_by: bool,
}

/// Tasks whose outcome cannot be written now.
#[derive(Debug)]
pub(super) struct TasksAside {
    flusher: Flusher,
    after: Acknowledge,
    writes: JoinSet<()>,
}

/// Why most are put aside.
const LOCKED: &str = "another transaction has it locked";
/// Tasks aside at a time; beyond it a flush waits for one of them.
const MOST_ASIDE: usize = 1000;

impl OutcomeWriter {
    /// Returns the tasks that were written.
    pub(super) async fn write_tasks(&mut self, writes: Vec<TaskWrite>) -> u64 {
        let mut count = 0;
        let mut groups = vec![newest_of_each(writes)];
        while let Some(group) = groups.pop() {
            match self.flusher.write_group(&group).await {
                Ok(written) => {
                    let (settled, busy) = self.after.acknowledge_tasks(group, &written);
                    count += settled;
                    for write in busy {
                        self.tasks_aside.put(write, LOCKED).await;
                    }
                }
                Err(_) if group.len() > 1 => {
                    let mut first = group;
                    let second = first.split_off(first.len() / 2);
                    groups.extend([second, first]);
                }
                Err(error) => {
                    for write in group {
                        count += self.write_refused(write, &error).await;
                    }
                }
            }
        }
        count
    }

    /// Alone, too, the outcome of a task is refused.
    async fn write_refused(&mut self, write: TaskWrite, error: &tokio_postgres::Error) -> u64 {
        match self.flusher.fail(&write, error).await {
            Ok(written) => {
                let (settled, busy) = self.after.acknowledge_tasks(vec![write], &written);
                for write in busy {
                    self.tasks_aside.put(write, LOCKED).await;
                }
                settled
            }
            // What the task wanted stored is not to blame, and it keeps its outcome.
            Err(error) => {
                self.tasks_aside.put(write, &fault::words(&error)).await;
                0
            }
        }
    }
}

/// The newest outcome of a task wins. In the order of ids: every transaction locks in the same order.
pub(super) fn newest_of_each(mut writes: Vec<TaskWrite>) -> Vec<TaskWrite> {
    writes.reverse();
    writes.sort_by_key(|write| write.task.id);
    writes.dedup_by_key(|write| write.task);
    writes
}

impl Flusher {
    /// Tries until it is written; gives up only when a value is at fault.
    async fn write_group(&self, writes: &[TaskWrite]) -> Result<Written, tokio_postgres::Error> {
        let (mut tries, mut locked) = (Tries::of(self), Locked::Wait);
        loop {
            let client = tries.session().await;
            let failed = match tasks::finish_if_held(&client, writes, locked).await {
                Ok(finish) => {
                    tries.written();
                    let (unsure, passed_by) = (tries.no_reply, locked == Locked::PassBy);
                    return Ok(Written { finish, unsure, passed_by });
                }
                Err(error) => tries.failed(client, error).await,
            };
            match failed {
                Ok(()) => {}
                Err(Failed::Row(error)) => return Err(error),
                // One of them is in another transaction's hands: the others do not wait for it.
                Err(Failed::Busy(_)) if locked == Locked::Wait => locked = Locked::PassBy,
                // A parent or an uncle is locked: each task is tried without the others.
                Err(Failed::Busy(error)) if writes.len() > 1 => return Err(error),
                Err(Failed::Busy(_)) => {
                    let finish = Finish::default();
                    return Ok(Written { finish, unsure: tries.no_reply, passed_by: true });
                }
            }
        }
    }

    /// What the task wanted stored or spawned is at fault: the task fails with PostgreSQL's words. If the database takes that.
    async fn fail(
        &self,
        write: &TaskWrite,
        error: &tokio_postgres::Error,
    ) -> Result<Written, tokio_postgres::Error> {
        let failed = TaskWrite { end: TaskEnd::failed(cannot_be_stored(error)), ..write.clone() };
        let written = self.write_group(std::slice::from_ref(&failed)).await?;
        if written.finish.finished.contains_key(&write.task.id) {
            tracing::warn!(task = write.task.id, "the outcome of a task cannot be stored; the task fails");
        }
        Ok(written)
    }

    /// Whether a task is still held. What cannot be asked is tried again.
    async fn holds(&self, task: TaskRef) -> bool {
        let Ok(client) = self.pool.get().await else { return true };
        tasks::is_held(&client, task).await.unwrap_or(true)
    }
}

impl TasksAside {
    pub(super) fn new(flusher: Flusher, after: Acknowledge) -> Self {
        Self { flusher, after, writes: JoinSet::new() }
    }

    /// Puts a write aside: it is tried again beside the flushes until it is done.
    async fn put(&mut self, write: TaskWrite, reason: &str) {
        while self.writes.try_join_next().is_some() {}
        while self.writes.len() >= MOST_ASIDE {
            self.writes.join_next().await;
        }
        tracing::warn!(
            task = write.task.id,
            reason,
            "the outcome of a task cannot be written now; it is put aside and tried again, the others go on"
        );
        let (flusher, after) = (self.flusher.clone(), self.after.clone());
        let gauge = flusher.metrics.batcher.aside.clone();
        gauge.inc();
        self.writes.spawn(async move {
            write_when_free(&flusher, &after, write).await;
            gauge.dec();
        });
    }

    pub(super) async fn finish(&mut self) {
        while self.writes.join_next().await.is_some() {}
    }
}

async fn write_when_free(flusher: &Flusher, after: &Acknowledge, write: TaskWrite) {
    for tries in 1.. {
        tokio::time::sleep(backoff::delay(Duration::from_millis(50), Duration::from_secs(1), tries)).await;
        let written = match flusher.write_group(std::slice::from_ref(&write)).await {
            Err(error) => flusher.fail(&write, &error).await,
            written => written,
        };
        match written {
            Ok(written) => {
                let held = written.passed_by && flusher.holds(write.task).await;
                if !held || written.finish.finished.contains_key(&write.task.id) {
                    after.acknowledge_tasks(vec![write], &Written { passed_by: false, ..written });
                    return;
                }
            }
            Err(error) => {
                tracing::debug!(task = write.task.id, tries, error = fault::words(&error), "still aside");
            }
        }
    }
}

impl Acknowledge {
    /// How many were written, and those that have to be tried again.
    fn acknowledge_tasks(&self, writes: Vec<TaskWrite>, written: &Written) -> (u64, Vec<TaskWrite>) {
        let (mut busy, mut settled) = (Vec::new(), Vec::with_capacity(writes.len()));
        let mut states: HashMap<State, u64> = HashMap::new();
        written.finish.uncles.iter().for_each(|uncle| self.checks.ask(*uncle));
        for write in writes {
            let task = write.task;
            match written.finish.finished.get(&task.id) {
                Some(finished) => {
                    settled.push(task);
                    *states.entry(finished.state).or_default() += 1;
                    if let Some(scope) = finished.scope {
                        self.checks.ask(scope);
                    }
                }
                // Refused, or locked: the one that is put aside finds out.
                None if written.passed_by => busy.push(write),
                None => {
                    settled.push(task);
                    // Asked for in every case: whichever flush wrote the end, the scope must be looked at.
                    self.checks.ask(task.id);
                    if let Some(parent) = write.parent {
                        self.checks.ask(parent);
                    }
                    if !written.unsure {
                        self.metrics.fenced.inc();
                        tracing::warn!(
                            task = task.id,
                            "another worker has this task now; its outcome was refused"
                        );
                    }
                }
            }
        }
        self.held.forget_all(settled);
        states.into_iter().for_each(|(state, count)| self.metrics.count_tasks(state, count));
        (written.finish.finished.len() as u64, busy)
    }
}
