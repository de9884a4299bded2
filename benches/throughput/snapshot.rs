//! What a held snapshot leaves of the speed: a session elsewhere in the database keeps a transaction open, as a long report
//! does, so that nothing which ends meanwhile can be vacuumed.
//!
//! Two databases, one with such a session and one without. On each a first load is worked off; then, after a vacuum, the two
//! take turns with smaller loads, which are measured.

use super::{
    binary::Binary,
    classic,
    drain::{Enqueue, fill, resume_and_wait},
    files, scrape,
    worker::Worker,
};
use crate::ground::{Database, Ground, connect};
use anyhow::{Context, Result};
use musterd::store::connect::OneShot;
use serde::Serialize;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Snapshots {
    pub(crate) free: Speeds,
    pub(crate) held: Speeds,
}

/// The speeds after the first load.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Speeds {
    pub(crate) rows_per_second: f64,
    pub(crate) tasks_per_second: f64,
    pub(crate) classic_per_second: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Snapshot {
    Free,
    Held,
}

/// How often the two databases take turns.
const TURNS: i32 = 3;
/// Tasks, and rows of the queue table, of one turn are this part of the first load. A batch of a turn is as large as the first.
const PART: i32 = 10;
const BATCH_LIMIT: Duration = Duration::from_secs(20 * 60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, rows: i32, tasks: i32) -> Result<Snapshots> {
    let first = Load { rows, tasks };
    let turn = Load { rows, tasks: (tasks / PART).max(1) };
    let mut free = Side::prepare(ground, musterd, first, Snapshot::Free).await?;
    let mut held = Side::prepare(ground, musterd, first, Snapshot::Held).await?;
    for _ in 0..TURNS {
        free.work_off(ground, musterd, turn).await?;
        held.work_off(ground, musterd, turn).await?;
    }
    Ok(Snapshots { free: free.end(ground, turn).await?, held: held.end(ground, turn).await? })
}

/// What is worked off at once.
#[derive(Clone, Copy, Debug)]
struct Load {
    rows: i32,
    /// Tasks, and rows of the queue table.
    tasks: i32,
}

/// A database with its worker and, perhaps, the session that holds a snapshot.
struct Side {
    database: Database,
    worker: Worker,
    session: Option<OneShot>,
    batches_ended: i32,
    tasks_ended: i32,
    /// Since the first load, in seconds.
    took: Took,
}

#[derive(Clone, Copy, Debug, Default)]
struct Took {
    rows: f64,
    tasks: f64,
    classic: f64,
}

impl Side {
    /// With the first load worked off.
    async fn prepare(ground: &Ground, musterd: &Binary, first: Load, snapshot: Snapshot) -> Result<Self> {
        let database = ground.database().await?;
        classic::create(&database).await?;
        let session = hold(&database, snapshot).await?;
        let worker = Worker::start(musterd, &database, &[]).await?;
        let took = Took::default();
        let mut side = Self { database, worker, session, batches_ended: 0, tasks_ended: 0, took };
        side.work_off(ground, musterd, first).await?;
        vacuum(&side.database).await?;
        side.took = took;
        Ok(side)
    }

    async fn work_off(&mut self, ground: &Ground, musterd: &Binary, load: Load) -> Result<()> {
        self.took.rows += self.run_batch(ground, musterd, load.rows).await?;
        self.took.tasks += self.run_tasks(ground, load.tasks).await?;
        self.took.classic += self.run_classic(ground, load.tasks).await?;
        Ok(())
    }

    /// Seconds from the release of a batch to its end, by the server's clock.
    async fn run_batch(&mut self, ground: &Ground, musterd: &Binary, rows: i32) -> Result<f64> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("small.ndjson");
        files::write_small(&file, rows)?;
        let batch = musterd.submit(&self.database, &file, "noop").await?;
        ground.settle().await?;
        let client = connect(&self.database.url).await?;
        let sql = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 FROM musterd.release($1)";
        let released: f64 = client.query_one(sql, &[&batch]).await?.get(0);
        self.batches_ended += 1;
        let ends = until_batches(&self.worker, self.batches_ended);
        tokio::time::timeout(BATCH_LIMIT, ends).await.context("a batch did not end in time")??;
        let sql = "SELECT EXTRACT(EPOCH FROM finished_at)::float8 FROM musterd.batch_progress WHERE id = $1";
        let ended: f64 = client.query_one(sql, &[&batch]).await?.get(0);
        client.close().await;
        Ok(ended - released)
    }

    /// Seconds from the resume of a full queue to the end of its last task, by the server's clock.
    async fn run_tasks(&mut self, ground: &Ground, tasks: i32) -> Result<f64> {
        fill(&self.database, "noop", tasks, Enqueue::SetWise).await?;
        ground.settle().await?;
        self.tasks_ended += tasks;
        Ok(resume_and_wait(&self.database, &self.worker, self.tasks_ended).await?.as_secs_f64())
    }

    /// Seconds in which the queue table was drained.
    async fn run_classic(&self, ground: &Ground, rows: i32) -> Result<f64> {
        classic::fill(&self.database, rows).await?;
        ground.settle().await?;
        let began = Instant::now();
        classic::drain(&self.database).await?;
        Ok(began.elapsed().as_secs_f64())
    }

    async fn end(self, ground: &Ground, turn: Load) -> Result<Speeds> {
        self.worker.stop().await?;
        let_go(self.session).await?;
        classic::check(&self.database, self.tasks_ended).await?;
        ground.drop_database(self.database).await?;
        let speed = |load: i32, seconds: f64| f64::from(load) * f64::from(TURNS) / seconds;
        Ok(Speeds {
            rows_per_second: speed(turn.rows, self.took.rows),
            tasks_per_second: speed(turn.tasks, self.took.tasks),
            classic_per_second: speed(turn.tasks, self.took.classic),
        })
    }
}

/// A session with an open transaction that has read something.
async fn hold(database: &Database, snapshot: Snapshot) -> Result<Option<OneShot>> {
    if snapshot == Snapshot::Free {
        return Ok(None);
    }
    let client = connect(&database.url).await?;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
    client.query_one("SELECT count(*) FROM musterd.tasks", &[]).await?;
    Ok(Some(client))
}

/// Ends that transaction. It fails if the session was ended before, and then nothing was measured.
async fn let_go(session: Option<OneShot>) -> Result<()> {
    if let Some(client) = session {
        client.query_one("SELECT count(*) FROM musterd.tasks", &[]).await.context("the snapshot was lost")?;
        client.batch_execute("COMMIT").await?;
        client.close().await;
    }
    Ok(())
}

/// Does now what autovacuum would do at a time of its own. It removes nothing that the snapshot may see.
async fn vacuum(database: &Database) -> Result<()> {
    let client = connect(&database.url).await?;
    client.batch_execute("VACUUM (ANALYZE)").await?;
    client.close().await;
    Ok(())
}

async fn until_batches(worker: &Worker, ended: i32) -> Result<()> {
    while scrape::value(&worker.metrics().await?, "musterd_batches_completed_total") != Some(f64::from(ended))
    {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}
