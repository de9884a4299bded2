//! Is there a pooler in transaction mode between us and the server? Found by what it does: it lends sessions.
//!
//! Each of our connections asks which server process serves it. Without a transaction pooler two connections never have
//! the same one, and each keeps its own. With one, the session that a transaction has just given back is the next to be
//! lent. A busy pooler may hide that once; it is asked several times.

use super::{
    Config, OpenError, Pooler,
    connect::{OneShot, Target},
};
use std::time::Duration;
use tokio_postgres::{Client, Error};

/// How often is asked before a pooler is taken to be absent.
const ROUNDS: usize = 5;
/// The longest wait for one answer: the other connection may hold the pooler's last session.
const WAIT: Duration = Duration::from_secs(5);

/// What `database.pooler` comes to; logged unless the configuration has said it.
pub async fn find_out(config: &Config) -> Result<Pooler, OpenError> {
    if config.direct_url.is_some() && lends_sessions(&config.direct_target()?).await? {
        return Err(OpenError::DirectIsPooled);
    }
    if config.pooler != Pooler::Auto || config.direct_url.is_some() {
        if config.is_pooled() {
            tell(config);
        }
        return Ok(config.pooler);
    }
    let target = config.target()?;
    Ok(match lends_sessions(&target).await? {
        true => {
            tell(config);
            Pooler::Transaction
        }
        false => Pooler::None,
    })
}

fn tell(config: &Config) {
    match config.direct_url {
        Some(_) => tracing::info!(
            "database.url leads to a transaction pooler; LISTEN and the session lock go past it by database.direct_url"
        ),
        None => tracing::warn!(
            "database.url leads to a transaction pooler and database.direct_url is not set: work is found by polling, \
             and dead workers only by their missing heartbeats"
        ),
    }
}

/// Whether the target is a pooler in transaction mode.
pub async fn lends_sessions(target: &Target) -> Result<bool, OpenError> {
    let target = target.clone().unnamed();
    let (first, second) = (target.open("musterd start").await?, target.open("musterd start").await?);
    let asked = ask(&first, &second).await;
    first.close().await;
    second.close().await;
    Ok(asked.unwrap_or_else(|error| {
        tracing::debug!(error = &error as &dyn std::error::Error, "whether there is a pooler is not known");
        false
    }))
}

/// The same with two connections that are there already.
pub async fn ask(first: &OneShot, second: &OneShot) -> Result<bool, Error> {
    for _ in 0..ROUNDS {
        if lent(first, second).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn lent(first: &OneShot, second: &OneShot) -> Result<bool, Error> {
    let (before, own) = (process(first).await?, process(first).await?);
    let other = process(second).await?;
    if own == other || own != before {
        return Ok(true);
    }
    // The first holds a session while the second has another; what the first gives back the second gets.
    first.batch_execute("BEGIN").await?;
    let (held, other) = (process(first).await?, tokio::time::timeout(WAIT, process(second)).await);
    first.batch_execute("COMMIT").await?;
    let Ok(other) = other else { return Ok(true) };
    Ok(held != own || process(second).await? != other?)
}

/// The number of the server process that serves a connection just now.
async fn process(client: &Client) -> Result<i32, Error> {
    // Typed, therefore unnamed, whatever the connection does.
    let rows = client.query_typed("SELECT pg_catalog.pg_backend_pid()", &[]).await?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}
