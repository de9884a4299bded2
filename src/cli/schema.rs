//! What a command adds to an error of the database: that it was not migrated, instead of which table was missed first; or that
//! it was never named.

use super::Global;
use musterd::{
    config::load,
    embedded,
    store::{
        connect::ConnectError,
        migrate::{self, SchemaState},
    },
};
use tokio_postgres::error::{Error, SqlState};

/// The error, or what is behind it: a schema that is not there, or not this binary's.
pub(super) async fn explain(global: &Global, error: anyhow::Error) -> anyhow::Error {
    let unreached = error.chain().any(|cause| cause.downcast_ref::<ConnectError>().is_some());
    if unreached && !global.names_a_database() && embedded::discover().is_none() {
        return error.context("no `musterd dev` is running, and no database.url is given");
    }
    let missed = error.chain().find_map(|cause| cause.downcast_ref::<Error>()).is_some_and(misses_something);
    if !missed {
        return error;
    }
    match behind(global).await {
        Some(state) => state.into(),
        None => error,
    }
}

/// Whether a statement spoke of something that the database does not have.
pub(super) fn misses_something(error: &Error) -> bool {
    let codes = [
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_TABLE,
        SqlState::UNDEFINED_FUNCTION,
        SqlState::UNDEFINED_COLUMN,
        SqlState::UNDEFINED_OBJECT,
    ];
    error.code().is_some_and(|code| codes.contains(code))
}

async fn behind(global: &Global) -> Option<SchemaState> {
    let loaded = load(&global.given()).ok()?;
    let client = global.connect(&loaded.config.database).await.ok()?;
    let state = migrate::check(&client).await.err();
    client.close().await;
    state.filter(|state| !matches!(state, SchemaState::Unreadable { .. }))
}
