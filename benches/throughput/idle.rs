//! What an idle worker asks of the database: statements a minute, on a server of its own that counts them.

use super::{binary::Binary, worker::Worker};
use crate::ground::{Database, Ground, connect, say};
use anyhow::Result;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio_postgres::Client;

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Idle {
    pub(crate) per_minute: f64,
    pub(crate) counted: Counted,
    pub(crate) seconds: f64,
}

/// What was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Counted {
    /// Statements, `BEGIN` and `COMMIT` too, by `pg_stat_statements`.
    Statements,
    /// Transactions, by `pg_stat_database`: the server has no `pg_stat_statements`.
    Transactions,
}

/// Settings of a server that counts statements.
pub(crate) const COUNTING: [(&str, &str); 2] =
    [("shared_preload_libraries", "pg_stat_statements"), ("pg_stat_statements.track", "top")];
/// After its start a worker connects, registers and prepares its statements.
const SETTLING_TIME: Duration = Duration::from_secs(20);
/// The most frequent statements, which are shown as progress.
const SHOWN: usize = 12;

const BY_STATEMENT: &str = "SELECT s.query, sum(s.calls)::bigint
    FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
   WHERE d.datname = $1 GROUP BY s.query";
const BY_TRANSACTION: &str =
    "SELECT 'transactions', xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1";

/// `ground` is a server that counts as `counted` says, with nothing else on it.
pub(crate) async fn measure(
    ground: &Ground,
    musterd: &Binary,
    counted: Counted,
    seconds: u64,
) -> Result<Idle> {
    let database = ground.database().await?;
    // Asked from another database, so that the questions are not counted.
    let observer = ground.database().await?;
    let client = connect(&observer.url).await?;
    if counted == Counted::Statements {
        client.batch_execute("CREATE EXTENSION pg_stat_statements").await?;
    }
    let worker = Worker::start(musterd, &database, &[]).await?;
    tokio::time::sleep(SETTLING_TIME).await;
    let before = counts(&client, &database, counted).await?;
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let seconds = began.elapsed().as_secs_f64();
    let after = counts(&client, &database, counted).await?;
    client.close().await;
    worker.stop().await?;
    ground.drop_database(database).await?;
    ground.drop_database(observer).await?;
    let mut grown = grown(&before, after);
    grown.sort_by_key(|(_, calls)| std::cmp::Reverse(*calls));
    for (query, calls) in grown.iter().take(SHOWN) {
        say(&format!("idle: {calls:>4} × {}", first_words(query)));
    }
    let calls: i64 = grown.iter().map(|(_, calls)| calls).sum();
    Ok(Idle { per_minute: calls as f64 * 60.0 / seconds, counted, seconds })
}

/// How often each statement was sent to the database.
async fn counts(client: &Client, database: &Database, counted: Counted) -> Result<Vec<(String, i64)>> {
    let sql = match counted {
        Counted::Statements => BY_STATEMENT,
        Counted::Transactions => BY_TRANSACTION,
    };
    let rows = client.query(sql, &[&database.name]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// What was called since `before`, and how often.
fn grown(before: &[(String, i64)], after: Vec<(String, i64)>) -> Vec<(String, i64)> {
    let earlier =
        |query: &str| before.iter().find(|(known, _)| known == query).map_or(0, |(_, calls)| *calls);
    let since = |(query, calls): (String, i64)| {
        let calls = calls - earlier(&query);
        (query, calls)
    };
    after.into_iter().map(since).filter(|(_, calls)| *calls > 0).collect()
}

/// The start of a statement on one line.
fn first_words(query: &str) -> String {
    let words: Vec<&str> = query
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .flat_map(str::split_whitespace)
        .take(14)
        .collect();
    words.join(" ")
}
