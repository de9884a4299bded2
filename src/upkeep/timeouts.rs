//! Handlers that do not stop: past their timeout, cancelled, and still there, because they block their thread. Only the end of
//! the process ends them; their rows and tasks are given up, so that another fiber or replica runs them.

use crate::{
    flow::{
        fiber::Bench,
        watch::{Overdue, Watch, Watched},
    },
    metrics::Metrics,
    periodic::{Periodic, Tally},
};
use std::{convert::Infallible, sync::Weak, time::Duration};

/// Time between two looks.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A handler that is cancelled may take this long to stop.
const GRACE: Duration = Duration::from_secs(5);
/// A fiber that is not blocked has given back the tasks that wait for it long before.
const STRANDED_AFTER: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct Timeouts {
    pub watch: Watch,
    pub metrics: Metrics,
    /// Weak: the batcher ends when the last fiber has handed over what it had, and must not wait for this.
    pub bench: Weak<Bench>,
}

impl Periodic for Timeouts {
    const NAME: &'static str = "timeouts";
    type Error = Infallible;

    async fn tick(&mut self) -> Result<Tally, Infallible> {
        // Without the bench no fiber is left.
        let Some(bench) = self.bench.upgrade() else { return Ok(Tally(0)) };
        let late = self.watch.overdue(GRACE);
        self.metrics.handlers_overdue.set(late.count as i64);
        for overdue in &late.news {
            report(overdue);
            bench.give_up(overdue).await;
        }
        let stranded = self.watch.stranded(STRANDED_AFTER);
        if let Some(first) = stranded.first() {
            tracing::warn!(
                command = first.command,
                tasks = stranded.len(),
                "a task blocks its thread; the tasks that waited for its fiber are given back"
            );
        }
        bench.give_back_tasks(&stranded).await;
        Ok(Tally((late.news.len() + stranded.len()) as u64))
    }
}

fn report(overdue: &Overdue) {
    let late_s = overdue.late.as_secs();
    match (overdue.watched(), overdue.task()) {
        (Watched::Block(block), _) => tracing::warn!(
            batch = block.block.batch,
            line = overdue.line(),
            command = block.command,
            late_s,
            "a handler is past its timeout and does not stop: it blocks its thread; its row is given up"
        ),
        (Watched::Tasks(_), Some(task)) => tracing::warn!(
            task = task.reference.id,
            command = task.command,
            late_s,
            "a handler is past its timeout and does not stop: it blocks its thread; its task is given up"
        ),
        (Watched::Tasks(_), None) => {}
    }
}
