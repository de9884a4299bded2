//! The bare SQL of the path: the daemon's own statements from two plain connections, and nothing around them.

use super::load::{self, BLOCK, Measured, Start};
use crate::ground::{Ground, connect};
use anyhow::Result;
use musterd::lines::Lines;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Row, Statement, types::ToSql};
use uuid::Uuid;

const CARVE: &str = include_str!("../../src/store/sql/carve.sql");
const READ: &str = include_str!("../../src/store/sql/read.sql");
const LOCK: &str = include_str!("../../src/store/sql/lock.sql");
const OUTCOMES: &str = include_str!("../../src/store/sql/outcomes.sql");
const FREE_REST: &str = include_str!("../../src/store/sql/free_rest.sql");
const CLOSE: &str = include_str!("../../src/store/sql/close.sql");

/// As many as the machine class has cores.
const CONNECTIONS: usize = 2;

pub(crate) async fn measure(ground: &Ground, rows: i32) -> Result<Measured> {
    let database = ground.database().await?;
    let batch = load::load_batch(&database, rows).await?;
    let client = connect(&database.url).await?;
    client.query_one("SELECT musterd.release($1)", &[&batch]).await?;
    client.close().await;
    let start = Start::now(ground, &database).await?;
    let mut connections = JoinSet::new();
    for number in 0..CONNECTIONS {
        connections.spawn(work(connect(&database.url).await?, format!("bench-{number}")));
    }
    while let Some(ended) = connections.join_next().await {
        ended??;
    }
    let (took, wal) = (start.elapsed(), ground.wal().await?);
    let measured = start.end(ground, &database, rows, took, wal).await?;
    load::check_results(&database, rows).await?;
    ground.drop_database(database).await?;
    Ok(measured)
}

struct Statements {
    skipping: Statement,
    waiting: Statement,
    read: Statement,
    lock: Statement,
    outcomes: Statement,
    free_rest: Statement,
    close: Statement,
}

async fn prepare(client: &Client) -> Result<Statements> {
    let carve = |skip: &str| {
        CARVE.replace("/*skip*/", skip).replace("/*order*/", "b.priority,").replace("/*limit*/", "")
    };
    Ok(Statements {
        skipping: client.prepare(&carve("SKIP LOCKED")).await?,
        waiting: client.prepare(&carve("")).await?,
        read: client.prepare(READ).await?,
        lock: client.prepare(LOCK).await?,
        outcomes: client.prepare(OUTCOMES).await?,
        free_rest: client.prepare(FREE_REST).await?,
        close: client.prepare(CLOSE).await?,
    })
}

/// What the daemon's sessions are pinned to.
const SETTINGS: &str = "SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off";

/// Block after block until there is none.
async fn work(client: impl std::ops::Deref<Target = Client>, worker: String) -> Result<()> {
    client.batch_execute(SETTINGS).await?;
    let statements = prepare(&client).await?;
    while let Some(block) = carve(&client, &statements, &worker).await? {
        let (id, token, batch): (i64, Uuid, i64) =
            (block.get("id"), block.get("token"), block.get("batch_id"));
        let lines: Lines = block.get("lines");
        let (first, last) = (lines.first().unwrap_or_default(), lines.last().unwrap_or_default());
        let chunks = client.query(&statements.read, &[&batch, &first, &last, &2_097_152_i64]).await?;
        anyhow::ensure!(!chunks.is_empty(), "lines {lines} are not there");
        flush(&client, &statements, id, token, lines).await?;
    }
    Ok(())
}

async fn carve(client: &Client, statements: &Statements, worker: &str) -> Result<Option<Row>> {
    let (tokens, commands, size, fibers) = (vec![Uuid::new_v4()], vec!["noop"], vec![BLOCK], 8.0_f64);
    let (any_scope, no_tasks, none_durable) = (None::<i64>, None::<Vec<&str>>, Vec::<&str>::new());
    let params: [&(dyn ToSql + Sync); 10] = [
        &"default",
        &worker,
        &tokens,
        &commands,
        &size,
        &size,
        &fibers,
        &any_scope,
        &no_tasks,
        &none_durable,
    ];
    // Both connections want the same batch: the one that comes second waits, as the daemon does.
    match client.query_opt(&statements.skipping, &params).await? {
        Some(block) => Ok(Some(block)),
        None => Ok(client.query_opt(&statements.waiting, &params).await?),
    }
}

/// The transaction of the batcher, sent in one go as the batcher does.
async fn flush(client: &Client, statements: &Statements, id: i64, token: Uuid, lines: Lines) -> Result<()> {
    let (ids, tokens, one, zero) = (vec![id], vec![token], vec![1_i32], vec![0_i32]);
    let (succeeded, done, none) = (vec![lines.len() as i32], vec![lines], vec![Lines::new()]);
    let (no_text, no_wait) = (vec![None::<&str>], vec![0.0_f64]);
    let held: [&(dyn ToSql + Sync); 2] = [&ids, &tokens];
    let outcomes: [&(dyn ToSql + Sync); 10] =
        [&ids, &tokens, &done, &one, &one, &done, &succeeded, &zero, &no_text, &no_text];
    let rest: [&(dyn ToSql + Sync); 7] = [&ids, &tokens, &done, &none, &no_wait, &no_wait, &no_text];
    let ended: [&(dyn ToSql + Sync); 4] = [&ids, &tokens, &done, &one];
    let (begun, locked, stored, freed, closed, committed) = tokio::join!(
        biased;
        client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'"),
        client.query(&statements.lock, &held),
        client.execute(&statements.outcomes, &outcomes),
        client.execute(&statements.free_rest, &rest),
        client.query(&statements.close, &ended),
        client.batch_execute("COMMIT"),
    );
    begun?;
    locked?;
    stored?;
    freed?;
    closed?;
    committed?;
    Ok(())
}
