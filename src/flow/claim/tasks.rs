//! Tasks are claimed one by one, several at a time.

use super::{Claimed, Desk, Turn};
use crate::{
    flow::{fiber::Bench, held::Holding, solo::Company},
    metrics::Work,
    queue::Mode,
    store::{
        query::QueryError,
        tasks::{self, Looked, Scope, Task, WantedTasks},
    },
};
use deadpool_postgres::Object;
use uuid::Uuid;

impl Claimed for Task {
    const WORK: Work = Work::Tasks;

    fn holding(&self) -> Holding {
        Holding::Task(self.reference)
    }

    fn waited(&self) -> Option<f64> {
        self.waited
    }

    /// What a task takes is not known before it has run.
    fn is_quick(&self, _: &Desk) -> bool {
        false
    }

    async fn is_due(desk: &Desk) -> Result<bool, QueryError> {
        tasks::due(&desk.bench.store.general.get().await?, &desk.queue).await
    }

    async fn claim(turn: &mut Turn<'_>, claimed: &mut Vec<Self>, count: usize) -> Result<(), QueryError> {
        let Desk { bench, queue, .. } = turn.desk;
        let (commands, row_commands) = (bench.handlers.commands(), bench.handlers.row_commands());
        let scope = match turn.desk.settings.mode {
            Mode::Parallel => Scope::Any,
            Mode::Structured => {
                let any_priority = turn.ignores_priority();
                let (commands, row_commands) = (&*commands, &*row_commands);
                let looked = Looked { queue, commands, row_commands, any_priority, tasks: true };
                tasks::focus(turn.client, &looked).await?.map_or(Scope::TopLevel, Scope::Of)
            }
        };
        // Of top-level work the focus has decided already which kind is next.
        let behind_rows = turn.deferring && scope != Scope::TopLevel;
        let tokens = turn.announce(count);
        let worker = turn.desk.identity.id();
        let wanted = WantedTasks {
            queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            scope,
            ignore_priority: turn.ignores_priority(),
            behind_rows: behind_rows.then_some(&*row_commands),
        };
        let taken = tasks::claim(turn.client, &wanted).await;
        claimed.extend(turn.settle(&tokens, taken)?);
        Ok(())
    }

    async fn claim_solo(turn: &mut Turn<'_>, claimed: &mut Vec<Self>) -> Result<(), QueryError> {
        let commands = turn.desk.bench.handlers.commands();
        let tokens = turn.announce(1);
        let worker = turn.desk.identity.id();
        let wanted = WantedTasks {
            queue: &turn.desk.queue,
            worker: worker.as_str(),
            tokens: &tokens,
            commands: &commands,
            scope: Scope::Any,
            ignore_priority: false,
            behind_rows: None,
        };
        let taken = tasks::take_solo(turn.client, &wanted).await.map(|one| one.into_iter().collect());
        claimed.extend(turn.settle(&tokens, taken)?);
        Ok(())
    }

    async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Self>, QueryError> {
        tasks::find(client, tokens).await
    }

    async fn run(self, bench: &Bench, company: Company) {
        bench.run_task(self, company).await;
    }
}
