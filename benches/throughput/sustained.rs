//! Enqueue and drain at once: producers add single tasks, each in a transaction of its own, while they are worked off.
//!
//! Beside it the queue table with as many producers, whose consumers look again a moment after they found nothing.

use super::{
    binary::Binary,
    classic::{self, Consumer},
    drain::{check, until_ended},
    worker::Worker,
};
use crate::ground::{Database, Ground, connect};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

const PRODUCERS: usize = 2;
/// How long a consumer of the queue table waits when it found nothing.
const EMPTY_WAIT: Duration = Duration::from_millis(5);

const ENQUEUE: &str = "SELECT musterd.enqueue('noop', jsonb_build_object('n', $1::int))";
const INSERT: &str = "INSERT INTO classic (batch_id, input) VALUES (1, jsonb_build_object('n', $1::int))";

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Sustained {
    pub(crate) classic: Flow,
    pub(crate) musterd: Flow,
}

/// What went in and out while the producers ran.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Flow {
    pub(crate) enqueued_per_second: f64,
    pub(crate) done_per_second: f64,
    /// Tasks that were enqueued and not done when the producers stopped.
    pub(crate) left: f64,
}

/// What the producers did, and when by the server's clock.
struct Produced {
    tasks: i32,
    began: f64,
    ended: f64,
}

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, seconds: u64) -> Result<Sustained> {
    let time = Duration::from_secs(seconds);
    Ok(Sustained {
        classic: by_classic(ground, time).await?,
        musterd: by_worker(ground, musterd, time).await?,
    })
}

async fn by_worker(ground: &Ground, musterd: &Binary, time: Duration) -> Result<Flow> {
    let database = ground.database().await?;
    ground.settle().await?;
    let worker = Worker::start(musterd, &database, &[]).await?;
    let produced = produce(&database, ENQUEUE, time).await?;
    until_ended(&worker, produced.tasks).await?;
    worker.stop().await?;
    check(&database, produced.tasks).await?;
    let flow = flow(&database, "musterd.tasks", &produced).await?;
    ground.drop_database(database).await?;
    Ok(flow)
}

async fn by_classic(ground: &Ground, time: Duration) -> Result<Flow> {
    let database = ground.database().await?;
    classic::create(&database).await?;
    ground.settle().await?;
    let over = Arc::new(AtomicBool::new(false));
    let mut consumers = JoinSet::new();
    for number in 0..classic::CONNECTIONS {
        let consumer = Consumer::new(connect(&database.url).await?, number).await?;
        consumers.spawn(consume(consumer, Arc::clone(&over)));
    }
    let produced = produce(&database, INSERT, time).await?;
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = consumers.join_next().await {
        ended??;
    }
    classic::check(&database, produced.tasks).await?;
    let flow = flow(&database, "classic", &produced).await?;
    ground.drop_database(database).await?;
    Ok(flow)
}

/// Block after block, until the producers are over and nothing is left.
async fn consume(consumer: Consumer, over: Arc<AtomicBool>) -> Result<()> {
    loop {
        // Read before the claim: what was added until then is seen by it.
        let last = over.load(Ordering::Relaxed);
        if consumer.work_off_a_block().await? == 0 {
            if last {
                return Ok(());
            }
            tokio::time::sleep(EMPTY_WAIT).await;
        }
    }
}

/// Every producer sends one statement after the other until `time` is over.
async fn produce(database: &Database, sql: &'static str, time: Duration) -> Result<Produced> {
    let clock = connect(&database.url).await?;
    let now = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8";
    let mut producers = JoinSet::new();
    let began = clock.query_one(now, &[]).await?.get(0);
    let end = Instant::now() + time;
    for _ in 0..PRODUCERS {
        let client = connect(&database.url).await?;
        producers.spawn(async move {
            let statement = client.prepare(sql).await?;
            let mut sent = 0_i32;
            while Instant::now() < end {
                sent += 1;
                client.query(&statement, &[&sent]).await?;
            }
            client.close().await;
            anyhow::Ok(sent)
        });
    }
    let mut tasks = 0;
    while let Some(sent) = producers.join_next().await {
        tasks += sent??;
    }
    let ended = clock.query_one(now, &[]).await?.get(0);
    clock.close().await;
    ensure!(tasks > 0, "the producers sent nothing");
    Ok(Produced { tasks, began, ended })
}

async fn flow(database: &Database, relation: &str, produced: &Produced) -> Result<Flow> {
    let client = connect(&database.url).await?;
    let sql = format!("SELECT count(*) FROM {relation} WHERE finished_at <= to_timestamp($1)");
    let done: i64 = client.query_one(&sql, &[&produced.ended]).await?.get(0);
    client.close().await;
    let (tasks, done, seconds) = (f64::from(produced.tasks), done as f64, produced.ended - produced.began);
    Ok(Flow { enqueued_per_second: tasks / seconds, done_per_second: done / seconds, left: tasks - done })
}
