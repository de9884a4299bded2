//! `sql` handlers: a procedure of the user's, its effects and the outcome in one transaction. Exactly once.

mod blame;
mod blocks;
mod bystander;
mod name;
mod session;
mod together;

pub use name::{NameError, QualifiedName};
pub use session::finish_cancels;

use super::{
    BlockCall, Config, Handler, Intake, Outcome, OutcomeSink, RowCall, Spawn, TaskCall, TaskDone, TaskOutcome,
};
use crate::{
    backoff,
    store::{
        self, OpenError,
        connect::{ConnectError, Ending, Watched, WatchedObject, WatchedPool},
        fault::{self, Fault},
        pages::InputRow,
        procedures::{self, Condition, End},
        tasks::{self, Finish, OwnTasks, Task, TaskRef},
    },
};
use blame::{Blame, Limits};
use bystander::{Bystander, Loss};
use futures::{FutureExt, future::BoxFuture};
use session::Session;
use std::{num::NonZeroUsize, sync::Arc, time::Duration};
use together::Together;
use tokio_postgres::{Error, error::SqlState, types::ToSql};

/// The connections of all sql handlers: their own, and with the role's own settings.
#[derive(Debug)]
pub struct Database {
    pool: WatchedPool,
    /// Without a session that stays ours there is none.
    bystander: Option<Bystander>,
    limits: Limits,
}

impl Database {
    pub fn open(config: &store::Config) -> Result<Arc<Self>, OpenError> {
        let pool = config.target()?.watched_pool(config.sql_connections, "musterd sql")?;
        let bystander = match config.has_session() {
            true => Some(Bystander::new(config.direct_target()?)),
            false => None,
        };
        Ok(Arc::new(Self { pool, bystander, limits: Limits::default() }))
    }

    /// A connection for a statement of ours.
    pub(super) async fn connection(&self) -> Result<WatchedObject, ConnectError> {
        self.pool.get().await
    }

    /// A connection for a call, and the session that stands beside it.
    async fn session(&self) -> Result<(Session, Option<Arc<Watched>>), ConnectError> {
        let session = Session::new(self.pool.get().await?, &self.pool);
        let bystander = match &self.bystander {
            Some(bystander) => bystander.present().await,
            None => None,
        };
        Ok((session, bystander))
    }
}

/// Calls one procedure for tasks, one function for rows, or both.
#[derive(Debug)]
pub struct Sql {
    /// Empty without a procedure.
    call: String,
    /// Empty without a function.
    select: String,
    block_size: NonZeroUsize,
    /// Nothing is to stay.
    rehearsal: bool,
    role: Option<String>,
    search_path: Option<String>,
    statement_timeout: Option<Duration>,
    together: Together,
    database: Arc<Database>,
}

/// Rows of one call of a function, unless the configuration says otherwise.
const BLOCK_SIZE: usize = 500;

/// Further tries of one attempt when transactions get in each other's way; that is no failure of the procedure.
const CONFLICT_RETRIES: u32 = 3;

impl Sql {
    /// The configuration was checked; a name that is none now calls nothing and says so.
    pub(super) fn new(config: &Config, database: Arc<Database>) -> Self {
        let name = |text: &Option<String>| text.as_deref().and_then(|text| QualifiedName::parse(text).ok());
        Self {
            call: name(&config.procedure).map(|name| procedures::call(&name)).unwrap_or_default(),
            select: name(&config.function).map(|name| procedures::outcomes_of(&name)).unwrap_or_default(),
            block_size: config.block_size.or(NonZeroUsize::new(BLOCK_SIZE)).unwrap_or(NonZeroUsize::MIN),
            rehearsal: false,
            role: name(&config.role).map(|name| name.to_string()),
            search_path: config.search_path.clone(),
            statement_timeout: config.statement_timeout,
            together: Together::new(config.tasks_per_transaction.map_or(together::MOST, NonZeroUsize::get)),
            database,
        }
    }

    /// The same, for a look at what it does: every transaction is rolled back.
    pub(super) fn rehearsing(self) -> Self {
        Self { rehearsal: true, together: Together::new(1), ..self }
    }

    async fn attempt(&self, call: &TaskCall<'_>) -> TaskOutcome {
        if self.call.is_empty() {
            return TaskOutcome::Failed(
                "this sql handler has a function for rows, and no procedure for tasks".into(),
            );
        }
        for conflict in 1.. {
            let (session, bystander) = match self.database.session().await {
                Ok(opened) => opened,
                Err(error) => {
                    let error = format!("no connection for sql handlers: {error}");
                    return TaskOutcome::Postponed { error, crashed: false, after: None };
                }
            };
            let attempt = async {
                match self.rehearsal {
                    true => self.rehearse(session.client(), call).await,
                    false => self
                        .transact(session.client(), std::slice::from_ref(call))
                        .await
                        .map(|(finish, condition)| (TaskOutcome::Committed(finish), condition)),
                }
            };
            match attempt.await {
                Ok((outcome, condition)) => {
                    session.finish(condition);
                    return outcome;
                }
                Err(error) if is_conflict(&error) && conflict <= CONFLICT_RETRIES => {
                    session.discard(&error);
                    let (base, max) = (Duration::from_millis(20), Duration::from_millis(200));
                    tokio::time::sleep(backoff::delay(base, max, conflict)).await;
                }
                Err(error) => {
                    let ending = session.ending();
                    session.discard(&error);
                    return self.judge(call.task, &error, &ending, bystander.as_deref()).await;
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Everything is sent in one go and answered in order, a round trip for the whole attempt. A statement that fails makes
    /// the server refuse those behind it, and the COMMIT a rollback. No lock is taken before the calls: a procedure may take
    /// its time. Nothing is finished: one of the tasks is not held any more.
    async fn transact(&self, client: &Watched, calls: &[TaskCall<'_>]) -> Result<(Finish, Condition), Error> {
        let tasks: Vec<TaskRef> = calls.iter().map(|call| call.task.reference).collect();
        let own = OwnTasks::prepare(client).await?;
        // Tasks together have the same.
        let timeout = calls.first().map_or(Duration::MAX, |call| call.timeout);
        let begin = self.begin(timeout);
        let between = format!("{}; {}", procedures::BETWEEN_CALLS, self.settings(timeout));
        // The COMMIT leaves with the rest: until here a death of this process leaves nothing.
        crate::failpoint!("sql.before_commit", client);
        let (begun, called) = tokio::join!(biased; client.batch_execute(&begin), async {
            // By the role and in the search path of the handler; known to the session after its first call.
            let procedure = client.prepare_cached(&self.call).await?;
            let one = async |(place, call): (usize, &TaskCall<'_>)| {
                let payload: [&(dyn ToSql + Sync); 1] = [&call.task.payload];
                let cleaned = async {
                    if place > 0 { client.batch_execute(&between).await } else { Ok(()) }
                };
                let (cleaned, announced, called) = tokio::join!(
                    biased;
                    cleaned,
                    own.announce(client, call.task.reference),
                    client.execute(&procedure, &payload),
                );
                cleaned?;
                announced?;
                called.map(drop)
            };
            let (called, ourselves, finished, ended) = tokio::join!(
                biased;
                together::in_order(calls.iter().enumerate().map(one)),
                client.batch_execute(tasks::AS_OURSELVES),
                own.finish(client, &tasks),
                procedures::end(client, End::Commit),
            );
            called?;
            ourselves?;
            let finished = held(finished)?;
            Ok::<_, Error>((finished, ended?))
        });
        begun?;
        let (finished, condition) = called?;
        crate::failpoint!("sql.committed", client);
        tasks.iter().for_each(|task| self.database.limits.forget(task.id));
        Ok((finished, condition))
    }

    /// The same on a task that exists for this transaction only, and nothing stays; the answer says what would have been made.
    async fn rehearse(
        &self,
        client: &Watched,
        call: &TaskCall<'_>,
    ) -> Result<(TaskOutcome, Condition), Error> {
        client.batch_execute(tasks::BEGIN).await?;
        let task = Task { reference: tasks::pretend(&***client, call.task).await?, ..call.task.clone() };
        OwnTasks::prepare(client).await?.announce(client, task.reference).await?;
        client.batch_execute(&self.settings(call.timeout)).await?;
        client.execute(&self.call, &[&task.payload]).await?;
        client.batch_execute(tasks::AS_OURSELVES).await?;
        let result = tasks::stored_result(&***client, task.reference).await?;
        let mut done = TaskDone { result, ..TaskDone::default() };
        for made in tasks::made_by(&***client, task.reference.id).await? {
            let spawn = Spawn { command: made.command, payload: Some(made.payload), ..Spawn::default() };
            if made.child { done.spawn.push(spawn) } else { done.after.push(spawn) }
        }
        let condition = procedures::end(client, End::Rollback).await?;
        Ok((TaskOutcome::Done(done), condition))
    }

    /// A transaction with the handler's limits and rights.
    fn begin(&self, timeout: Duration) -> String {
        format!("{}; {}", tasks::BEGIN, self.settings(timeout))
    }

    fn settings(&self, timeout: Duration) -> String {
        let limit = self.statement_timeout.unwrap_or(timeout).min(timeout);
        let quoted = |path: &String| {
            path.split(',').map(|schema| name::quote(schema.trim())).collect::<Vec<_>>().join(", ")
        };
        let search_path = self.search_path.as_ref().map(quoted);
        procedures::settings(limit, search_path.as_deref(), self.role.as_deref())
    }

    /// The server's trouble is not the task's failure; everything else is. A connection that was lost is charged to the task
    /// only if nothing else explains it; and a task that runs alone, where a charge can be its end, only if that is known.
    async fn judge(
        &self,
        task: &Task,
        error: &Error,
        ending: &Ending,
        bystander: Option<&Watched>,
    ) -> TaskOutcome {
        let text = in_its_words(error);
        let Some(state) = error.code() else {
            if !is_lost(error) {
                return TaskOutcome::Retry { error: text.into(), after: None };
            }
            let crashed = match bystander::loss(ending, bystander).await {
                Loss::Own => true,
                Loss::Elsewhere => false,
                Loss::Unknown => !task.is_solo,
            };
            return TaskOutcome::Postponed { error: text, crashed, after: None };
        };
        match blame::of(state.code()) {
            Blame::Server => TaskOutcome::Postponed { error: text, crashed: false, after: None },
            Blame::Limit if !self.database.limits.is_spent(task.reference.id) => {
                TaskOutcome::Postponed { error: text, crashed: false, after: None }
            }
            Blame::Limit | Blame::Procedure => TaskOutcome::Retry { error: text.into(), after: None },
        }
    }
}

impl Handler for Sql {
    fn may_block(&self) -> bool {
        false
    }

    fn takes_rows(&self) -> bool {
        !self.select.is_empty()
    }

    fn claims_durably(&self) -> bool {
        true
    }

    fn intake(&self) -> Intake {
        Intake::Together(self.block_size)
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let refusal = "rows are given to this handler together".to_owned();
        futures::future::ready(Outcome::Failed(refusal.into())).boxed()
    }

    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        async move { self.run_block(&call, rows, &sink).await }.boxed()
    }

    fn tasks_together(&self) -> usize {
        self.together.most()
    }

    fn tasks<'a>(&'a self, calls: &'a [TaskCall<'a>]) -> BoxFuture<'a, Option<Vec<TaskOutcome>>> {
        async move { self.attempt_together(calls).await }.boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        async move { self.attempt(&call).await }.boxed()
    }
}

fn is_conflict(error: &Error) -> bool {
    matches!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED))
}

/// Whether the connection is gone, and no answer of the server says why.
fn is_lost(error: &Error) -> bool {
    error.is_closed() || (error.code().is_none() && fault::of(error) == Fault::Transient)
}

/// Nothing is finished when the task is no longer held: the server has rolled the transaction back.
fn held(finish: Result<Finish, Error>) -> Result<Finish, Error> {
    match finish {
        Ok(finish) => Ok(finish),
        Err(error) if error.code().is_some_and(|state| state.code() == tasks::NOT_HELD) => {
            Ok(Finish::default())
        }
        Err(error) => Err(error),
    }
}

/// What an exception has in common with others of its kind: its SQLSTATE, and the constraint that was violated. Of a plain RAISE
/// the text says it.
fn code_of(error: &Error) -> Option<String> {
    let db = error.as_db_error().filter(|db| *db.code() != SqlState::RAISE_EXCEPTION)?;
    let state = db.code().code();
    let code = db.constraint().map_or_else(|| state.to_owned(), |constraint| format!("{state} {constraint}"));
    crate::error_group::check_code(&code).is_ok().then_some(code)
}

/// An exception of the procedure as it was raised.
fn in_its_words(error: &Error) -> String {
    let Some(db) = error.as_db_error() else { return crate::error_text::describe(error) };
    let mut text = format!("{} (SQLSTATE {})", db.message(), db.code().code());
    let more = [("detail", db.detail()), ("hint", db.hint()), ("context", db.where_())];
    for (what, words) in more.into_iter().filter_map(|(what, words)| Some((what, words?))) {
        text.push_str(&format!("\n{what}: {words}"));
    }
    if *db.code() == SqlState::INVALID_TRANSACTION_TERMINATION {
        text.push_str(
            "\nhint: a procedure must not COMMIT or ROLLBACK: its effects and its outcome commit together",
        );
    }
    text
}
