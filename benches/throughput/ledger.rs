//! The bare SQL of the path: the daemon's own statements from two plain connections, and nothing around them.

use super::load::{self, BLOCK, Measured, Start};
use crate::ground::{Ground, connect};
use anyhow::Result;
use tokio::task::JoinSet;
use tokio_postgres::{
    Client, Row, Statement,
    types::{Json, ToSql},
};
use uuid::Uuid;

const CARVE: &str = include_str!("../../src/store/sql/carve.sql");
const READ: &str = include_str!("../../src/store/sql/read.sql");
const LOCK: &str = include_str!("../../src/store/sql/lock.sql");
const RESULTS: &str = include_str!("../../src/store/sql/results.sql");
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
    results: Statement,
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
        results: client.prepare(RESULTS).await?,
        close: client.prepare(CLOSE).await?,
    })
}

/// Block after block until there is none.
async fn work(client: impl std::ops::Deref<Target = Client>, worker: String) -> Result<()> {
    let statements = prepare(&client).await?;
    while let Some(block) = carve(&client, &statements, &worker).await? {
        let (id, token, batch): (i64, Uuid, i64) =
            (block.get("id"), block.get("token"), block.get("batch_id"));
        let (first, last): (i32, i32) = (block.get("first_line"), block.get("last_line"));
        let read = client.query(&statements.read, &[&batch, &first, &last, &i64::from(BLOCK)]).await?;
        let lines: Vec<i32> = read.iter().map(|row| row.get(0)).collect();
        flush(&client, &statements, id, token, &lines).await?;
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
async fn flush(client: &Client, statements: &Statements, id: i64, token: Uuid, lines: &[i32]) -> Result<()> {
    let count = lines.len();
    let (ids, tokens, waits) = (vec![id], vec![token], vec![0.0_f64]);
    let (ones, ok) = (vec![1_i32; count], vec![true; count]);
    let (no_json, no_text) = (vec![None::<Json<()>>; count], vec![None::<&str>; count]);
    let (no_slots, no_retries): (Vec<i32>, Vec<bool>) = (Vec::new(), Vec::new());
    let results: [&(dyn ToSql + Sync); 9] =
        [&ids, &tokens, &ones, &lines, &ones, &ok, &no_json, &no_text, &no_json];
    let held: [&(dyn ToSql + Sync); 2] = [&ids, &tokens];
    let no_error = vec![None::<&str>];
    let ended: [&(dyn ToSql + Sync); 7] =
        [&ids, &tokens, &waits, &no_slots, &no_retries, &no_slots, &no_error];
    let (begun, locked, stored, closed, committed) = tokio::join!(
        biased;
        client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED"),
        client.query(&statements.lock, &held),
        client.query(&statements.results, &results),
        client.execute(&statements.close, &ended),
        client.batch_execute("COMMIT"),
    );
    begun?;
    locked?;
    stored?;
    closed?;
    committed?;
    Ok(())
}
