//! Why the schema could not be brought up to date, or cannot be worked with.

use refinery::error::Kind;
use tokio_postgres::error::SqlState;

/// A migration that did not happen. What was applied before it stays applied: each file is its own transaction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    #[error(
        "waiting for the migration lock: {holder} held it for {waited}; look at that process, then try again"
    )]
    Locked { holder: String, waited: humantime::FormattedDuration },
    #[error("taking the migration lock: check the connection, then try again")]
    Lock { source: tokio_postgres::Error },
    #[error("reading musterd.schema_history: check the connection and the user's rights on schema musterd")]
    History { source: tokio_postgres::Error },
    #[error(
        "musterd.schema_history has an entry V{version} that no musterd wrote: restore the table from a backup"
    )]
    Garbled { version: i32 },
    #[error("database is at V{database}, this binary knows up to V{binary}: deploy a newer musterd")]
    NewerSchema { database: i32, binary: i32 },
    #[error(
        "migration V{version} {name} was applied with other contents than this binary has: deploy the musterd that \
         applied it, or restore the file; a migration is never edited after its release"
    )]
    Changed { version: i32, name: String },
    #[error(
        "creating the schema musterd is not permitted: as the database's owner run `{grant}`, then try again"
    )]
    MayNotCreateSchema { grant: String, source: tokio_postgres::Error },
    #[error(
        "{what} is not permitted: run migrate as the owner of schema musterd, or make this user its owner"
    )]
    NotPermitted { what: String, source: Box<refinery::Error> },
    #[error("{what}: nothing of it was kept; correct the cause below, then run migrate again")]
    Apply { what: String, source: Box<refinery::Error> },
    #[error(
        "there is a schema worker that is not ours: rename it (ALTER SCHEMA worker RENAME TO worker_old), then try again; \
         docs/moving-from-statbus.md copies its tasks"
    )]
    WorkerSchemaTaken,
    #[error(
        "making the schema worker: nothing of it was kept; correct the cause below, then run migrate again"
    )]
    WorkerSchema { source: tokio_postgres::Error },
    #[error("preparing the session for migrations: check the connection, then try again")]
    Prepare { source: tokio_postgres::Error },
}

impl MigrateError {
    pub(super) fn applying(source: refinery::Error) -> Self {
        let (what, code) = match source.kind() {
            Kind::Connection(what, inner) => {
                let driver = inner.downcast_ref::<tokio_postgres::Error>();
                (what.clone(), driver.and_then(tokio_postgres::Error::code).cloned())
            }
            other => (other.to_string(), None),
        };
        let source = Box::new(source);
        if code == Some(SqlState::INSUFFICIENT_PRIVILEGE) {
            return Self::NotPermitted { what, source };
        }
        Self::Apply { what, source }
    }
}

/// A schema that this binary does not run on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaState {
    #[error("the database has not been migrated, it has no musterd schema: run `musterd migrate`")]
    Missing,
    #[error("database is at V{database}, this binary needs V{binary}: run `musterd migrate`")]
    Behind { database: i32, binary: i32 },
    #[error(
        "database is at V{database} and no longer serves this binary, which knows up to V{binary}: deploy a newer musterd"
    )]
    Newer { database: i32, binary: i32 },
    #[error(
        "migration V{version} {name} was applied with other contents than this binary has: deploy that musterd"
    )]
    Changed { version: i32, name: String },
    #[error("the state of the schema cannot be read")]
    Unreadable { source: MigrateError },
}
