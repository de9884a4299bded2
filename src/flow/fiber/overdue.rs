//! What blocks its thread past its time: its fiber cannot end it, so it is ended from outside.

use super::Bench;
use crate::{
    flow::{
        watch::{Overdue, Watched, WatchedBlock},
        writer::{BlockUpdate, Update},
    },
    handler::{TaskOutcome, storable::text as storable},
    store::{
        flush::{Close, Outcomes},
        tasks::{Task, TaskEnd},
    },
};

impl Bench {
    /// Ends our hold on a row or a task, in the database: it has used up an attempt, and what waited behind it goes back; any worker
    /// may run them. The fiber is fenced first. What it says when it comes back, if ever, is refused.
    pub async fn give_up(&self, overdue: &Overdue) {
        // It may have been alone, and the others do not wait for it.
        self.room.let_others_in();
        let error = storable(format!(
            "ran longer than its timeout and blocks its thread: given up after another {}s",
            overdue.late.as_secs()
        ));
        match (overdue.watched(), overdue.task()) {
            (Watched::Block(block), _) => self.give_up_row(block, overdue.line(), error).await,
            (Watched::Tasks(_), Some(task)) => {
                // Of its claim this task alone.
                self.held.fence_one(task.reference);
                let outcome = TaskOutcome::Retry { error: error.into(), after: None };
                self.end_task(task, self.judge(task, outcome)).await;
                self.give_back_tasks(overdue.take_rest()).await;
            }
            (Watched::Tasks(_), None) => {}
        }
    }

    async fn give_up_row(&self, watched: &WatchedBlock, line: i32, error: String) {
        let WatchedBlock { block, parts, attempt, max_attempts, .. } = watched;
        self.held.fence_one(block.token);
        let (mut outcomes, mut close) = (Outcomes::default(), Close::default());
        if attempt < max_attempts {
            self.metrics.row_retries.inc();
            close.retry.insert(line);
            close.retry_after = self.retry.delay(attempt.unsigned_abs());
            close.error = Some(error);
        } else {
            outcomes.fail(line, error);
        }
        let update = BlockUpdate {
            block: *block,
            parts: parts.clone(),
            outcomes,
            close: Some(close),
            waited_for: true,
            brake: None,
            written: Vec::new(),
        };
        self.hand_over(Update::Block(Box::new(update))).await;
    }

    /// Gives back tasks of which nothing was started.
    pub async fn give_back_tasks(&self, tasks: &[Task]) {
        for task in tasks {
            self.end_task(task, TaskEnd::GiveBack).await;
        }
    }
}
