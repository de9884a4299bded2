//! How long a user waits who submits little to an idle worker.

use super::{binary::Binary, listener::Listener, worker::Worker};
use crate::ground::{Database, Ground, connect};
use anyhow::Result;
use serde::Serialize;
use std::time::{Instant, UNIX_EPOCH};
use tokio_postgres::Client;

/// Rows of a small batch.
const SMALL: i32 = 200;

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latencies {
    /// From before a submit of one row to the notification of its end.
    pub(crate) lone_row_seconds: Wait,
    /// From before an enqueue to the notification of the task's end.
    pub(crate) lone_task_seconds: Wait,
    /// From the last row's flush to the notification of the batch's end.
    pub(crate) last_row_to_done_seconds: Wait,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Wait {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) samples: usize,
}

impl Wait {
    pub(crate) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self { p50: at(&samples, 0.5), p99: at(&samples, 0.99), samples: samples.len() }
    }
}

/// A quantile of what was really seen, nearest rank.
fn at(sorted: &[f64], quantile: f64) -> f64 {
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, samples: usize) -> Result<Latencies> {
    let database = ground.database().await?;
    let worker = Worker::start(musterd, &database, &[]).await?;
    let latencies = sample(&database, samples).await;
    worker.stop().await?;
    ground.drop_database(database).await?;
    latencies
}

async fn sample(database: &Database, samples: usize) -> Result<Latencies> {
    let client = connect(&database.url).await?;
    let mut listener = Listener::open(database, "musterd_done").await?;
    let (mut lone_row, mut lone_task, mut last_row_to_done) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..samples {
        let began = Instant::now();
        let id = submit(&client, 1).await?;
        listener.end_of(id).await?;
        lone_row.push(began.elapsed().as_secs_f64());
        let began = Instant::now();
        let id = enqueue(&client).await?;
        listener.end_of(id).await?;
        lone_task.push(began.elapsed().as_secs_f64());
    }
    for _ in 0..samples {
        let id = submit(&client, SMALL).await?;
        // The server runs on this machine, so its clock is ours.
        let done = listener.end_of(id).await?.duration_since(UNIX_EPOCH)?.as_secs_f64();
        let sql =
            "SELECT EXTRACT(EPOCH FROM max(finished_at))::float8 FROM musterd.results WHERE batch_id = $1";
        last_row_to_done.push(done - client.query_one(sql, &[&id]).await?.get::<_, f64>(0));
    }
    client.close().await;
    Ok(Latencies {
        lone_row_seconds: Wait::of(lone_row),
        lone_task_seconds: Wait::of(lone_task),
        last_row_to_done_seconds: Wait::of(last_row_to_done),
    })
}

async fn submit(client: &Client, rows: i32) -> Result<i64> {
    let sql = "SELECT musterd.submit_batch('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, $1::int) n))";
    Ok(client.query_one(sql, &[&rows]).await?.get(0))
}

/// A task of `noop`; its id.
pub(crate) async fn enqueue(client: &Client) -> Result<i64> {
    Ok(client.query_one("SELECT musterd.enqueue('noop')", &[]).await?.get(0))
}
