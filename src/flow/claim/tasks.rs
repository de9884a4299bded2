//! Tasks are claimed in sets of one command: as many as idle fibers can start, and of quick ones as many as are over soon.

use super::{Claimed, Desk, Turn};
use crate::{
    flow::{fiber::Bench, solo::Company},
    held::Holding,
    metrics::Work,
    queue::Mode,
    store::{
        query::QueryError,
        tasks::{self, Hint, Looked, Scope, Task, WantedTasks},
    },
};
use deadpool_postgres::Object;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A task that takes less than this may wait for a fiber.
const QUICK: Duration = Duration::from_millis(10);
/// What the fibers do in this time may be claimed ahead of them.
const AHEAD: Duration = Duration::from_millis(100);
/// Tasks that one fiber runs one after the other, at most, when each takes only a moment: a fiber costs more than such a task.
const IN_TURN: usize = 64;
/// What tasks that one fiber runs take, as far as is known before.
const TOGETHER: Duration = Duration::from_millis(20);

/// Where the claims of a queue have got to.
#[derive(Debug)]
pub struct Progress {
    hint: Hint,
    /// A hint is good for one poll: what was committed late, or has a better priority, lies before it.
    since: Instant,
}

impl Default for Progress {
    fn default() -> Self {
        Self { hint: Hint::START, since: Instant::now() }
    }
}

impl Claimed for Task {
    const WORK: Work = Work::Tasks;
    const AT_ONCE: usize = 1000;
    const REFILL: u32 = 500;
    const KEPT: Option<Duration> = Some(Duration::from_millis(300));
    type Memory = Progress;

    fn holding(&self) -> Holding {
        Holding::Task(self.reference)
    }

    fn waited(&self) -> Option<f64> {
        self.waited
    }

    fn is_quick(&self, desk: &Desk) -> bool {
        let time = desk.bench.task_pace.time_of(&self.command, 1);
        self.crashes == 0 && time.is_some_and(|time| time < QUICK)
    }

    /// The claim itself leaves what is behind rows.
    fn goes_ahead(_: &Desk) -> bool {
        true
    }

    async fn claim(
        turn: &mut Turn<'_>,
        progress: &mut Progress,
        claimed: &mut Vec<Self>,
        count: usize,
    ) -> Result<(), QueryError> {
        let Desk { bench, queue, config, .. } = turn.desk;
        let (commands, row_commands) = (bench.handlers.commands(), bench.handlers.row_commands());
        let durable = bench.handlers.durable_commands();
        let scope = match turn.desk.settings.mode {
            Mode::Parallel => Scope::Any,
            Mode::Structured => {
                let any_priority = turn.ignores_priority();
                let (commands, row_commands) = (&*commands, &*row_commands);
                let looked = Looked { queue, commands, row_commands, any_priority, tasks: true };
                tasks::focus(turn.client, &looked).await?.map_or(Scope::TopLevel, Scope::Of)
            }
        };
        let commands = bench.handlers.without_resting(commands);
        let row_commands = bench.handlers.without_resting(row_commands);
        // Of top-level work the focus has decided already which kind is next.
        let behind_rows = turn.deferring && scope != Scope::TopLevel;
        let most: Vec<i32> = commands.iter().map(|command| most(turn, command, count)).collect();
        // One for all, or for each of a durable command; and one for tasks that a process died with.
        let each = commands.iter().zip(&most).filter(|(command, _)| durable.contains(command));
        let tokens = 1 + each.map(|(_, most)| *most as usize).max().unwrap_or(1);
        let tokens = turn.announce(tokens);
        if progress.since.elapsed() >= config.poll_interval {
            *progress = Progress::default();
        }
        let worker = turn.desk.identity.id();
        let wanted = WantedTasks {
            queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            most: &most,
            durable: &durable,
            scope,
            ignore_priority: turn.ignores_priority(),
            behind_rows: behind_rows.then_some(&*row_commands),
            beside: turn.idle.max(1) as i32,
            hint: progress.hint,
        };
        let claim = tasks::claim(turn.client, &wanted).await;
        let (busy, end) = claim.as_ref().map_or((false, None), |claim| (claim.busy, claim.end));
        let taken = turn.settle(&tokens, claim.map(|claim| claim.tasks))?;
        // Nothing behind the hint says nothing about what lies before it.
        turn.busy = busy || (taken.is_empty() && progress.hint != Hint::START);
        progress.hint = match end {
            Some(end) if taken.len() >= turn.idle.max(1) => end,
            _ => Hint::START,
        };
        claimed.extend(taken);
        Ok(())
    }

    async fn claim_solo(turn: &mut Turn<'_>, claimed: &mut Vec<Self>) -> Result<(), QueryError> {
        let handlers = &turn.desk.bench.handlers;
        let commands = handlers.without_resting(handlers.commands());
        let tokens = turn.announce(1);
        let worker = turn.desk.identity.id();
        let taken =
            tasks::claim_solo(turn.client, &turn.desk.queue, worker.as_str(), tokens[0], &commands).await;
        claimed.extend(turn.settle(&tokens, taken.map(|one| one.into_iter().collect()))?);
        Ok(())
    }

    async fn next_due(client: &Object, queue: &str) -> Result<Option<f64>, QueryError> {
        tasks::next_due(client, queue).await
    }

    async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Self>, QueryError> {
        tasks::find(client, tokens).await
    }

    fn units(claimed: Vec<Self>, desk: &Desk, idle: usize) -> Vec<Vec<Self>> {
        // No larger than needed to keep every idle fiber busy.
        let share = claimed.len().div_ceil(idle.max(1));
        let mut units: Vec<Vec<Self>> = Vec::with_capacity(claimed.len());
        let mut size = 1;
        for task in claimed {
            match units.last_mut() {
                Some(unit) if unit.len() < size && unit.iter().all(|other| other.goes_with(&task)) => {
                    unit.push(task)
                }
                _ => {
                    size = together(&task, desk).min(share);
                    units.push(vec![task]);
                }
            }
        }
        units
    }

    async fn give_back(unit: Vec<Self>, bench: &Bench) {
        bench.give_back_tasks(&unit).await;
    }

    async fn run(unit: Vec<Self>, bench: &Bench, company: Company) {
        bench.run_tasks(unit, company).await;
    }
}

impl Task {
    /// Whether one fiber may run both together.
    fn goes_with(&self, other: &Self) -> bool {
        self.command == other.command && self.timeout == other.timeout && self.crashes + other.crashes == 0
    }
}

/// How many tasks like this one a fiber runs, together or one after the other: what takes a moment only.
fn together(task: &Task, desk: &Desk) -> usize {
    let handler = desk.bench.handlers.get(&task.command).map(|entry| &entry.handler);
    let most = handler.map(|handler| handler.tasks_together()).filter(|most| *most > 1).unwrap_or(IN_TURN);
    let time = desk.bench.task_pace.time_of(&task.command, 1).filter(|time| *time < QUICK);
    time.map_or(1, |time| ((TOGETHER.as_secs_f64() / time.as_secs_f64().max(1e-6)) as usize).clamp(1, most))
}

/// How many tasks of this command one claim takes: what the idle fibers can start, and of a quick one what all fibers do soon. A slow
/// one is left to the other replicas.
fn most(turn: &Turn<'_>, command: &str, count: usize) -> i32 {
    let Desk { bench, settings, .. } = turn.desk;
    let soon = bench.task_pace.time_of(command, 1).map_or(0.0, |time| {
        AHEAD.as_secs_f64() * f64::from(settings.fibers.get()) / time.as_secs_f64().max(1e-6)
    });
    (soon as usize).max(turn.idle).clamp(1, count) as i32
}
