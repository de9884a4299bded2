//! `sql` handlers: a procedure of the user's, its effects and the outcome in one transaction. Exactly once.

mod blocks;
mod name;
mod session;

pub use name::{NameError, QualifiedName};
pub use session::settle;

use super::{
    BlockCall, Config, Handler, Intake, Outcome, OutcomeSink, RowCall, Spawn, TaskCall, TaskDone, TaskOutcome,
};
use crate::{
    backoff,
    store::{
        self, OpenError,
        connect::Target,
        fault::{self, Fault},
        pages::InputRow,
        tasks::{self, Task, TaskEnd, TaskRef, TaskWrite},
    },
};
use deadpool_postgres::{Object, Pool};
use futures::{FutureExt, future::BoxFuture};
use session::Session;
use std::{num::NonZeroUsize, sync::Arc, time::Duration};
use tokio_postgres::{Error, IsolationLevel, error::SqlState};

/// The connections of all sql handlers: their own, and with the role's own settings.
#[derive(Debug)]
pub struct Database {
    target: Target,
    pool: Pool,
}

impl Database {
    pub fn open(config: &store::Config) -> Result<Arc<Self>, OpenError> {
        let target = config.target()?;
        let pool = target.pool(config.sql_connections, "musterd sql", None)?;
        Ok(Arc::new(Self { target, pool }))
    }

    /// A connection for a statement of ours.
    pub(super) async fn connection(&self) -> Result<Object, deadpool_postgres::PoolError> {
        self.pool.get().await
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
    database: Arc<Database>,
}

/// Rows of one call of a function, unless the configuration says otherwise.
const BLOCK_SIZE: usize = 500;

/// Further tries of one attempt when transactions get in each other's way; that is nobody's failure.
const CONFLICT_RETRIES: u32 = 3;

impl Sql {
    /// The configuration was checked; a name that is none now calls nothing and says so.
    pub(super) fn new(config: &Config, database: Arc<Database>) -> Self {
        let name = |text: &Option<String>| text.as_deref().and_then(|text| QualifiedName::parse(text).ok());
        Self {
            call: name(&config.procedure).map(|name| format!("CALL {name}($1, $2)")).unwrap_or_default(),
            select: name(&config.function).map(|name| blocks::statement(&name)).unwrap_or_default(),
            block_size: config.block_size.or(NonZeroUsize::new(BLOCK_SIZE)).unwrap_or(NonZeroUsize::MIN),
            rehearsal: false,
            role: name(&config.role).map(|name| name.to_string()),
            search_path: config.search_path.clone(),
            statement_timeout: config.statement_timeout,
            database,
        }
    }

    /// The same, for a look at what it does: every transaction is rolled back.
    pub(super) fn rehearsing(self) -> Self {
        Self { rehearsal: true, ..self }
    }

    async fn attempt(&self, call: &TaskCall<'_>) -> TaskOutcome {
        if self.call.is_empty() {
            return TaskOutcome::Failed(
                "this sql handler has a function for rows, and no procedure for tasks".into(),
            );
        }
        for conflict in 1.. {
            let client = match self.database.pool.get().await {
                Ok(client) => client,
                Err(error) => {
                    let error = format!("no connection for sql handlers: {error}");
                    return TaskOutcome::Postponed { error, crashed: false };
                }
            };
            let mut session = Session::new(client, &self.database.target);
            let attempt = async {
                match self.rehearsal {
                    true => self.rehearse(session.client(), call).await,
                    false => self.transact(session.client(), call).await,
                }
            };
            match attempt.await {
                Ok(outcome) => {
                    session.finish();
                    return outcome;
                }
                Err(error) if is_conflict(&error) && conflict <= CONFLICT_RETRIES => {
                    session.discard(&error);
                    let (base, max) = (Duration::from_millis(20), Duration::from_millis(200));
                    tokio::time::sleep(backoff::delay(base, max, conflict)).await;
                }
                Err(error) => {
                    session.discard(&error);
                    return judge(&error);
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// No lock is taken before the call: a procedure may take its time.
    async fn transact(&self, client: &mut Object, call: &TaskCall<'_>) -> Result<TaskOutcome, Error> {
        let task = call.task;
        // Stated, not taken from the role's defaults; a COMMIT inside the procedure then fails, as it must.
        let transaction =
            client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
        transaction.batch_execute(&self.task_settings(call)).await?;
        transaction.execute(&self.call, &[&task.reference.id, &task.payload]).await?;
        transaction.batch_execute("RESET ROLE; SET LOCAL search_path = pg_catalog, pg_temp").await?;
        let end = TaskEnd::Succeeded { result: None, spawn: None, after: None };
        let write = [TaskWrite { task: task.reference, parent: task.parent, end }];
        match tasks::finish_if_held(&*transaction, &write).await?.remove(&task.reference.id) {
            Some(finished) => {
                crate::failpoint!("sql.before_commit");
                transaction.commit().await?;
                crate::failpoint!("sql.committed");
                Ok(TaskOutcome::Committed(Some(finished)))
            }
            None => {
                // Somebody else has the task: our effects vanish.
                transaction.rollback().await?;
                Ok(TaskOutcome::Committed(None))
            }
        }
    }

    /// The same on a task that nobody else ever sees, and nothing stays; the answer says what would have been made.
    async fn rehearse(&self, client: &mut Object, call: &TaskCall<'_>) -> Result<TaskOutcome, Error> {
        let transaction =
            client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
        let task = Task { reference: tasks::pretend(&*transaction, call.task).await?, ..call.task.clone() };
        let pretended = TaskCall { task: &task, ..*call };
        transaction.batch_execute(&self.task_settings(&pretended)).await?;
        transaction.execute(&self.call, &[&task.reference.id, &task.payload]).await?;
        transaction.batch_execute("RESET ROLE; SET LOCAL search_path = pg_catalog, pg_temp").await?;
        let mut done = TaskDone::default();
        for made in tasks::made_by(&*transaction, task.reference.id).await? {
            let spawn = Spawn { command: made.command, payload: Some(made.payload), ..Spawn::default() };
            if made.child { done.spawn.push(spawn) } else { done.after.push(spawn) }
        }
        transaction.rollback().await?;
        Ok(TaskOutcome::Done(done))
    }

    /// Limits and rights, and by what the functions know that they run inside this very attempt.
    fn task_settings(&self, call: &TaskCall<'_>) -> String {
        let TaskRef { id, token } = call.task.reference;
        let limits = self.settings(call.timeout);
        format!("SET LOCAL musterd.task_id = '{id}'; SET LOCAL musterd.task_token = '{token}'; {limits}")
    }

    fn settings(&self, timeout: Duration) -> String {
        let limit = self.statement_timeout.unwrap_or(timeout).min(timeout).as_millis().max(1);
        let mut sql = format!("SET LOCAL statement_timeout = {limit}");
        if let Some(path) = &self.search_path {
            let quoted: Vec<String> = path.split(',').map(|schema| name::quote(schema.trim())).collect();
            sql.push_str(&format!("; SET LOCAL search_path = {}", quoted.join(", ")));
        }
        if let Some(role) = &self.role {
            sql.push_str(&format!("; SET LOCAL ROLE {role}"));
        }
        sql
    }
}

impl Handler for Sql {
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
        futures::future::ready(Outcome::Failed(refusal)).boxed()
    }

    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        async move { self.run_block(&call, rows, &sink).await }.boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        async move { self.attempt(&call).await }.boxed()
    }
}

fn is_conflict(error: &Error) -> bool {
    matches!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED))
}

/// A broken connection, a server that goes down or has no room is not the task's failure; everything else is.
fn judge(error: &Error) -> TaskOutcome {
    let text = told(error);
    match error.code().map(SqlState::code) {
        None if error.is_closed() || fault::of(error) == Fault::Transient => {
            TaskOutcome::Postponed { error: text, crashed: true }
        }
        Some(code) if code.starts_with("08") || code.starts_with("53") || code.starts_with("57P") => {
            TaskOutcome::Postponed { error: text, crashed: false }
        }
        _ => TaskOutcome::Retry { error: text, after: None },
    }
}

/// An exception of the procedure in the words of whoever raised it.
fn told(error: &Error) -> String {
    let Some(db) = error.as_db_error() else { return crate::periodic::describe(error) };
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
