//! How long a user waits who submits little to an idle worker.

use super::{binary::Binary, worker::Worker};
use crate::ground::{Database, Ground, connect};
use anyhow::{Context, Result};
use futures::{StreamExt, stream};
use musterd::store::connect::Target;
use serde::Serialize;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client};

/// Rows of a small batch.
const SMALL: i32 = 200;
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latencies {
    /// From before a submit of one row to the notification of its end.
    pub(crate) lone_row_seconds: Wait,
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
    fn of(mut samples: Vec<f64>) -> Self {
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
    let (mut ends, _listener) = listen(database).await?;
    let (mut lone_row, mut last_row_to_done) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        let began = Instant::now();
        let id = submit(&client, 1).await?;
        wait_for(&mut ends, id).await?;
        lone_row.push(began.elapsed().as_secs_f64());
    }
    for _ in 0..samples {
        let id = submit(&client, SMALL).await?;
        // The server runs on this machine, so its clock is ours.
        let done = wait_for(&mut ends, id).await?.duration_since(UNIX_EPOCH)?.as_secs_f64();
        let sql =
            "SELECT EXTRACT(EPOCH FROM max(finished_at))::float8 FROM musterd.results WHERE batch_id = $1";
        last_row_to_done.push(done - client.query_one(sql, &[&id]).await?.get::<_, f64>(0));
    }
    client.close().await;
    Ok(Latencies {
        lone_row_seconds: Wait::of(lone_row),
        last_row_to_done_seconds: Wait::of(last_row_to_done),
    })
}

async fn submit(client: &Client, rows: i32) -> Result<i64> {
    let sql = "SELECT musterd.submit_batch('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, $1::int) n))";
    Ok(client.query_one(sql, &[&rows]).await?.get(0))
}

type Ends = mpsc::UnboundedReceiver<(i64, SystemTime)>;

/// The ends of batches, with the time they were heard of; for as long as the second value lives.
async fn listen(database: &Database) -> Result<(Ends, (Client, tokio::task::JoinSet<()>))> {
    let (client, mut connection) = Target::parse(&database.url)?.connect("musterd bench").await?;
    let (sender, ends) = mpsc::unbounded_channel();
    let mut driver = tokio::task::JoinSet::new();
    driver.spawn(async move {
        let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(note) = message
                && let Ok(end) = serde_json::from_str::<serde_json::Value>(note.payload())
                && let Some(id) = end["id"].as_i64()
            {
                // The receiver is gone once all samples are taken.
                let _ = sender.send((id, SystemTime::now()));
            }
        }
    });
    client.batch_execute("LISTEN musterd_done").await?;
    Ok((ends, (client, driver)))
}

async fn wait_for(ends: &mut Ends, id: i64) -> Result<SystemTime> {
    let found = async {
        while let Some((ended, at)) = ends.recv().await {
            if ended == id {
                return Ok(at);
            }
        }
        anyhow::bail!("the connection that listens was lost")
    };
    tokio::time::timeout(ANSWER_LIMIT, found).await.context("a small batch did not end")?
}
