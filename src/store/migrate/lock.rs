//! One process migrates at a time: a session advisory lock, asked for and never waited in.
//!
//! A statement that waits for the lock would hold a snapshot, and CREATE INDEX CONCURRENTLY in the other
//! process's migration would wait for that snapshot: neither would ever end.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use tracing::{debug, info};

use super::MigrateError;

/// The lock's 64-bit key: `muster` and two letters for the purpose, so that no other program meets it by chance.
const KEY: i64 = i64::from_be_bytes(*b"mustermg");
/// How often to ask again.
const PAUSE: Duration = Duration::from_millis(100);

/// Proof that the session holds the lock.
#[must_use = "the lock is kept until release"]
pub(super) struct Lock(());

impl Lock {
    pub(super) async fn acquire(client: &Client, wait: Duration) -> Result<Self, MigrateError> {
        let start = Instant::now();
        let mut is_logged = false;
        loop {
            if try_lock(client).await? {
                return Ok(Self(()));
            }
            if start.elapsed() >= wait {
                let waited = humantime::format_duration(wait);
                return Err(MigrateError::Locked { holder: holder(client).await?, waited });
            }
            if !is_logged {
                let holder = holder(client).await?;
                info!(holder, "another migration is running ({holder}); waiting for it");
                is_logged = true;
            }
            sleep(PAUSE).await;
        }
    }

    /// A session that cannot answer any more has no lock to release.
    pub(super) async fn release(self, client: &Client) {
        let sql = "SELECT pg_catalog.pg_advisory_unlock($1)";
        if let Err(error) = client.query_typed(sql, &[(&KEY, Type::INT8)]).await {
            debug!(error = &error as &dyn std::error::Error, "the migration lock went with its session");
        }
    }
}

async fn try_lock(client: &Client) -> Result<bool, MigrateError> {
    let rows = client
        .query_typed("SELECT pg_catalog.pg_try_advisory_lock($1)", &[(&KEY, Type::INT8)])
        .await
        .map_err(|source| MigrateError::Lock { source })?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}

/// Who has it, as far as our rights let us see.
async fn holder(client: &Client) -> Result<String, MigrateError> {
    let sql = "SELECT pg_catalog.concat_ws(' ', a.application_name, 'pid', l.pid::text, \
                      'from ' || coalesce(a.client_addr::text, 'a local socket'), 'as ' || a.usename) \
               FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a USING (pid) \
               WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
                 AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()) \
                 AND (l.classid::bigint << 32 | l.objid::bigint) = $1";
    let rows = client
        .query_typed(sql, &[(&KEY, Type::INT8)])
        .await
        .map_err(|source| MigrateError::Lock { source })?;
    Ok(rows.first().map_or_else(|| "a process that has just ended".to_string(), |row| row.get(0)))
}
