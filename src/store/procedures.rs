//! The statements around a user's own procedures and functions. What they call is the user's, and runs with the user's rights.

use super::{connect, tasks};
use deadpool_postgres::ClientWrapper;
use futures::StreamExt;
use std::{fmt::Display, time::Duration};
use tokio_postgres::{Client, Column, Error};

/// Between two calls of one transaction: what the first has left in the session does not meet the second. Its advisory locks stay, as
/// the locks of its transaction do.
pub const BETWEEN_CALLS: &str =
    "CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; DISCARD SEQUENCES; DISCARD TEMP";

/// After the transaction, with [`BETWEEN_CALLS`]: `DISCARD ALL` without what makes the next call slow. Plans stay, and so do the
/// statements that the driver prepared. Cursors, roles, settings, channels, sequences, temporary tables, advisory locks and prepared
/// statements of the procedure's go.
const CLEAN: &str = "UNLISTEN *; SELECT musterd.clean_session()";

/// Calls a procedure with the id of the session's own task and a payload.
pub fn call(procedure: &impl Display) -> String {
    format!("CALL {procedure}({}, $1)", tasks::OWN_ID)
}

/// Everything of a function of this name.
pub fn outcomes_of(function: &impl Display) -> String {
    format!("SELECT {ALL} FROM {function}($1::bigint, $2::jsonb, $3::jsonb) AS f")
}

const ALL: &str = "f.*";

/// What is read of it. The columns `error_code` and `outputs` are a function's own choice.
pub fn outcomes_read(statement: &str, columns: &[Column]) -> String {
    let has = |name: &str| columns.iter().any(|column| column.name() == name);
    let code = if has("error_code") { "f.error_code::text" } else { "NULL::text" };
    let outputs = if has("outputs") { "f.outputs::jsonb" } else { "NULL::jsonb" };
    let read = format!("f.line::int, f.outcome::text, f.result::jsonb, f.error::text, {code}, {outputs}");
    statement.replacen(ALL, &read, 1)
}

/// The limits and rights of a call, for the rest of its transaction. `search_path` and `role` are quoted already.
pub fn settings(limit: Duration, search_path: Option<&str>, role: Option<&str>) -> String {
    // Warnings must reach us: one of them announces that another session crashed the server.
    let mut sql = format!(
        "SET LOCAL client_min_messages = warning; SET LOCAL statement_timeout = {}",
        connect::milliseconds(limit).max(1)
    );
    if let Some(path) = search_path {
        sql.push_str(&format!("; SET LOCAL search_path = {path}"));
    }
    if let Some(role) = role {
        sql.push_str(&format!("; SET LOCAL ROLE {role}"));
    }
    sql
}

/// Whether a session answers.
pub async fn answers(client: &Client) -> Result<(), Error> {
    client.batch_execute("SELECT 1").await
}

/// How a transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Commit,
    Rollback,
}

/// What a session is like after its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Clean,
    /// It could not be cleaned.
    Dirty,
}

/// Ends the transaction and cleans the session in one message: a pooler in transaction mode lends the session to another
/// client right after it. An error is one of the transaction's end; what goes wrong after it concerns the session only.
pub async fn end(client: &ClientWrapper, end: End) -> Result<Condition, Error> {
    let end = match end {
        End::Commit => "COMMIT",
        End::Rollback => "ROLLBACK",
    };
    let answers = client.simple_query_raw(&format!("{end}; {BETWEEN_CALLS}; {CLEAN}")).await?;
    tokio::pin!(answers);
    let Some(ended) = answers.next().await else { return Ok(Condition::Dirty) };
    ended?;
    while let Some(answer) = answers.next().await {
        if let Err(error) = answer {
            tracing::debug!(error = &error as &dyn std::error::Error, "a session could not be cleaned");
            return Ok(Condition::Dirty);
        }
    }
    Ok(Condition::Clean)
}
