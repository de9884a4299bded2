//! The schema `worker`: the names of another worker over our tables, for those who ask for it. It is no migration, and has no history: a
//! comment on the schema says that it is ours and which contents it has.

use refinery::Migration;
use serde::Serialize;
use tokio_postgres::Client;
use tracing::info;

use super::MigrateError;

/// All of it. Every statement replaces what it finds.
pub(super) const SQL: &str = include_str!("../../../migrations/worker_schema.sql");

/// What a migration does about the schema `worker`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerSchema {
    /// Brings it up to date where it is installed.
    Keep,
    Install,
}

/// What a database has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerSchemaState {
    /// No schema of this name, or an empty one.
    Absent,
    /// A schema of this name that is not ours.
    Foreign,
    Installed,
    /// Ours, with other contents than this binary has.
    Outdated,
}

impl WorkerSchemaState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "not installed",
            Self::Foreign => "not installed: there is a schema worker that is not ours",
            Self::Installed => "installed",
            Self::Outdated => "installed by another version",
        }
    }
}

/// Writes nothing.
pub async fn state(client: &Client) -> Result<WorkerSchemaState, MigrateError> {
    let sql = "SELECT pg_catalog.obj_description(n.oid, 'pg_namespace'), \
                      EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid) \
                      OR EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid) \
               FROM pg_catalog.pg_namespace n WHERE n.nspname = 'worker'";
    let rows = client.query_typed(sql, &[]).await.map_err(|source| MigrateError::WorkerSchema { source })?;
    let Some(row) = rows.first() else { return Ok(WorkerSchemaState::Absent) };
    let (comment, used): (Option<&str>, bool) = (row.get(0), row.get(1));
    Ok(match comment {
        Some(comment) if comment == mark() => WorkerSchemaState::Installed,
        Some(comment) if comment.starts_with(OURS) => WorkerSchemaState::Outdated,
        _ if used => WorkerSchemaState::Foreign,
        _ => WorkerSchemaState::Absent,
    })
}

/// Makes it, or makes it again, in one transaction; returns what there is now.
pub(super) async fn apply(client: &Client, wanted: WorkerSchema) -> Result<WorkerSchemaState, MigrateError> {
    let found = state(client).await?;
    match (found, wanted) {
        (WorkerSchemaState::Foreign, WorkerSchema::Install) => return Err(MigrateError::WorkerSchemaTaken),
        (WorkerSchemaState::Absent | WorkerSchemaState::Foreign, WorkerSchema::Keep) => return Ok(found),
        // Up to date, too: the rights in it follow those of the schema musterd, which the migration has just granted.
        _ => {}
    }
    let sql = format!("BEGIN; {SQL}; COMMENT ON SCHEMA worker IS '{}'; COMMIT", mark());
    if let Err(source) = client.batch_execute(&sql).await {
        // Best effort: a session that is gone has rolled back by itself.
        let _ = client.batch_execute("ROLLBACK").await;
        return Err(MigrateError::WorkerSchema { source });
    }
    if found != WorkerSchemaState::Installed {
        info!("the schema worker was installed or brought up to date");
    }
    Ok(WorkerSchemaState::Installed)
}

const OURS: &str = "Muster: names of the STATBUS worker over the schema musterd; contents ";

/// What stands in the comment of the schema that this binary makes.
fn mark() -> String {
    let contents = Migration::unapplied("V1__worker_schema", SQL).map_or(0, |file| file.checksum());
    format!("{OURS}{contents:016x}")
}
