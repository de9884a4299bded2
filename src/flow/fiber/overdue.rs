//! A block whose handler blocks its thread past its time: the fiber cannot end it, so it is ended from outside.

use super::{Bench, storable};
use crate::{
    flow::{
        watch::{Overdue, Watched},
        writer::{BlockUpdate, Update},
    },
    store::flush::{Close, Outcomes},
};

impl Bench {
    /// Ends our hold on the block, in the database: its row has used up an attempt, the rest goes back, and any worker may
    /// run them. The fiber is fenced first. What it says when it comes back, if ever, is refused.
    pub async fn give_up(&self, overdue: &Overdue) {
        let Watched { block, parts, attempt, max_attempts, .. } = &overdue.watched;
        self.held.fence(block.token);
        let error = storable(format!(
            "ran longer than its timeout and blocks its thread: given up after another {}s",
            overdue.late.as_secs()
        ));
        let (mut outcomes, mut close) = (Outcomes::default(), Close::default());
        if attempt < max_attempts {
            self.metrics.row_retries.inc();
            close.retry.insert(overdue.line);
            close.retry_after = self.retry.delay(attempt.unsigned_abs());
            close.error = Some(error);
        } else {
            outcomes.fail(overdue.line, error);
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
}
