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
        registry.register("rows", "Rows that reached a final state here", Family::clone(&rows));
        let tasks = Family::default();
        registry.register("tasks", "Attempts of tasks, by the state they led to", Family::clone(&tasks));
        registry.register("fenced", "Outcomes refused because the block was somebody else's", fenced.clone());
        registry.register("blocks_claimed", "Blocks claimed", blocks.clone());
        registry.register("batches_completed", "Batches finished by this worker", batches_completed.clone());
        registry.register("blocks_held", "Blocks in hand", blocks_held.clone());
        Self {
            registry: Arc::new(registry),
            batcher,
            rows,
            tasks,
            fenced,
            blocks,
            batches_completed,
            blocks_held,
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
