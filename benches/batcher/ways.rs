//! The two ways to write: everybody for himself, and through the batcher of the daemon.

use super::parent::{Job, Outcome, Trigger, status_of};
use crate::ground::{Ground, connect};
use anyhow::{Context, Result};
use musterd::{
    flow::batcher::{self, Weight, Writer},
    metrics::BatcherMetrics,
    store::connect::OneShot,
};
use std::sync::{Arc, OnceLock};
use tokio::task::JoinSet;

/// The tasks of one writer.
fn share(writer: i64, writers: i64, tasks: i64) -> impl Iterator<Item = i64> {
    (1..=tasks).filter(move |task| task % writers == writer)
}

/// One UPDATE per task, each in its own transaction, each on the writer's own connection.
pub(crate) async fn unbatched(
    ground: &Ground,
    tasks: i64,
    writers: i64,
    trigger: Trigger,
) -> Result<Outcome> {
    let mut job = Job::new(ground, tasks, trigger).await?;
    let mut clients = Vec::new();
    for _ in 0..writers {
        clients.push(connect(&job.database.url).await?);
    }
    job.begin();
    let mut running = JoinSet::new();
    for (writer, client) in (0..).zip(clients) {
        running.spawn(async move {
            let update = client.prepare("UPDATE public.tasks SET status = $2 WHERE id = $1").await?;
            for task in share(writer, writers, tasks) {
                client.execute(&update, &[&task, &status_of(task)]).await?;
            }
            client.close().await;
            anyhow::Ok(())
        });
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    let took = job.elapsed();
    job.end(tasks, took).await
}

/// The same writers hand their updates to one batcher, with the settings the daemon is shipped with.
pub(crate) async fn batched(ground: &Ground, tasks: i64, writers: i64, trigger: Trigger) -> Result<Outcome> {
    let mut job = Job::new(ground, tasks, trigger).await?;
    let writer = TaskWriter { client: connect(&job.database.url).await?, failed: Arc::default() };
    let failed = Arc::clone(&writer.failed);
    let (sender, batcher) = batcher::channel(&batcher::Config::default(), writer, BatcherMetrics::default());
    job.begin();
    let mut running = JoinSet::new();
    for writer in 0..writers {
        let sender = sender.clone();
        running.spawn(async move {
            for task in share(writer, writers, tasks) {
                let update = (task, status_of(task));
                sender.send(update, TaskWriter::weight(&update)).await.context("the batcher has ended")?;
            }
            anyhow::Ok(())
        });
    }
    drop(sender);
    batcher.run().await;
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    if let Some(error) = failed.get() {
        anyhow::bail!("a flush failed: {error}");
    }
    let took = job.elapsed();
    job.end(tasks, took).await
}

/// Writes the ends of tasks: one statement and one transaction for a whole flush.
struct TaskWriter {
    client: OneShot,
    /// The first error; a benchmark has nothing to outlast.
    failed: Arc<OnceLock<tokio_postgres::Error>>,
}

impl Writer for TaskWriter {
    type Update = (i64, &'static str);

    fn weight(_: &Self::Update) -> Weight {
        Weight { updates: 1, room: 1, bytes: 0, waited_for: false }
    }

    async fn write(&mut self, mut updates: Vec<Self::Update>) -> u64 {
        // In the order of their ids, as everybody who locks several rows should.
        updates.sort_unstable();
        let (ids, statuses): (Vec<i64>, Vec<&str>) = updates.into_iter().unzip();
        const SQL: &str = "UPDATE public.tasks t SET status = u.status
              FROM unnest($1::bigint[], $2::text[]) AS u (id, status) WHERE t.id = u.id";
        self.client.execute(SQL, &[&ids, &statuses]).await.unwrap_or_else(|error| {
            let _ = self.failed.set(error);
            0
        })
    }
}
