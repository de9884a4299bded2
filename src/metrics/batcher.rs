//! What the batcher is judged by; docs/metrics.md has the targets beside them.

use super::seconds;
use prometheus_client::{
    metrics::{
        counter::Counter,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use std::sync::atomic::AtomicU64;

#[derive(Clone, Debug)]
pub struct BatcherMetrics {
    /// Outcomes handed over.
    pub updates: Counter,
    pub flush_size: Histogram,
    pub flush_seconds: Histogram,
    pub update_latency_seconds: Histogram,
    pub channel_fullness: Gauge<f64, AtomicU64>,
    pub transactions: Counter,
    pub rollbacks: Counter,
    /// What stands for a counter on the batch: one per flush and block, however many rows it counts.
    pub outcomes: Counter,
    /// Blocks that cannot be written now and are tried again beside the flushes.
    pub aside: Gauge,
    /// Blocks of which the database knew otherwise than this worker. Always 0, unless there is a bug.
    pub inconsistent: Counter,
}

impl Default for BatcherMetrics {
    fn default() -> Self {
        Self {
            updates: Counter::default(),
            flush_size: Histogram::new(exponential_buckets(1.0, 2.0, 12)),
            flush_seconds: seconds(),
            update_latency_seconds: seconds(),
            channel_fullness: Gauge::default(),
            transactions: Counter::default(),
            rollbacks: Counter::default(),
            outcomes: Counter::default(),
            aside: Gauge::default(),
            inconsistent: Counter::default(),
        }
    }
}

impl BatcherMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("updates", "Outcomes handed to the batcher", self.updates.clone());
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
        registry.register("outcomes", "Outcomes written, one per flush and block", self.outcomes.clone());
        registry.register(
            "aside",
            "Blocks that cannot be written now and are tried again",
            self.aside.clone(),
        );
        registry.register(
            "inconsistent",
            "Blocks given back because the database knew otherwise",
            self.inconsistent.clone(),
        );
    }
}
