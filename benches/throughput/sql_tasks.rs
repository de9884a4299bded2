//! Tasks of a `sql` handler, exactly once each, beside bare `CALL`s of the same procedure in a loop.
//!
//! Both have as many connections, and both wait for the disk at every commit.

use super::{
    binary::Binary,
    drain::{Enqueue, Speed, drain, fill},
    load::Start,
};
use crate::ground::{Database, Ground, connect};
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::sync::{
    Arc,
    atomic::{AtomicI32, Ordering},
};
use tokio::task::JoinSet;

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct SqlTasks {
    pub(crate) bare_calls: Speed,
    pub(crate) musterd: Speed,
}

/// What the shipped configuration has, for both sides.
const CONNECTIONS: usize = 8;
const SETTINGS: [&str; 3] =
    ["database.sql_connections=8", "handlers.note.kind=sql", "handlers.note.procedure=app.note"];

const PROCEDURE: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.notes (task_id bigint PRIMARY KEY, note jsonb NOT NULL, noted_at timestamptz NOT NULL DEFAULT now());
    CREATE PROCEDURE app.note(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO app.notes (task_id, note) VALUES (p_task_id, p_payload);
    END $$";

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, tasks: i32) -> Result<SqlTasks> {
    Ok(SqlTasks {
        bare_calls: by_bare_calls(ground, tasks).await?,
        musterd: by_worker(ground, musterd, tasks).await?,
    })
}

async fn by_worker(ground: &Ground, musterd: &Binary, tasks: i32) -> Result<Speed> {
    let database = prepare(ground).await?;
    fill(&database, "note", tasks, Enqueue::SetWise).await?;
    let speed = drain(ground, musterd, &database, tasks, &SETTINGS).await?;
    check(&database, tasks).await?;
    ground.drop_database(database).await?;
    Ok(speed)
}

async fn by_bare_calls(ground: &Ground, tasks: i32) -> Result<Speed> {
    let database = prepare(ground).await?;
    let start = Start::now(ground, &database).await?;
    let next = Arc::new(AtomicI32::new(1));
    let mut connections = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (client, next) = (connect(&database.url).await?, Arc::clone(&next));
        connections.spawn(async move {
            let call = client.prepare("CALL app.note($1, $2)").await?;
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n > tasks {
                    client.close().await;
                    return anyhow::Ok(());
                }
                client.execute(&call, &[&i64::from(n), &json!({ "n": n })]).await?;
            }
        });
    }
    while let Some(ended) = connections.join_next().await {
        ended??;
    }
    let (took, wal) = (start.elapsed(), ground.wal().await?);
    let measured = start.end(ground, &database, tasks, took, wal).await?;
    check(&database, tasks).await?;
    ground.drop_database(database).await?;
    Ok(measured.into())
}

async fn prepare(ground: &Ground) -> Result<Database> {
    let database = ground.database().await?;
    let client = connect(&database.url).await?;
    client.batch_execute(PROCEDURE).await?;
    client.close().await;
    Ok(database)
}

/// The figures count only if the procedure ran once for every task.
async fn check(database: &Database, tasks: i32) -> Result<()> {
    let client = connect(&database.url).await?;
    let noted: i64 = client.query_one("SELECT count(*) FROM app.notes", &[]).await?.get(0);
    client.close().await;
    ensure!(noted == i64::from(tasks), "{tasks} tasks, but {noted} effects");
    Ok(())
}
