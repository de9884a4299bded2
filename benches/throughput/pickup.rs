//! How soon an idle worker picks up a lone task, beside a bare client that listens and claims with `SKIP LOCKED` when woken.
//!
//! The two take turns task by task, on one server. A pick-up is the time from the start of the transaction that enqueues
//! to the start of the one that claims, by the server's clock; both keep these as `created_at` and `claimed_at`.

use super::{
    binary::Binary,
    latency::{Wait, enqueue},
    listener::Listener,
    worker::Worker,
};
use crate::ground::{Database, Ground, connect};
use anyhow::Result;
use serde::Serialize;
use std::time::Instant;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Statement};

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pickups {
    pub(crate) musterd: Pickup,
    pub(crate) bare_client: Pickup,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pickup {
    /// From the enqueue to the claim.
    pub(crate) claimed_seconds: Wait,
    /// From before the enqueue to the notification of the end.
    pub(crate) done_seconds: Wait,
}

const TABLE: &str = "
    CREATE TABLE bare (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        state text NOT NULL DEFAULT 'queued',
        input jsonb NOT NULL DEFAULT '{}',
        created_at timestamptz NOT NULL DEFAULT now(),
        claimed_at timestamptz);
    CREATE INDEX bare_queued ON bare (id) WHERE state = 'queued'";
const INSERT: &str = "WITH task AS (INSERT INTO bare DEFAULT VALUES RETURNING id) SELECT id, pg_notify('bare_wake', '') FROM task";
const CLAIM: &str =
    "SELECT id, input FROM bare WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED";
const FINISH: &str = "UPDATE bare SET state = 'succeeded', claimed_at = now() WHERE id = $1
    RETURNING pg_notify('bare_done', id::text)";

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, samples: usize) -> Result<Pickups> {
    let database = ground.database().await?;
    let client = connect(&database.url).await?;
    client.batch_execute(TABLE).await?;
    client.close().await;
    let worker = Worker::start(musterd, &database, &[]).await?;
    let pickups = sample(&database, samples).await;
    worker.stop().await?;
    ground.drop_database(database).await?;
    pickups
}

async fn sample(database: &Database, samples: usize) -> Result<Pickups> {
    let mut bare_client = JoinSet::new();
    bare_client.spawn(serve(Listener::open(database, "bare_wake").await?));
    let client = connect(&database.url).await?;
    let insert = client.prepare(INSERT).await?;
    let mut worker_ends = Listener::open(database, "musterd_done").await?;
    let mut bare_ends = Listener::open(database, "bare_done").await?;
    let (mut by_worker, mut by_bare_client) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        let began = Instant::now();
        let id = enqueue(&client).await?;
        worker_ends.end_of(id).await?;
        by_worker.push(began.elapsed().as_secs_f64());
        let began = Instant::now();
        let id: i64 = client.query_one(&insert, &[]).await?.get(0);
        bare_ends.end_of(id).await?;
        by_bare_client.push(began.elapsed().as_secs_f64());
    }
    let pickups = Pickups {
        musterd: Pickup {
            claimed_seconds: claimed(&client, "musterd.tasks").await?,
            done_seconds: Wait::of(by_worker),
        },
        bare_client: Pickup {
            claimed_seconds: claimed(&client, "bare").await?,
            done_seconds: Wait::of(by_bare_client),
        },
    };
    client.close().await;
    Ok(pickups)
}

async fn claimed(client: &Client, relation: &str) -> Result<Wait> {
    let sql = format!("SELECT EXTRACT(EPOCH FROM claimed_at - created_at)::float8 FROM {relation}");
    Ok(Wait::of(client.query(&sql, &[]).await?.iter().map(|row| row.get(0)).collect()))
}

/// The bare client, until its connection or the benchmark ends.
async fn serve(mut listener: Listener) -> Result<()> {
    let (claim, finish) = (listener.client.prepare(CLAIM).await?, listener.client.prepare(FINISH).await?);
    while listener.heard().await {
        while take_one(&listener.client, &claim, &finish).await? {}
    }
    Ok(())
}

/// Claims and ends one task in one transaction, in two round trips; `false` when none waits.
async fn take_one(client: &Client, claim: &Statement, finish: &Statement) -> Result<bool> {
    let (begun, found) = tokio::join!(biased; client.batch_execute("BEGIN"), client.query_opt(claim, &[]));
    begun?;
    let Some(task) = found? else {
        client.batch_execute("COMMIT").await?;
        return Ok(false);
    };
    let id: i64 = task.get(0);
    let (params, commit) =
        ([&id as &(dyn tokio_postgres::types::ToSql + Sync)], client.batch_execute("COMMIT"));
    let (finished, committed) = tokio::join!(biased; client.query_one(finish, &params), commit);
    finished?;
    committed?;
    Ok(true)
}
