//! Questions about the server itself, for `musterd doctor`.

use std::time::{Duration, SystemTime};
use tokio_postgres::{Client, Error};

/// The oldest server we work with, as `server_version_num` writes it.
pub const OLDEST: i32 = 140_000;

#[derive(Debug)]
pub struct Server {
    pub version: String,
    pub version_num: i32,
    pub user: String,
    /// How far the server's clock is from ours, whichever way.
    pub clock_offset: Duration,
}

pub async fn server(client: &Client) -> Result<Server, Error> {
    let asked = SystemTime::now();
    let row = client
        .query_one(
            "SELECT pg_catalog.current_setting('server_version'),
                    pg_catalog.current_setting('server_version_num')::int,
                    current_user::text,
                    pg_catalog.clock_timestamp()",
            &[],
        )
        .await?;
    let answered = SystemTime::now();
    // The answer was made somewhere between question and arrival: only what is outside counts.
    let there: SystemTime = row.get(3);
    let early = asked.duration_since(there).unwrap_or_default();
    let late = there.duration_since(answered).unwrap_or_default();
    Ok(Server {
        version: row.get(0),
        version_num: row.get(1),
        user: row.get(2),
        clock_offset: Duration::from_millis(early.max(late).as_millis() as u64),
    })
}

/// What this user may not do that a worker must, in a person's words.
pub async fn missing_rights(client: &Client) -> Result<Vec<String>, Error> {
    let rows = client
        .query(
            "SELECT 'use schema musterd'
              WHERE EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'musterd')
                AND NOT pg_catalog.has_schema_privilege('musterd', 'USAGE')
             UNION ALL
             SELECT pg_catalog.lower(p.right_) || ' on musterd.' || c.relname
               FROM pg_catalog.pg_class c
               JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'musterd'
              CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) p (right_)
              WHERE c.relkind IN ('r', 'p')
                AND c.relname IN ('task_records', 'task_tickets', 'task_claims', 'batches', 'chunks', 'blocks', 'outcomes', 'failures', 'failures_history', 'workers')
                -- Written once, never changed.
                AND NOT (c.relname IN ('chunks', 'outcomes', 'failures', 'failures_history') AND p.right_ = 'UPDATE')
                AND NOT pg_catalog.has_table_privilege(c.oid, p.right_)",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The machines on which workers live.
pub async fn machines(client: &Client) -> Result<Vec<String>, Error> {
    const SQL: &str =
        "SELECT DISTINCT w.host FROM musterd.workers w WHERE musterd.is_alive(w.state) ORDER BY 1 LIMIT 20";
    Ok(client.query(SQL, &[]).await?.iter().map(|row| row.get(0)).collect())
}

#[derive(Debug)]
pub struct Setting {
    pub name: String,
    pub found: String,
    pub advice: String,
}

/// Server settings that cost durability or room.
pub async fn harmful_settings(client: &Client, connections: u32) -> Result<Vec<Setting>, Error> {
    let row = client
        .query_one(
            "SELECT pg_catalog.current_setting('fsync'), pg_catalog.current_setting('full_page_writes'),
                    pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('autovacuum'),
                    pg_catalog.current_setting('max_connections')::int
                    - (SELECT pg_catalog.count(*)::int FROM pg_catalog.pg_stat_activity WHERE backend_type = 'client backend')",
            &[],
        )
        .await?;
    let mut harmful = Vec::new();
    let mut off = |name: &str, value: &str, advice: &str| {
        if value == "off" {
            harmful.push(Setting { name: name.into(), found: "off".into(), advice: advice.into() });
        }
    };
    off("fsync", row.get(0), "turn it on: a power cut may destroy the database");
    off("full_page_writes", row.get(1), "turn it on, unless the file system writes pages whole");
    off("synchronous_commit", row.get(2), "turn it on: a crash loses outcomes that were reported as written");
    off("autovacuum", row.get(3), "turn it on: claims slow down as dead rows gather");
    let free: i32 = row.get(4);
    if i64::from(free) < i64::from(connections) {
        harmful.push(Setting {
            name: "max_connections".into(),
            found: format!("{free} free, one replica takes up to {connections}"),
            advice: "raise max_connections, lower database.max_connections, or use a pooler".into(),
        });
    }
    Ok(harmful)
}

/// What a routine must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routine {
    Procedure,
    Function,
}

/// Why a handler's routine cannot be called, by `role` if one is given; `None` when it can.
pub async fn routine_trouble(
    client: &Client,
    signature: &str,
    kind: Routine,
    role: Option<&str>,
) -> Result<Option<&'static str>, Error> {
    const SQL: &str = "SELECT p.prokind::text, p.proretset,
               pg_catalog.has_function_privilege(COALESCE($2, CURRENT_USER)::name, p.oid, 'EXECUTE')
               AND pg_catalog.has_schema_privilege(COALESCE($2, CURRENT_USER)::name, p.pronamespace, 'USAGE')
          FROM pg_catalog.pg_proc p WHERE p.oid = pg_catalog.to_regprocedure($1)";
    let Some(row) = client.query_opt(SQL, &[&signature, &role]).await? else {
        return Ok(Some("does not exist"));
    };
    let (found, is_set, may): (&str, bool, bool) = (row.get(0), row.get(1), row.get(2));
    Ok(match (kind, found) {
        (Routine::Procedure, "p") | (Routine::Function, "f") if !may => Some("may not be executed"),
        (Routine::Function, "f") if !is_set => Some("returns no table"),
        (Routine::Procedure, "p") | (Routine::Function, "f") => None,
        (Routine::Procedure, _) => Some("is no procedure"),
        (Routine::Function, _) => Some("is no function"),
    })
}
