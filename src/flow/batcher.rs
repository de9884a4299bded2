//! The update batcher: many small writes become few large ones, and no write is lost.
//!
//! Generic over what is written: it gathers, times and holds back; a [`Writer`] does the transaction. One flush at a
//! time takes what has gathered. The next starts when the last has ended and enough is there, or a caller waits for
//! an update, or the oldest has waited long enough. A full channel makes the producers wait.

use crate::{metrics::BatcherMetrics, problems::Problems, pulse::Pulse, spans::Span};
use serde::{Deserialize, Serialize};
use std::{
    future::Future,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::Instant,
};

/// The `[batcher]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Updates that start a flush by themselves.
    pub max_size: NonZeroU32,
    /// The longest an update waits for a flush to start.
    #[serde(with = "humantime_serde")]
    pub max_interval: Duration,
    /// Updates that may wait; beyond it their producers wait.
    pub capacity: NonZeroU32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_size: NonZeroU32::new(100).expect("a hundred is not zero"),
            max_interval: Duration::from_secs(5),
            // A flush costs as much as fifty tasks, however many it has; beyond this it no longer shows.
            capacity: NonZeroU32::new(2000).expect("two thousand is not zero"),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            self.max_size <= self.capacity,
            "batcher.capacity",
            "must be at least batcher.max_size, or a flush of that size can never gather",
        );
        problems.unless(!self.max_interval.is_zero(), "batcher.max_interval", "must be above zero");
    }
}

/// What a waiting update weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Outcomes of rows and tasks.
    pub updates: u32,
    /// What it takes of the channel's capacity.
    pub room: u32,
    pub bytes: usize,
    /// A fiber or a person waits for it: the end of a block, a task's outcome.
    pub waited_for: bool,
}

/// Writes what has gathered. Returns when it is applied, with the rows it wrote: errors are the writer's to outlast.
pub trait Writer: Send + 'static {
    type Update: Send + 'static;

    fn weight(update: &Self::Update) -> Weight;
    fn write(&mut self, updates: Vec<Self::Update>) -> impl Future<Output = u64> + Send;

    /// After the last write: waits for what could not be written at once.
    fn finish(&mut self) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// Payload bytes that may wait beside the count: 500 updates of 1 MB would be half a gigabyte. A flush takes them all
/// while as many wait again, and PostgreSQL's protocol wants them twice in one piece: count on seven times this.
const MAX_BYTES: usize = 8 << 20;
const KILOBYTE: usize = 1 << 10;
/// A channel this full is worth a word.
const NEARLY_FULL: f64 = 0.8;
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

struct Queued<U> {
    update: U,
    weight: Weight,
    since: Instant,
    /// Given back when a flush takes the update.
    _room: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

/// Where fibers put their updates.
#[derive(Debug)]
pub struct Sender<U> {
    queue: mpsc::UnboundedSender<Queued<U>>,
    room: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    capacity: u32,
    metrics: BatcherMetrics,
    warned: Arc<Mutex<Option<Instant>>>,
}

impl<U> Clone for Sender<U> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            room: Arc::clone(&self.room),
            bytes: Arc::clone(&self.bytes),
            capacity: self.capacity,
            metrics: self.metrics.clone(),
            warned: Arc::clone(&self.warned),
        }
    }
}

/// The batcher has ended; the update is returned. Only possible after every part that feeds it was asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("the batcher has ended")]
pub struct Ended<U>(pub U);

impl<U> Sender<U> {
    /// Puts an update into the channel; waits while it is full.
    pub async fn send(&self, update: U, weight: Weight) -> Result<(), Ended<U>> {
        // What is larger than the channel goes through alone rather than never.
        let room = weight.room.clamp(1, self.capacity);
        let kilobytes = (weight.bytes / KILOBYTE + 1).min(MAX_BYTES / KILOBYTE) as u32;
        let room = Arc::clone(&self.room).acquire_many_owned(room).await;
        let bytes = Arc::clone(&self.bytes).acquire_many_owned(kilobytes).await;
        let (Ok(room), Ok(bytes)) = (room, bytes) else { return Err(Ended(update)) };
        self.watch_fullness();
        self.metrics.updates.inc_by(u64::from(weight.updates));
        let queued = Queued { update, weight, since: Instant::now(), _room: room, _bytes: bytes };
        self.queue.send(queued).map_err(|refused| Ended(refused.0.update))
    }

    fn watch_fullness(&self) {
        let fullness = fullness(&self.room, self.capacity);
        self.metrics.channel_fullness.set(fullness);
        if fullness < NEARLY_FULL {
            return;
        }
        let mut warned = self.warned.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if warned.is_none_or(|last| last.elapsed() > BETWEEN_WARNINGS) {
            *warned = Some(Instant::now());
            tracing::warn!(
                fullness,
                capacity = self.capacity,
                "the update channel is nearly full: handlers are faster than the database, and wait for it"
            );
        }
    }
}

/// The consuming end: gathers and flushes until its senders are gone.
#[derive(Debug)]
pub struct Batcher<W: Writer> {
    config: Config,
    queue: mpsc::UnboundedReceiver<Queued<W::Update>>,
    writer: W,
    room: Arc<Semaphore>,
    metrics: BatcherMetrics,
    pulse: Pulse,
}

/// A channel of the configured size with `writer` at its end.
pub fn channel<W: Writer>(
    config: &Config,
    writer: W,
    metrics: BatcherMetrics,
) -> (Sender<W::Update>, Batcher<W>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let sender = Sender {
        queue: sender,
        room: Arc::new(Semaphore::new(config.capacity.get() as usize)),
        bytes: Arc::new(Semaphore::new(MAX_BYTES / KILOBYTE)),
        capacity: config.capacity.get(),
        metrics: metrics.clone(),
        warned: Arc::default(),
    };
    let room = Arc::clone(&sender.room);
    let batcher =
        Batcher { config: config.clone(), queue: receiver, writer, room, metrics, pulse: Pulse::default() };
    (sender, batcher)
}

/// The share of the channel that is in use.
fn fullness(room: &Semaphore, capacity: u32) -> f64 {
    1.0 - room.available_permits() as f64 / f64::from(capacity)
}

impl<W: Writer> Batcher<W> {
    /// Has its turns watched.
    pub fn watched(self, pulse: Pulse) -> Self {
        Self { pulse, ..self }
    }

    /// Writes what the fibers finish until the last of them has hung up.
    pub async fn run(mut self) {
        while let Some(gathered) = self.gather().await {
            self.flush(gathered).await;
            self.pulse.turn();
            crate::failpoint!("batcher.turn");
        }
        self.pulse.outside(self.writer.finish()).await;
        self.pulse.end();
    }

    /// What the next flush takes; `None` when the walk is over.
    async fn gather(&mut self) -> Option<Vec<Queued<W::Update>>> {
        let mut gathered = vec![self.first().await?];
        let deadline = gathered[0].since + self.config.max_interval;
        loop {
            while let Ok(more) = self.queue.try_recv() {
                gathered.push(more);
            }
            if self.is_due(&gathered) {
                return Some(gathered);
            }
            let more = tokio::time::timeout_at(deadline, self.queue.recv());
            match self.pulse.outside(more).await {
                Ok(Some(more)) => gathered.push(more),
                // Waited long enough, or no sender is left to add anything.
                Ok(None) | Err(_) => return Some(gathered),
            }
        }
    }

    /// Waits for the first update. Rightly, as long as there is none.
    async fn first(&mut self) -> Option<Queued<W::Update>> {
        loop {
            match tokio::time::timeout(self.pulse.tick(), self.queue.recv()).await {
                Ok(first) => return first,
                Err(_) if self.queue.is_empty() => self.pulse.turn(),
                Err(_) => {}
            }
        }
    }

    fn is_due(&self, gathered: &[Queued<W::Update>]) -> bool {
        let updates: u32 = gathered.iter().map(|queued| queued.weight.updates).sum();
        updates >= self.config.max_size.get() || gathered.iter().any(|queued| queued.weight.waited_for)
    }

    async fn flush(&mut self, gathered: Vec<Queued<W::Update>>) {
        let began = Instant::now();
        let updates: u32 = gathered.iter().map(|queued| queued.weight.updates).sum();
        let waited: Vec<(Instant, u32)> = gathered.iter().map(|q| (q.since, q.weight.updates)).collect();
        let _span = Span::begin("flush", None).number("updates", i64::from(updates));
        // Taking the updates makes room: the fibers fill the channel while this flush is under way.
        let updates_only = gathered.into_iter().map(|queued| queued.update).collect();
        self.metrics.channel_fullness.set(fullness(&self.room, self.config.capacity.get()));
        // An error is the writer's to outlast: a flush takes as long as the database is away.
        let rows = self.pulse.outside(self.writer.write(updates_only)).await;
        let took = began.elapsed();
        self.metrics.flush_size.observe(f64::from(updates));
        self.metrics.flush_seconds.observe(took.as_secs_f64());
        for (since, _) in waited {
            self.metrics.update_latency_seconds.observe(since.elapsed().as_secs_f64());
        }
        tracing::debug!(updates, rows, took_us = took.as_micros() as u64, "flushed");
    }
}

#[cfg(test)]
mod tests;
