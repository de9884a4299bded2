//! Runs one task and hands over what became of it.

use super::{
    fiber::{Bench, End, interrupted},
    solo::{Company, Solitude},
    watch::{Guard, Watched},
    writer::Update,
};
use crate::{
    handler::{self, TaskCall, TaskDone, TaskOutcome, storable::text as storable},
    held::Cancel,
    json::Json,
    metrics::Call,
    spans::{Moment, Span},
    store::tasks::{self, Finish, Task, TaskEnd, TaskWrite},
};
use prometheus_client::metrics::histogram::Histogram;
use serde::Serialize;
use std::{
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

/// So long tasks that could not run together wait for their turn on one fiber; then other fibers and replicas may have them.
const PATIENCE: Duration = Duration::from_millis(300);

impl Bench {
    /// Runs tasks on one fiber: together if their handler can, else one after the other. One that must be alone comes alone.
    pub async fn run_tasks(&self, tasks: Vec<Task>, company: Company) {
        let tasks = Arc::new(tasks);
        match &**tasks {
            [task] => self.run_task(task, self.watch_over(&tasks), company).await,
            _ => {
                if !self.attempt_together(&tasks).await {
                    self.attempt_in_turn(&tasks, self.watch_over(&tasks)).await;
                }
                drop(company);
            }
        }
    }

    /// One after the other; those that would have to wait go back.
    async fn attempt_in_turn(&self, tasks: &[Task], post: Option<Guard>) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let Some(took) = tasks.first().map(|task| self.times_of(task)) else { return };
        for (place, task) in tasks.iter().enumerate() {
            // What is not there any more was given back while the one before blocked this thread.
            if place > 0 && post.as_ref().is_some_and(|post| !post.advance()) {
                return;
            }
            let rest = &tasks[place + 1..];
            let mut run = pin!(self.attempt_task(task, &took, post.as_ref()));
            tokio::select! {
                biased;
                () = &mut run => continue,
                () = tokio::time::sleep_until(deadline), if !rest.is_empty() => {}
            }
            self.give_back_tasks(post.as_ref().map_or(rest, Guard::take_rest)).await;
            return run.await;
        }
    }

    /// Of tasks whose handler may block its thread: no fiber can do anything about that.
    fn watch_over(&self, tasks: &Arc<Vec<Task>>) -> Option<Guard> {
        let entry = self.handlers.get(&tasks.first()?.command)?;
        entry.handler.may_block().then(|| self.watch.post(Watched::Tasks(Arc::clone(tasks))))
    }

    /// Whether that was all: false when nothing has happened and each task is to be run by itself.
    async fn attempt_together<'t>(&self, tasks: &'t [Task]) -> bool {
        let Some(entry) = tasks.first().and_then(|task| self.handlers.get(&task.command)) else {
            return false;
        };
        if entry.handler.tasks_together() < tasks.len() {
            return false;
        }
        let (began, moment) = (Instant::now(), Moment::now());
        let call = |task: &'t Task| {
            let timeout = entry.config.timeout_for(task.timeout);
            TaskCall { task, timeout, traceparent: task.traceparent.as_deref() }
        };
        let calls: Vec<TaskCall<'t>> = tasks.iter().map(call).collect();
        let run = async {
            self.lease.valid().await;
            handler::run_tasks(&*entry.handler, &calls).await
        };
        // One that is aborted meanwhile makes the end of all of them be refused.
        let Some(Some(outcomes)) = self.now.run_until_cancelled(run).await else { return false };
        let elapsed = began.elapsed() / tasks.len() as u32;
        for (task, outcome) in tasks.iter().zip(outcomes) {
            self.task_pace.saw_work(&task.command, 1, elapsed);
            self.metrics.walk.handler(&task.command, Call::Task).observe(elapsed.as_secs_f64());
            span_of(task, Span::since("task", task.traceparent.as_deref(), moment)).end();
            self.has_outcome(task, outcome).await;
        }
        true
    }

    /// Runs a task beside others; or, when it must be alone, when they are gone.
    async fn run_task(&self, task: &Task, post: Option<Guard>, company: Company) {
        let (took, post) = (self.times_of(task), post.as_ref());
        if !task.is_solo {
            self.attempt_task(task, &took, post).await;
            return drop(company);
        }
        // Not one of those it waits for.
        drop(company);
        let cancel = self.held.cancel_of(task.reference);
        match self.solitude_for(task, &cancel).await {
            Ok(solitude) => {
                tracing::warn!(
                    task = task.reference.id,
                    command = task.command,
                    "a task that processes died with runs alone now"
                );
                let reference = task.reference;
                let lift =
                    || async move { tasks::unmark_alone(&self.store.general.get().await?, reference).await };
                let suspect = (task.reference.into(), task.crashes);
                let run = self.attempt_task(task, &took, post);
                self.alone_for_a_while(suspect, solitude, run, lift).await;
            }
            Err(End::GiveBack) => self.end_task(task, TaskEnd::GiveBack).await,
            Err(_) => self.held.forget(task.reference),
        }
    }

    /// Waits until nothing else is at work, and has that put on record: from then on a death is this task's doing.
    async fn solitude_for(&self, task: &Task, cancel: &Cancel) -> Result<Solitude, End> {
        let solitude = tokio::select! {
            biased;
            end = interrupted(cancel, &self.now) => return Err(end),
            solitude = self.alone_with(task.reference.into()) => solitude.ok_or(End::GiveBack)?,
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

    /// Where the times of a command's tasks are counted; looked up once for tasks that run in turn.
    fn times_of(&self, task: &Task) -> Histogram {
        self.metrics.walk.handler(&task.command, Call::Task)
    }

    /// Runs a task to its end, or until it is given up.
    async fn attempt_task(&self, task: &Task, took: &Histogram, post: Option<&Guard>) {
        let Some(entry) = self.handlers.get(&task.command) else {
            // The claim asks for our commands only; a task of another is a bug, and goes back unharmed.
            tracing::error!(command = task.command, "claimed a task of a command that is not ours");
            return self.end_task(task, TaskEnd::GiveBack).await;
        };
        let cancel = self.held.cancel_of(task.reference);
        let timeout = entry.config.timeout_for(task.timeout);
        let span = span_of(task, Span::begin("task", task.traceparent.as_deref()));
        let traceparent = span.or_parent(task.traceparent.as_deref());
        let call = TaskCall { task, timeout, traceparent: traceparent.as_deref() };
        let run = async {
            self.lease.valid().await;
            let began = Instant::now();
            if let Some(post) = post {
                post.begin(timeout);
            }
            let outcome = handler::run_task(&*entry.handler, call).await;
            if let Some(post) = post {
                post.end();
            }
            let elapsed = began.elapsed();
            self.task_pace.saw_work(&task.command, 1, elapsed);
            took.observe(elapsed.as_secs_f64());
            outcome
        };
        // The handler first: most quick ones have their outcome at once, and nothing needs to be waited for beside them.
        let outcome = if cancel.is_cancelled() || self.now.is_cancelled() {
            Err(interrupted(&cancel, &self.now).await)
        } else {
            tokio::select! {
                biased;
                outcome = run => Ok(outcome),
                end = interrupted(&cancel, &self.now) => Err(end),
            }
        };
        match outcome {
            Ok(outcome) => self.has_outcome(task, outcome).await,
            Err(End::GiveBack) => self.end_task(task, TaskEnd::GiveBack).await,
            // The transaction that aborted it, or the worker that took it, has written its state; ours would be refused.
            Err(End::Aborted | End::Fenced | End::Whole) => self.held.forget(task.reference),
        }
    }

    async fn has_outcome(&self, task: &Task, outcome: TaskOutcome) {
        match outcome {
            TaskOutcome::Committed(finish) => self.was_committed(task, finish),
            outcome => self.end_task(task, self.judge(task, outcome)).await,
        }
    }

    pub(super) fn judge(&self, task: &Task, outcome: TaskOutcome) -> TaskEnd {
        let most = self.retry.attempts_for(task.max_attempts);
        match outcome {
            TaskOutcome::Done(TaskDone { result, spawn, after }) => {
                TaskEnd::Succeeded { result, spawn: json_of(&spawn), after: json_of(&after) }
            }
            TaskOutcome::Failed(failed) => failed.of_task(),
            TaskOutcome::Retry { error, after } if task.attempt < most => {
                let wait = after.unwrap_or_else(|| self.retry.delay(task.attempt as u32));
                TaskEnd::Retry { error: storable(error.error), wait }
            }
            TaskOutcome::Retry { error, .. } => error.of_task(),
            // Beside others it is only a suspect, however often.
            TaskOutcome::Postponed { error, crashed: true, .. }
                if task.is_solo
                    && !self.held.has_joined_others(task.reference)
                    && task.solo_crashes + 1 >= self.max_crashes =>
            {
                let times = task.solo_crashes + 1;
                TaskEnd::failed(storable(format!(
                    "lost the connection it ran on {times} times while nothing else ran: {error}"
                )))
            }
            TaskOutcome::Postponed { error, crashed, after } => {
                // What crashes the server does it less and less often.
                let crashes = if crashed { u32::try_from(task.crashes).unwrap_or_default() } else { 0 };
                let wait = after.unwrap_or_else(|| self.retry.delay(crashes + 1));
                TaskEnd::Postponed { error: storable(error), wait, crashed }
            }
            TaskOutcome::Committed(_) => TaskEnd::GiveBack,
        }
    }

    pub(super) async fn end_task(&self, task: &Task, end: TaskEnd) {
        self.hand_over(Update::Task(TaskWrite { task: task.reference, parent: task.parent, end })).await;
    }

    /// The handler's own transaction ended the task; what follows from that commit follows now.
    fn was_committed(&self, task: &Task, mut finish: Finish) {
        self.held.forget(task.reference);
        finish.uncles.iter().for_each(|uncle| self.checks.ask(*uncle));
        match finish.finished.remove(&task.reference.id) {
            Some(finished) => {
                self.metrics.count_tasks(finished.state, 1);
                if let Some(scope) = finished.scope {
                    self.checks.ask(scope);
                }
            }
            None => {
                self.metrics.fenced.inc();
                tracing::warn!(
                    task = task.reference.id,
                    "another worker has this task now; its effects were rolled back"
                );
            }
        }
    }
}

fn span_of(task: &Task, span: Span) -> Span {
    span.name("command", &task.command)
        .number("task", task.reference.id)
        .number("attempt", i64::from(task.attempt))
}

fn json_of<T: Serialize>(things: &[T]) -> Option<Json> {
    if things.is_empty() { None } else { Json::of(&things).ok() }
}
