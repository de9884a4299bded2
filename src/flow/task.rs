//! Runs one task and hands over what became of it.

use super::{
    fiber::{Bench, End, interrupted, storable},
    held::Cancel,
    solo::{Company, Solitude},
    writer::Update,
};
use crate::{
    handler::{self, TaskCall, TaskDone, TaskOutcome},
    json::Json,
    metrics::Call,
    spans::Span,
    store::tasks::{self, Finished, Task, TaskEnd, TaskWrite},
};
use serde::Serialize;
use std::time::Instant;

impl Bench {
    /// Runs a task beside others; or, when it must be alone, when they are gone.
    pub async fn run_task(&self, task: Task, company: Company) {
        if !task.is_solo() {
            self.attempt_task(&task).await;
            return drop(company);
        }
        // Not one of those it waits for.
        drop(company);
        let cancel = self.held.cancel_of(task.reference.token);
        match self.solitude_for(&task, &cancel).await {
            Ok(solitude) => {
                tracing::warn!(
                    task = task.reference.id,
                    command = task.command,
                    "a task that processes died with runs alone now"
                );
                self.attempt_task(&task).await;
                drop(solitude);
            }
            Err(End::GiveBack) => self.end_task(&task, TaskEnd::GiveBack).await,
            Err(_) => self.held.forget(task.reference.token),
        }
    }

    /// Waits until nothing else is at work, and has that put on record: from then on a death is this task's doing.
    async fn solitude_for(&self, task: &Task, cancel: &Cancel) -> Result<Solitude, End> {
        let solitude = tokio::select! {
            biased;
            end = interrupted(cancel, &self.now) => return Err(end),
            solitude = self.alone_with(task.reference.token) => solitude,
        };
        let marked = self.patiently(cancel, "task", || async {
            tasks::mark_alone_if_held(&self.store.general.get().await?, task.reference).await
        });
        match marked.await {
            Some(true) => Ok(solitude),
            Some(false) => Err(End::Fenced),
            None => Err(interrupted(cancel, &self.now).await),
        }
    }

    /// Runs a task to its end, or until it is given up.
    async fn attempt_task(&self, task: &Task) {
        let Some(entry) = self.handlers.get(&task.command).cloned() else {
            // The claim asks for our commands only; a task of another is a bug, and goes back unharmed.
            tracing::error!(command = task.command, "claimed a task of a command that is not ours");
            return self.end_task(task, TaskEnd::GiveBack).await;
        };
        let cancel = self.held.cancel_of(task.reference.token);
        let timeout = task.timeout.unwrap_or(entry.config.timeout);
        let span = Span::begin("task", task.traceparent.as_deref())
            .name("command", &task.command)
            .number("task", task.reference.id)
            .number("attempt", i64::from(task.attempt));
        let traceparent = span.or_parent(task.traceparent.as_deref());
        let call = TaskCall { task, timeout, traceparent: traceparent.as_deref() };
        let run = async {
            self.lease.valid().await;
            let began = Instant::now();
            let outcome = handler::run_task(&*entry.handler, call).await;
            let took = self.metrics.walk.handler(&task.command, Call::Task);
            took.observe(began.elapsed().as_secs_f64());
            outcome
        };
        let outcome = tokio::select! {
            biased;
            end = interrupted(&cancel, &self.now) => Err(end),
            outcome = run => Ok(outcome),
        };
        match outcome {
            Ok(TaskOutcome::Committed(finished)) => self.was_committed(task, finished),
            Ok(outcome) => self.end_task(task, self.judge(task, outcome)).await,
            Err(End::GiveBack) => self.end_task(task, TaskEnd::GiveBack).await,
            // Whoever aborted it, or took it, has written its state; ours would be refused.
            Err(End::Aborted | End::Fenced | End::Whole) => self.held.forget(task.reference.token),
        }
    }

    fn judge(&self, task: &Task, outcome: TaskOutcome) -> TaskEnd {
        let most = task.max_attempts.unwrap_or(self.retry.max_attempts.get() as i32);
        match outcome {
            TaskOutcome::Done(TaskDone { result, spawn, after }) => {
                TaskEnd::Succeeded { result, spawn: json_of(&spawn), after: json_of(&after) }
            }
            TaskOutcome::Failed(error) => TaskEnd::Failed(storable(error)),
            TaskOutcome::Retry { error, after } if task.attempt < most => {
                let wait = after.unwrap_or_else(|| self.retry.delay(task.attempt as u32));
                TaskEnd::Retry { error: storable(error), wait }
            }
            TaskOutcome::Retry { error, .. } => TaskEnd::Failed(storable(error)),
            TaskOutcome::Postponed { error, crashed: true } if task.solo_crashes + 1 >= self.max_crashes => {
                let times = task.solo_crashes + 1;
                TaskEnd::Failed(storable(format!("lost the connection it ran on, {times} times: {error}")))
            }
            TaskOutcome::Postponed { error, crashed } => {
                TaskEnd::Postponed { error: storable(error), wait: self.retry.delay(1), crashed }
            }
            TaskOutcome::Committed(_) => TaskEnd::GiveBack,
        }
    }

    async fn end_task(&self, task: &Task, end: TaskEnd) {
        self.hand_over(Update::Task(TaskWrite { task: task.reference, parent: task.parent, end })).await;
    }

    /// The handler's own transaction ended the task; what follows from that commit follows now.
    fn was_committed(&self, task: &Task, finished: Option<Finished>) {
        self.held.forget(task.reference.token);
        match finished {
            Some(finished) => {
                self.metrics.count_task(&finished.state);
                if let Some(scope) = finished.scope {
                    self.checks.ask(scope);
                }
            }
            None => {
                self.metrics.fenced.inc();
                tracing::warn!(
                    task = task.reference.id,
                    "this task is somebody else's now; its effects were rolled back"
                );
            }
        }
    }
}

fn json_of<T: Serialize>(things: &[T]) -> Option<Json> {
    if things.is_empty() { None } else { Json::of(&things).ok() }
}
