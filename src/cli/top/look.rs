//! One look at everything, and the rates that follow from several.

use anyhow::{Context, Result};
use musterd::store::{
    self,
    batches::Progress,
    connect::OneShot,
    listing, queues,
    workers::{self, Listed},
};
use serde::Serialize;
use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

/// Batches that are looked at, the newest first.
const MOST_BATCHES: i64 = 100;
/// Rates are over this time.
const OVER: Duration = Duration::from_secs(10);
/// A look that takes longer is given up, and shown as such.
const PATIENCE: Duration = Duration::from_secs(10);

/// What one look saw.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Picture {
    pub(super) at: jiff::Timestamp,
    pub(super) rows_per_second: f64,
    pub(super) queues: Vec<Queue>,
    pub(super) batches: Vec<Batch>,
    pub(super) workers: Vec<Listed>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Queue {
    #[serde(flatten)]
    pub(super) shown: queues::Shown,
    pub(super) rows_per_second: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Batch {
    #[serde(flatten)]
    pub(super) progress: Progress,
    pub(super) rows_per_second: f64,
    /// None when it does not move.
    pub(super) seconds_left: Option<u64>,
}

/// Looks, and remembers what it saw for the rates.
pub(super) struct Eye {
    database: store::Config,
    connection: Option<OneShot>,
    seen: VecDeque<(Instant, HashMap<i64, i32>)>,
}

impl Eye {
    pub(super) fn new(database: &store::Config) -> Result<Self> {
        Ok(Self { database: database.clone(), connection: None, seen: VecDeque::new() })
    }

    pub(super) async fn look(&mut self) -> Result<Picture> {
        let looked = tokio::time::timeout(PATIENCE, self.ask()).await;
        let looked = looked.unwrap_or_else(|_| Err(anyhow::anyhow!("the database does not answer")));
        if looked.is_err() {
            // The session may be in any state; a new one is cheap.
            self.connection = None;
        }
        looked
    }

    async fn ask(&mut self) -> Result<Picture> {
        let client = match self.connection.take() {
            Some(client) if !client.is_closed() => client,
            _ => connect(&self.database).await?,
        };
        let client = self.connection.insert(client);
        let queues = queues::list(&**client).await?;
        let batches = listing::open_batches(client, MOST_BATCHES).await?;
        let mut workers = workers::list(client, None).await?;
        workers.retain(|worker| worker.state.is_alive());
        Ok(self.picture(queues, batches, workers))
    }

    fn picture(
        &mut self,
        queues: Vec<queues::Shown>,
        batches: Vec<Progress>,
        workers: Vec<Listed>,
    ) -> Picture {
        let now = Instant::now();
        self.seen.push_back((now, batches.iter().map(|batch| (batch.id, batch.done())).collect()));
        while self.seen.len() > 2 && now.duration_since(self.seen[0].0) > OVER {
            self.seen.pop_front();
        }
        let batches: Vec<Batch> = batches.into_iter().map(|progress| self.batch(progress, now)).collect();
        let rate_of = |name: &str| -> f64 {
            batches
                .iter()
                .filter(|batch| batch.progress.queue == name)
                .map(|batch| batch.rows_per_second)
                .fold(0.0, std::ops::Add::add)
        };
        let queues: Vec<Queue> =
            queues.into_iter().map(|shown| Queue { rows_per_second: rate_of(&shown.name), shown }).collect();
        // Not `sum`, whose zero is negative.
        let rows_per_second = batches.iter().map(|batch| batch.rows_per_second).fold(0.0, std::ops::Add::add);
        Picture { at: jiff::Timestamp::now(), rows_per_second, queues, batches, workers }
    }

    /// Its speed since the first look that is remembered and knew it.
    fn batch(&self, progress: Progress, now: Instant) -> Batch {
        let first = self.seen.iter().find_map(|(at, done)| Some((*at, *done.get(&progress.id)?)));
        let rows_per_second = match first {
            Some((at, done)) if at < now => {
                f64::from(progress.done() - done).max(0.0) / now.duration_since(at).as_secs_f64()
            }
            _ => 0.0,
        };
        let left = f64::from(progress.rows - progress.done());
        let seconds_left = (rows_per_second > 0.0).then(|| (left / rows_per_second) as u64);
        Batch { progress, rows_per_second, seconds_left }
    }
}

async fn connect(database: &store::Config) -> Result<OneShot> {
    let target = database.direct_target().context("database.url")?;
    Ok(target.open("musterd top").await?)
}

pub(super) async fn steer(database: &store::Config, queue: &str, pause: bool) -> Result<()> {
    let client = connect(database).await?;
    match pause {
        true => queues::pause(&*client, queue, None).await?,
        false => queues::resume(&*client, queue, None).await?,
    }
    client.close().await;
    Ok(())
}
