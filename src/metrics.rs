//! What the daemon counts, in Prometheus' form. Every metric is listed in docs/metrics.md.

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use std::sync::{Arc, atomic::AtomicU64};

/// Counts of the whole daemon; cheap to clone, shared by all parts.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub batcher: BatcherMetrics,
    rows: Family<OutcomeLabel, Counter>,
    tasks: Family<StateLabel, Counter>,
    /// Outcomes that came too late: their block had been given to somebody else.
    pub fenced: Counter,
    /// Blocks claimed.
    pub blocks: Counter,
    /// Batches this worker finished.
    pub batches_completed: Counter,
    pub blocks_held: Gauge,
    /// Rows that were not started when the worker stopped, and went back.
    pub rows_given_back: Counter,
    pub liveness: LivenessMetrics,
    /// Whether Redis answers; nought also when it is not used.
    pub redis_up: Gauge,
    /// Rows whose handler runs on past its timeout and cannot be stopped.
    pub handlers_overdue: Gauge,
}

/// Alive, dead and back.
#[derive(Clone, Debug, Default)]
pub struct LivenessMetrics {
    /// When the last heartbeat was taken by PostgreSQL, in Unix seconds of this machine.
    pub last_beat: Gauge<f64, AtomicU64>,
    pub beats: Counter,
    pub beats_failed: Counter,
    /// Times this worker found itself declared dead and began anew.
    pub rebirths: Counter,
    /// Workers this one declared dead.
    pub buried: Counter,
    /// Blocks of dead workers freed here.
    pub recovered_blocks: Counter,
    /// Rows failed because they killed their process once too often.
    pub killer_rows: Counter,
    /// Blocks that this worker owned without holding them, or held without owning them.
    pub reconciled: Counter,
}

impl LivenessMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "last_beat_timestamp",
            "When the last heartbeat was written",
            Unit::Seconds,
            self.last_beat.clone(),
        );
        registry.register("beats", "Heartbeats written to PostgreSQL", self.beats.clone());
        registry.register("beats_failed", "Heartbeats PostgreSQL did not take", self.beats_failed.clone());
        registry.register(
            "rebirths",
            "Times this worker was declared dead and began anew",
            self.rebirths.clone(),
        );
        registry.register("buried", "Workers this one declared dead", self.buried.clone());
        registry.register("recovered_blocks", "Blocks of dead workers freed", self.recovered_blocks.clone());
        registry.register("killer_rows", "Rows failed for killing their process", self.killer_rows.clone());
        registry.register(
            "reconciled",
            "Blocks owned and not held, or held and not owned",
            self.reconciled.clone(),
        );
    }
}

/// What the batcher is judged by.
#[derive(Clone, Debug)]
pub struct BatcherMetrics {
    pub flush_size: Histogram,
    pub flush_seconds: Histogram,
    pub update_latency_seconds: Histogram,
    pub channel_fullness: Gauge<f64, AtomicU64>,
    pub transactions: Counter,
    pub rollbacks: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// One of the eight states.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

/// From half a millisecond to half a minute.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 16))
}

impl Default for BatcherMetrics {
    fn default() -> Self {
        Self {
            flush_size: Histogram::new(exponential_buckets(1.0, 2.0, 12)),
            flush_seconds: seconds(),
            update_latency_seconds: seconds(),
            channel_fullness: Gauge::default(),
            transactions: Counter::default(),
            rollbacks: Counter::default(),
        }
    }
}

impl BatcherMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("flush_size", "Updates written by one flush", self.flush_size.clone());
        registry.register_with_unit("flush", "Time of one flush", Unit::Seconds, self.flush_seconds.clone());
        registry.register_with_unit(
            "update_latency",
            "Time from an outcome to its commit",
            Unit::Seconds,
            self.update_latency_seconds.clone(),
        );
        registry.register("channel_fullness", "Share of the channel in use", self.channel_fullness.clone());
        registry.register("transactions", "Flushes committed", self.transactions.clone());
        registry.register("rollbacks", "Flushes rolled back", self.rollbacks.clone());
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("musterd");
        let batcher = BatcherMetrics::default();
        batcher.register(registry.sub_registry_with_prefix("batcher"));
        let (rows, fenced, blocks) = (Family::default(), Counter::default(), Counter::default());
        let (batches_completed, blocks_held) = (Counter::default(), Gauge::default());
        let (rows_given_back, redis_up, handlers_overdue) =
            (Counter::default(), Gauge::default(), Gauge::default());
        let liveness = LivenessMetrics::default();
        liveness.register(registry.sub_registry_with_prefix("liveness"));
        registry.register("rows", "Rows that reached a final state here", Family::clone(&rows));
        let tasks = Family::default();
        registry.register("tasks", "Attempts of tasks, by the state they led to", Family::clone(&tasks));
        registry.register("fenced", "Outcomes refused because the block was somebody else's", fenced.clone());
        registry.register("blocks_claimed", "Blocks claimed", blocks.clone());
        registry.register("batches_completed", "Batches finished by this worker", batches_completed.clone());
        registry.register("blocks_held", "Blocks in hand", blocks_held.clone());
        registry.register("rows_given_back", "Rows given back unstarted", rows_given_back.clone());
        registry.register("redis_up", "Whether Redis answers", redis_up.clone());
        registry.register(
            "handlers_overdue",
            "Handlers past their timeout that do not stop",
            handlers_overdue.clone(),
        );
        Self {
            registry: Arc::new(registry),
            batcher,
            rows,
            tasks,
            fenced,
            blocks,
            batches_completed,
            blocks_held,
            rows_given_back,
            liveness,
            redis_up,
            handlers_overdue,
        }
    }
}

impl Metrics {
    pub fn count_rows(&self, succeeded: u64, failed: u64) {
        for (outcome, count) in [("succeeded", succeeded), ("failed", failed)] {
            self.rows.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
        }
    }

    pub fn count_task(&self, state: &str) {
        self.tasks.get_or_create(&StateLabel { state: state.to_owned() }).inc();
    }

    /// Everything, in the text form that Prometheus scrapes.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
