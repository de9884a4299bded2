//! The schema is brought up to date by one process at a time, and never backwards.
//!
//! The files of `migrations/` are in the binary; what was applied stands in `musterd.schema_history`. Needs a
//! connection of its own, past any transaction pooler: the lock is the session's.

mod error;
mod history;
mod lock;
mod worker_schema;

use std::time::Duration;

use refinery::Runner;
use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tracing::info;

pub use error::{MigrateError, SchemaState};
pub use history::{MigrationState, MigrationStatus};
use history::{Verdict, judge};
use lock::Lock;
pub use worker_schema::{WorkerSchema, WorkerSchemaState, state as worker_schema};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// How long to wait while another process migrates.
const LOCK_WAIT: Duration = Duration::from_secs(120);
/// How often [`wait`] looks.
const PAUSE: Duration = Duration::from_millis(500);

/// What the sessions of migrations are pinned to. Building an index may take its time; waiting behind another session's
/// open transaction may not, because everybody else then waits behind us.
const SETTINGS: &str = "SET search_path = pg_catalog, pg_temp; \
     SET default_transaction_isolation = 'read committed'; \
     SET default_transaction_read_only = off; \
     SET client_min_messages = warning; \
     SET statement_timeout = 0; \
     SET idle_in_transaction_session_timeout = 0; \
     SET lock_timeout = '30s'";
const RESET: &str = "RESET search_path; RESET default_transaction_isolation; RESET default_transaction_read_only; \
     RESET client_min_messages; RESET statement_timeout; RESET idle_in_transaction_session_timeout; \
     RESET lock_timeout";

/// What a migration did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was applied now, oldest first; empty when there was nothing to do.
    pub applied: Vec<Step>,
    /// The version the database is at now.
    pub version: i32,
    pub worker_schema: WorkerSchemaState,
}

/// One migration of the binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    pub version: i32,
    pub name: String,
    /// What it runs, for `--dry-run`.
    pub sql: String,
}

/// Applies what is missing. Of many at once one does the work, the others wait and find it done.
pub async fn migrate(client: &mut Client) -> Result<Report, MigrateError> {
    migrate_within(client, LOCK_WAIT, WorkerSchema::Keep).await
}

/// As [`migrate`], and installs the schema `worker`.
pub async fn migrate_with_worker_schema(client: &mut Client) -> Result<Report, MigrateError> {
    migrate_within(client, LOCK_WAIT, WorkerSchema::Install).await
}

/// As [`migrate`], with a wait of the caller's choosing for the other process.
///
/// When this future is dropped half-way the lock stays with the session: close the connection.
pub async fn migrate_within(
    client: &mut Client,
    wait: Duration,
    worker: WorkerSchema,
) -> Result<Report, MigrateError> {
    let lock = Lock::acquire(client, wait).await?;
    let outcome = Box::pin(apply(client, worker)).await;
    lock.release(client).await;
    outcome
}

/// The state of every migration that the binary or the database knows, oldest first. Writes nothing.
pub async fn status(client: &Client) -> Result<Vec<MigrationStatus>, MigrateError> {
    history::read(client, runner().get_migrations()).await
}

/// What [`migrate`] would apply, with its SQL. Writes nothing.
pub async fn pending(client: &Client) -> Result<Vec<Step>, MigrateError> {
    let runner = runner();
    let status = history::read(client, runner.get_migrations()).await?;
    refuse_strangers(&status)?;
    let is_pending = |version| {
        status.iter().any(|known| known.version == version && known.state == MigrationState::Pending)
    };
    let mut steps: Vec<_> = runner.get_migrations().iter().map(Step::from).collect();
    steps.retain(|step| is_pending(step.version));
    steps.sort_by_key(|step| step.version);
    Ok(steps)
}

/// What makes the schema `worker`, for `--dry-run`.
pub fn worker_schema_sql() -> &'static str {
    worker_schema::SQL
}

/// A schema that a worker can work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It is the binary's own.
    Exact,
    /// A newer one that has only grown: this binary is about to be replaced.
    Newer { database: i32, binary: i32 },
}

/// Whether the daemon can work with the schema as it is. Writes nothing.
pub async fn check(client: &Client) -> Result<Fit, SchemaState> {
    let status = status(client).await.map_err(|source| SchemaState::Unreadable { source })?;
    match judge(&status) {
        Verdict::Current { .. } => Ok(Fit::Exact),
        Verdict::Newer { database, binary } if serves(client, binary).await? => {
            Ok(Fit::Newer { database, binary })
        }
        Verdict::Missing { .. } => Err(SchemaState::Missing),
        Verdict::Behind { database, binary } => Err(SchemaState::Behind { database, binary }),
        Verdict::Newer { database, binary } => Err(SchemaState::Newer { database, binary }),
        Verdict::Changed { version, name } => Err(SchemaState::Changed { version, name }),
    }
}

/// What makes a database, for a server that takes it without a connection.
pub fn create_database(name: &str) -> String {
    format!("CREATE DATABASE {name}\n")
}

/// Waits until the daemon can work with the schema: another process is bringing it up to date. Writes nothing.
pub async fn wait(client: &Client, limit: Duration) -> Result<Fit, SchemaState> {
    let start = tokio::time::Instant::now();
    loop {
        match check(client).await {
            Err(SchemaState::Missing | SchemaState::Behind { .. }) if start.elapsed() < limit => {
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// Whether a newer schema still has all that a binary of this version uses.
async fn serves(client: &Client, binary: i32) -> Result<bool, SchemaState> {
    let oldest = history::oldest(client).await.map_err(|source| SchemaState::Unreadable { source })?;
    Ok(oldest.is_some_and(|oldest| oldest <= binary))
}

async fn apply(client: &mut Client, worker: WorkerSchema) -> Result<Report, MigrateError> {
    client.batch_execute(SETTINGS).await.map_err(|source| MigrateError::Prepare { source })?;
    let outcome = apply_pinned(client, worker).await;
    // A session that is gone has nothing to reset; one that is not must not keep our settings.
    let reset = client.batch_execute(RESET).await.map_err(|source| MigrateError::Prepare { source });
    let report = outcome?;
    reset.map(|()| report)
}

async fn apply_pinned(client: &mut Client, worker: WorkerSchema) -> Result<Report, MigrateError> {
    let runner = runner();
    let status = history::read(client, runner.get_migrations()).await?;
    // Before anything is written: an old binary must leave a newer schema as it is.
    refuse_strangers(&status)?;
    create_schema(client).await?;
    let done = runner.run_async(client).await.map_err(MigrateError::applying)?;
    // Every time, and after the last migration: a function that one of them added cannot be forgotten.
    client
        .batch_execute("SELECT musterd.grant_roles()")
        .await
        .map_err(|source| MigrateError::Prepare { source })?;
    let worker_schema = worker_schema::apply(client, worker).await?;
    let applied: Vec<_> = done.applied_migrations().iter().map(Step::from).collect();
    for step in &applied {
        info!(version = step.version, name = step.name, "applied migration V{} {}", step.version, step.name);
    }
    let version = status.iter().map(|known| known.version).max().unwrap_or(0);
    Ok(Report { applied, version, worker_schema })
}

/// `CREATE SCHEMA IF NOT EXISTS` asks for the right to create even when there is nothing to create.
async fn create_schema(client: &Client) -> Result<(), MigrateError> {
    let found = client
        .query_typed("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = 'musterd'", &[])
        .await
        .map_err(|source| MigrateError::Prepare { source })?;
    if !found.is_empty() {
        return Ok(());
    }
    match client.batch_execute("CREATE SCHEMA IF NOT EXISTS musterd").await {
        Ok(()) => Ok(()),
        Err(source) if source.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            Err(MigrateError::MayNotCreateSchema { grant: grant(client).await, source })
        }
        Err(source) => Err(MigrateError::Prepare { source }),
    }
}

/// The statement that an administrator runs to let us in, ready to paste.
async fn grant(client: &Client) -> String {
    let sql = "SELECT pg_catalog.format('GRANT CREATE ON DATABASE %I TO %I', \
               pg_catalog.current_database(), current_user)";
    match client.query_typed(sql, &[]).await.as_deref() {
        Ok([row]) => row.get(0),
        _ => "GRANT CREATE ON DATABASE … TO …".to_string(),
    }
}

fn refuse_strangers(status: &[MigrationStatus]) -> Result<(), MigrateError> {
    match judge(status) {
        Verdict::Newer { database, binary } => Err(MigrateError::NewerSchema { database, binary }),
        Verdict::Changed { version, name } => Err(MigrateError::Changed { version, name }),
        Verdict::Missing { .. } | Verdict::Behind { .. } | Verdict::Current { .. } => Ok(()),
    }
}

fn runner() -> Runner {
    let mut runner = embedded::migrations::runner();
    runner.set_migration_table_name(history::TABLE);
    runner
}

impl From<&refinery::Migration> for Step {
    fn from(migration: &refinery::Migration) -> Self {
        Self {
            version: migration.version(),
            name: migration.name().to_string(),
            sql: migration.sql().unwrap_or_default().to_string(),
        }
    }
}
