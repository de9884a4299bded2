//! Outcomes of tasks: written together, each guarded by its token; one that cannot be stored fails alone.

use super::OutcomeWriter;
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
        // The newest outcome of a task wins; everybody locks in the same order.
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
                Err(error) if tries == 0 => write.end = TaskEnd::Failed(super::told(&error)),
                // A plain failure is refused too: then it is not the task.
                Err(error) => {
                    self.complain(&error);
                    self.hold(tries, &error);
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
                        self.metrics.batcher.transactions.inc();
                        self.recovered();
                        return Ok(Written { finished, unsure });
                    }
                    Err(error) => {
                        self.metrics.batcher.rollbacks.inc();
                        drop(deadpool_postgres::Object::take(client));
                        match fault::of(&error) {
                            Fault::Row => return Err(error),
                            Fault::Systemic => self.complain(&error),
                            Fault::Transient => unsure |= error.code().is_none(),
                        }
                        Box::new(error)
                    }
                },
                Err(error) => Box::new(error),
            };
            tries += 1;
            self.hold(tries, &*error);
            tokio::time::sleep(backoff::delay(Duration::from_millis(50), LONGEST_BACKOFF, tries)).await;
        }
    }

    fn settle_tasks(&self, writes: &[TaskWrite], written: &Written) -> u64 {
        for write in writes {
            let task = write.task;
            self.held.forget(task.token);
            match written.finished.get(&task.id) {
                Some(finished) => {
                    self.metrics.count_task(&finished.state);
                    if let Some(scope) = finished.scope {
                        self.checks.ask(scope);
                    }
                }
                None => {
                    // Asked for in every case: whoever wrote the end, somebody must look.
                    self.checks.ask(task.id);
                    if let Some(parent) = write.parent {
                        self.checks.ask(parent);
                    }
                    if !written.unsure {
                        self.metrics.fenced.inc();
                        tracing::warn!(
                            task = task.id,
                            "this task is somebody else's now; its outcome was refused"
                        );
                    }
                }
            }
        }
        written.finished.len() as u64
    }
}
