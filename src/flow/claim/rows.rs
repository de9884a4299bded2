//! Rows are claimed in blocks: free ones, which were given back or which are to be tried again, and fresh ones, carved
//! from the lines of a batch.

use super::{Claimed, Desk, Turn};
use crate::{
    flow::{fiber::Bench, solo::Company},
    handler::Intake,
    held::Holding,
    metrics::Work,
    queue::Mode,
    store::{
        blocks::{self, Block, Priorities, Size, Wanted},
        query::QueryError,
        tasks::{self, Scope},
    },
};
use deadpool_postgres::Object;
use std::time::Duration;
use uuid::Uuid;

/// A block that takes less than this may wait for a fiber: no other replica would have run it sooner.
const QUICK: Duration = Duration::from_millis(10);

impl Claimed for Block {
    const WORK: Work = Work::Rows;
    const AT_ONCE: usize = 8;
    const REFILL: u32 = 1;
    const KEPT: Option<Duration> = None;
    type Memory = ();

    fn holding(&self) -> Holding {
        Holding::Block(self.reference)
    }

    fn waited(&self) -> Option<f64> {
        self.waited
    }

    fn is_quick(&self, desk: &Desk) -> bool {
        let time = desk.bench.pace.time_of(&self.command, self.lines.len());
        !self.solo && time.is_some_and(|time| time < QUICK)
    }

    /// Not beside tasks, which may have the better priority and would find the fibers taken.
    fn goes_ahead(desk: &Desk) -> bool {
        !desk.rival.defers()
    }

    async fn claim(
        turn: &mut Turn<'_>,
        (): &mut (),
        claimed: &mut Vec<Self>,
        count: usize,
    ) -> Result<(), QueryError> {
        let Some(scope) = scope(turn).await? else { return Ok(()) };
        let by_turns = [Kind::Free, Kind::Fresh];
        let order = if turn.number.is_multiple_of(2) { by_turns } else { [Kind::Fresh, Kind::Free] };
        let mut missing = count;
        for (place, kind) in order.into_iter().enumerate() {
            let priorities = match place {
                _ if turn.ignores_priority() => Priorities::Ignored,
                0 => Priorities::NotBehindTheOther,
                _ => Priorities::Best,
            };
            if missing > 0 {
                let blocks = claim_kind(turn, kind, missing, priorities, scope).await?;
                missing -= blocks.len().min(missing);
                claimed.extend(blocks);
            }
        }
        Ok(())
    }

    async fn claim_solo(turn: &mut Turn<'_>, claimed: &mut Vec<Self>) -> Result<(), QueryError> {
        claimed.extend(claim_kind(turn, Kind::Solo, 1, Priorities::Best, Scope::Any).await?);
        Ok(())
    }

    async fn next_due(client: &Object, queue: &str) -> Result<Option<f64>, QueryError> {
        blocks::next_due(client, queue).await
    }

    async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Self>, QueryError> {
        blocks::find(client, tokens).await
    }

    fn units(claimed: Vec<Self>, _: &Desk, _: usize) -> Vec<Vec<Self>> {
        claimed.into_iter().map(|block| vec![block]).collect()
    }

    async fn give_back(unit: Vec<Self>, bench: &Bench) {
        for block in unit {
            bench.give_back(&block).await;
        }
    }

    async fn run(mut unit: Vec<Self>, bench: &Bench, company: Company) {
        if let Some(block) = unit.pop() {
            bench.metrics.blocks.inc();
            bench.run(block, company).await;
        }
    }
}

/// Whose rows may be claimed; `None`: none, a structured queue's next work is a task.
async fn scope(turn: &Turn<'_>) -> Result<Option<Scope>, QueryError> {
    if turn.desk.settings.mode == Mode::Parallel {
        return Ok(Some(Scope::Any));
    }
    let handlers = &turn.desk.bench.handlers;
    let looked = tasks::Looked {
        queue: &turn.desk.queue,
        commands: &handlers.commands(),
        row_commands: &handlers.row_commands(),
        any_priority: turn.ignores_priority(),
        tasks: turn.deferring,
    };
    Ok(tasks::focus(turn.client, &looked).await?.map(Scope::Of))
}

/// The kinds of blocks a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Free,
    Fresh,
    /// Must run with nothing else in the process.
    Solo,
}

async fn claim_kind(
    turn: &mut Turn<'_>,
    kind: Kind,
    count: usize,
    priorities: Priorities,
    scope: Scope,
) -> Result<Vec<Block>, QueryError> {
    let Desk { bench, settings, .. } = turn.desk;
    let handlers = &bench.handlers;
    let task_commands = turn.deferring.then(|| handlers.without_resting(handlers.commands()));
    let commands = handlers.without_resting(handlers.row_commands());
    let sizes: Vec<Size> = commands.iter().map(|command| size(turn.desk, command)).collect();
    let tokens = turn.announce(count);
    let worker = turn.desk.identity.id();
    let wanted = Wanted {
        queue: &turn.desk.queue,
        worker: worker.as_str(),
        tokens: &tokens,
        commands: &commands,
        durable: &bench.handlers.durable_commands(),
        sizes: &sizes,
        fibers: settings.fibers.get() as i32,
        scope,
        behind_tasks: task_commands.as_deref(),
    };
    let claimed = match kind {
        Kind::Fresh => blocks::carve(turn.client, &wanted, priorities).await,
        Kind::Free => blocks::take(turn.client, &wanted, priorities).await,
        Kind::Solo => blocks::take_solo(turn.client, &wanted).await.map(|one| one.into_iter().collect()),
    };
    turn.settle(&tokens, claimed)
}

/// How many lines a block of this command should have.
fn size(desk: &Desk, command: &str) -> Size {
    let (target, largest) = (desk.config.target_block_time, desk.settings.block_size.get());
    let size = desk.bench.pace.size(command, target, largest);
    match desk.bench.handlers.get(command).map(|entry| entry.handler.intake()) {
        // What costs per call must not shrink to calls of a single row because one call is slow.
        Some(Intake::Together(rows)) => size.at_least((rows.get() as i32).min(largest as i32)),
        _ => size,
    }
}
