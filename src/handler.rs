//! What a command runs: the contract between Muster and the user's work.

pub mod block;
pub mod builtin;
pub mod config;
pub mod exec;
pub mod http;
pub mod protocol;
pub mod sql;
pub(crate) mod storable;
pub mod tap;

pub use block::{BlockCall, Intake, OutcomeSink, Report, run_block};
pub use config::{Config, Kind};
pub use storable::Stored;

use crate::{
    json::Json,
    queue,
    store::{
        self, OpenError,
        pages::InputRow,
        tasks::{Finish, Task},
    },
};
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};
use tap::Tap;
use tokio::runtime::RuntimeFlavor;
use uuid::Uuid;

/// One row, as a handler gets it.
#[derive(Debug)]
pub struct RowCall<'a> {
    pub batch: i64,
    /// Of the batch alone, for ever: its id may be handed out again after a failover.
    pub uid: Uuid,
    pub line: i32,
    /// JSON, as it was submitted.
    pub input: &'a str,
    /// The batch's context.
    pub context: &'a Json,
    /// From 1; a row that failed before has a higher one.
    pub attempt: i32,
}

impl RowCall<'_> {
    /// The same for every attempt of this row: what a receiver uses to do its work once.
    pub fn idempotency_key(&self) -> String {
        format!("{}/{}", batch_key(self.batch, self.uid), self.line)
    }
}

/// A batch by a name that no other batch has, of this installation or another.
pub fn batch_key(batch: i64, uid: Uuid) -> String {
    let mut hex = [0; uuid::fmt::Simple::LENGTH];
    format!("{batch}-{}", &uid.simple().encode_lower(&mut hex)[..8])
}

/// What became of one row or task.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Succeeded(Done),
    /// The work itself says no; another try would not help.
    Failed(Failed),
    /// This try failed; there may be another, after the given wait or the usual one.
    Retry {
        error: Failed,
        after: Option<Duration>,
    },
}

/// Why a try failed, and what its handler leaves beside that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Failed {
    pub error: String,
    /// The handler's own name for this kind of failure; else the text says what kind it is.
    pub code: Option<String>,
    pub result: Option<Json>,
    /// Text to add to named output files.
    pub outputs: Vec<(String, String)>,
}

impl Failed {
    /// A failure of a kind that has a name.
    pub fn coded(code: impl Into<String>, error: String) -> Self {
        Self { error, code: Some(code.into()), ..Self::default() }
    }
}

impl From<String> for Failed {
    fn from(error: String) -> Self {
        Self { error, ..Self::default() }
    }
}

impl From<&str> for Failed {
    fn from(error: &str) -> Self {
        error.to_owned().into()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    pub result: Option<Json>,
    /// Text to add to named output files.
    pub outputs: Vec<(String, String)>,
    /// Rows to add to the batch this row is of, by the transaction that writes its outcome.
    pub append: Vec<Json>,
}

/// One task, as a handler gets it.
#[derive(Clone, Copy, Debug)]
pub struct TaskCall<'a> {
    pub task: &'a Task,
    /// The time this try has; the handler is cancelled after it.
    pub timeout: Duration,
    /// The trace that this call is a part of.
    pub traceparent: Option<&'a str>,
}

impl TaskCall<'_> {
    /// The same for every try of this task.
    pub fn idempotency_key(&self) -> String {
        format!("task/{}", self.task.reference.id)
    }
}

/// What became of one try of a task.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskOutcome {
    Done(TaskDone),
    /// The work itself says no; another try would not help.
    Failed(Failed),
    /// This try failed; there may be another, after the given wait or the usual one.
    Retry {
        error: Failed,
        after: Option<Duration>,
    },
    /// The trouble of the database or of the handler, not the task's: it runs again later, after the given wait or the usual
    /// one, and no attempt is charged. What may have taken its connection down with it (`crashed`) is a suspect: it runs
    /// alone soon, and after a few crashes more not at all.
    Postponed {
        error: String,
        crashed: bool,
        after: Option<Duration>,
    },
    /// Effects and outcome are committed already, together; `None`: the task was another worker's by then, and nothing was.
    Committed(Finish),
}

/// A task that succeeded, and what it wants to happen next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskDone {
    pub result: Option<Json>,
    /// Children; siblings when the task is a child itself.
    pub spawn: Vec<Spawn>,
    /// Uncles: top-level tasks that start after this one's scope has ended.
    pub after: Vec<Spawn>,
}

/// A task to be made by the same transaction that ends its maker.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Spawn {
    pub command: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload: Option<Json>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Unique within the scope: the same key twice is one child.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub child_key: Option<String>,
    /// Of an uncle: at most one with this key waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dedup_key: Option<String>,
}

/// Runs the rows and tasks of one command. At least once: a crash between the work and its record repeats it. A handler
/// that writes effects and outcome in one transaction is exactly once.
pub trait Handler: Send + Sync + 'static {
    /// Whether rows of batches can be given to it.
    fn takes_rows(&self) -> bool {
        true
    }

    /// Whether a claim for it must outlive a crash of the server. Work that happens inside the server may be what crashes
    /// it; with a claim that is lost each time, the crashes would never be counted.
    fn claims_durably(&self) -> bool {
        false
    }

    /// How long it can do nothing, as far as it knows: nothing is claimed for it meanwhile.
    fn rest(&self) -> Option<Duration> {
        None
    }

    /// Whether it may block its thread. Then a thread is set free for the others whenever it runs, which costs some
    /// microseconds.
    fn may_block(&self) -> bool {
        true
    }

    /// How it takes the rows of a block.
    fn intake(&self) -> Intake {
        Intake::OneByOne
    }

    /// One row; asked only of handlers that take them one by one.
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome>;

    /// Rows of a block together; asked only of handlers whose [`Handler::intake`] says so. It keeps to the call's timeout
    /// by itself, and reports what became of each row as it knows it; rows that it does not report are tried again.
    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        block::one_by_one(self, call, rows, sink)
    }

    /// How many tasks it may be given together at this moment.
    fn tasks_together(&self) -> usize {
        1
    }

    /// Tasks together; asked only of handlers whose [`Handler::tasks_together`] says so. `None`: nothing has happened, and each is
    /// to be given by itself.
    fn tasks<'a>(&'a self, _: &'a [TaskCall<'a>]) -> BoxFuture<'a, Option<Vec<TaskOutcome>>> {
        futures::future::ready(None).boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        let refusal = format!("the handler of {:?} takes rows of batches only", call.task.command);
        futures::future::ready(TaskOutcome::Failed(refusal.into())).boxed()
    }
}

/// A handler that cannot be made from its configuration.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("handlers.{name}.url is not a URL")]
    Url { name: String },
    #[error("handlers.{name}.ca_file: cannot read {file}")]
    CaFile { name: String, file: std::path::PathBuf, source: std::io::Error },
    #[error("handlers.{name}.user: programs cannot be started as {user:?}: {reason}")]
    User { name: String, user: String, reason: String },
    #[error("handlers.{name}: a secret cannot be used")]
    Secret { name: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("handlers.{name}: no HTTP client can be made")]
    Client { name: String, source: reqwest::Error },
}

/// The commands this worker can run.
#[derive(Clone, Default)]
pub struct Registry(Arc<BTreeMap<String, Entry>>);

#[derive(Clone)]
pub struct Entry {
    pub handler: Arc<dyn Handler>,
    pub config: Config,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Entry").field(&self.config).finish()
    }
}

impl Registry {
    /// Makes the handlers that a configuration declares. `tap` hears what goes to them and what comes back.
    pub fn open(
        handlers: &BTreeMap<String, Config>,
        queues: &BTreeMap<String, queue::Config>,
        database: &store::Config,
        tap: &Tap,
    ) -> Result<Self, BuildError> {
        let mut entries = BTreeMap::new();
        // What handlers do in the database has a pool of its own, so that it cannot starve claims and flushes.
        let needs_database = |h: &Config| h.kind == Kind::Sql || h.rate_limit.is_some();
        let database = match handlers.values().any(needs_database) {
            true => Some(sql::Database::open(database)?),
            false => None,
        };
        for (name, own) in handlers {
            let fibers = queues.get(&own.queue).map_or(1, |queue| queue.fibers.get());
            let handler: Arc<dyn Handler> = match (own.kind, &database) {
                (Kind::Sql, Some(database)) => {
                    let sql = sql::Sql::new(own, Arc::clone(database));
                    // With a tap the handler is tried out: no effects.
                    Arc::new(if tap.is_on() { sql.rehearsing() } else { sql })
                }
                (Kind::Http, database) => {
                    Arc::new(http::Http::new(name, own, database.clone(), tap.clone())?)
                }
                (Kind::Exec, _) => Arc::new(exec::Exec::new(name, own, fibers, tap.clone())?),
                (Kind::Builtin | Kind::Sql, _) => Arc::new(builtin::Builtin::new(name, own)),
            };
            entries.insert(name.clone(), Entry { handler, config: own.clone() });
        }
        Ok(Self(Arc::new(entries)))
    }

    /// With one more command, for embedding and tests.
    pub fn with(self, command: &str, handler: Arc<dyn Handler>, config: Config) -> Self {
        let mut entries = (*self.0).clone();
        entries.insert(command.to_owned(), Entry { handler, config });
        Self(Arc::new(entries))
    }

    pub fn get(&self, command: &str) -> Option<&Entry> {
        self.0.get(command)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.0.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    pub fn commands(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// The commands whose batches this worker can run.
    pub fn row_commands(&self) -> Vec<String> {
        let takes_rows = |(name, entry): (&String, &Entry)| entry.handler.takes_rows().then(|| name.clone());
        self.0.iter().filter_map(takes_rows).collect()
    }

    /// Without the commands whose handler can do nothing at this moment.
    pub fn without_resting(&self, mut commands: Vec<String>) -> Vec<String> {
        commands.retain(|command| self.get(command).is_none_or(|entry| entry.handler.rest().is_none()));
        commands
    }

    /// How long until the first handler that can do nothing now can be given work again.
    pub fn shortest_rest(&self) -> Option<Duration> {
        self.0.values().filter_map(|entry| entry.handler.rest()).min()
    }

    /// The commands whose claims are committed before anything of them runs.
    pub fn durable_commands(&self) -> Vec<String> {
        let durable = |(name, entry): (&String, &Entry)| entry.handler.claims_durably().then(|| name.clone());
        self.0.iter().filter_map(durable).collect()
    }
}

/// Runs one row within its time; a panic or a late handler is a failed try, never more.
pub async fn run_row<H: Handler + ?Sized>(handler: &H, call: RowCall<'_>, timeout: Duration) -> Outcome {
    match guarded(apart(handler.may_block(), async { handler.row(call).await }), timeout).await {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Retry { error: error.into(), after: None },
    }
}

/// Runs one task within its time, as [`run_row`] does a row.
pub async fn run_task(handler: &dyn Handler, call: TaskCall<'_>) -> TaskOutcome {
    let timeout = call.timeout;
    match guarded(apart(handler.may_block(), async { handler.task(call).await }), timeout).await {
        Ok(outcome) => outcome,
        Err(error) => TaskOutcome::Retry { error: error.into(), after: None },
    }
}

/// Runs tasks together. `None`: each is to be run by itself. The handler keeps to a limit of its own.
pub async fn run_tasks(handler: &dyn Handler, calls: &[TaskCall<'_>]) -> Option<Vec<TaskOutcome>> {
    AssertUnwindSafe(async { handler.tasks(calls).await }).catch_unwind().await.ok().flatten()
}

/// Work that may block its thread leaves the runtime's other work to another thread.
async fn apart<T>(may_block: bool, work: impl Future<Output = T>) -> T {
    let flavor = tokio::runtime::Handle::try_current().map(|runtime| runtime.runtime_flavor());
    // The other kinds of runtime have no other thread.
    if !may_block || !matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
        return work.await;
    }
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| tokio::task::block_in_place(|| work.as_mut().poll(context))).await
}

/// The call itself is made within: a handler may panic before it has a future to give.
async fn guarded<T>(work: impl Future<Output = T>, timeout: Duration) -> Result<T, String> {
    match tokio::time::timeout(timeout, AssertUnwindSafe(work).catch_unwind()).await {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(panic)) => {
            Err(format!("the handler panicked: {}", crate::error_text::panic_message(panic.as_ref())))
        }
        Err(_) => Err(format!("ran longer than its timeout of {}", humantime::format_duration(timeout))),
    }
}
