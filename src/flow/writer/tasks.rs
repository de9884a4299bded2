//! Outcomes of tasks: written together, each guarded by its token; one that cannot be stored fails alone.

use super::{OutcomeWriter, flusher::cannot_be_stored};
use crate::{
    backoff,
    store::{
        LONGEST_BACKOFF,
        fault::{self, Fault},
        tasks::{self, Finished, TaskEnd, TaskWrite},
    },
};
use std::{collections::HashMap, time::Duration};

/// What a write of tasks came to.
struct Written {
    finished: HashMap<i64, Finished>,
    /// A reply was lost on the way: a task that is not ours any more may have been finished by us.
    unsure: bool,
}

impl OutcomeWriter {
    /// Returns the tasks that were written.
    pub(super) async fn write_tasks(&mut self, mut writes: Vec<TaskWrite>) -> u64 {
        // The newest outcome of a task wins; every transaction locks in the same order.
        writes.reverse();
        writes.sort_by_key(|write| write.task.id);
        writes.dedup_by_key(|write| write.task.token);
        match self.outlast_tasks(&writes).await {
            Ok(written) => self.settle_tasks(&writes, &written),
            Err(error) => {
                tracing::warn!(%error, "an outcome of a task cannot be stored; looking for it");
                let mut count = 0;
                for write in writes {
                    count += self.write_alone(write).await;
                }
                count
            }
        }
    }

    async fn write_alone(&mut self, mut write: TaskWrite) -> u64 {
        let mut tries = 0;
        loop {
            match self.outlast_tasks(std::slice::from_ref(&write)).await {
                Ok(written) => return self.settle_tasks(&[write], &written),
                // What the task wanted stored or spawned is at fault: the task fails with PostgreSQL's words.
                Err(error) if tries == 0 => write.end = TaskEnd::Failed(cannot_be_stored(&error)),
                // A plain failure is refused too: then it is not the task.
                Err(error) => {
                    self.trouble.is_systemic(&error);
                    self.trouble.begins(tries, &error);
                    tokio::time::sleep(backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries))
                        .await;
                }
            }
            tries += 1;
        }
    }

    /// Tries until it is written; gives up only when a value is at fault.
    async fn outlast_tasks(&mut self, writes: &[TaskWrite]) -> Result<Written, tokio_postgres::Error> {
        let mut tries = 0;
        let mut unsure = false;
        loop {
            let error: Box<dyn std::error::Error + Send + Sync> = match self.pool.get().await {
                Ok(client) => match tasks::finish_in_transaction(&client, writes).await {
                    Ok(finished) => {
                        self.after.metrics.batcher.transactions.inc();
                        self.trouble.ends();
                        return Ok(Written { finished, unsure });
                    }
                    Err(error) => {
                        self.after.metrics.batcher.rollbacks.inc();
                        drop(deadpool_postgres::Object::take(client));
                        match fault::of(&error) {
                            Fault::Row => return Err(error),
                            Fault::Systemic => self.trouble.is_systemic(&error),
                            Fault::Transient | Fault::Busy => unsure |= error.code().is_none(),
                        }
                        Box::new(error)
                    }
                },
                Err(error) => Box::new(error),
            };
            tries += 1;
            self.trouble.begins(tries, &*error);
            tokio::time::sleep(backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries)).await;
        }
    }

    fn settle_tasks(&self, writes: &[TaskWrite], written: &Written) -> u64 {
        for write in writes {
            let task = write.task;
            self.after.held.forget(task.token);
            match written.finished.get(&task.id) {
                Some(finished) => {
                    self.after.metrics.count_task(&finished.state);
                    if let Some(scope) = finished.scope {
                        self.after.checks.ask(scope);
                    }
                }
                None => {
                    // Asked for in every case: whichever flush wrote the end, the scope must be looked at.
                    self.after.checks.ask(task.id);
                    if let Some(parent) = write.parent {
                        self.after.checks.ask(parent);
                    }
                    if !written.unsure {
                        self.after.metrics.fenced.inc();
                        tracing::warn!(
                            task = task.id,
                            "another worker has this task now; its outcome was refused"
                        );
                    }
                }
            }
        }
        written.finished.len() as u64
    }
}
