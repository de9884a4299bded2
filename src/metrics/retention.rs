//! What went after its end.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use std::{
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

const KINDS: [&str; 6] = ["batches", "rows", "bodies", "records", "events", "abandoned"];

#[derive(Clone, Debug)]
pub struct RetentionMetrics {
    pruned: Family<Kind, Counter>,
    freed: Counter,
    passes: Counter,
    passes_troubled: Counter,
    last_pass: Gauge<f64, AtomicU64>,
}

impl RetentionMetrics {
    pub(super) fn new() -> Self {
        let pruned = Family::default();
        for kind in KINDS {
            drop(pruned.get_or_create(&Kind { kind }));
        }
        Self {
            pruned,
            freed: Counter::default(),
            passes: Counter::default(),
            passes_troubled: Counter::default(),
            last_pass: Gauge::default(),
        }
    }

    pub fn count(&self, kind: &'static str, count: u64) {
        self.pruned.get_or_create(&Kind { kind }).inc_by(count);
    }

    pub fn rows(&self, rows: u64, bytes: u64) {
        self.count("rows", rows);
        self.freed.inc_by(bytes);
    }

    pub fn end_pass(&self, troubled: bool) {
        self.passes.inc();
        self.passes_troubled.inc_by(troubled.into());
        self.last_pass.set(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("pruned", "What went after its end, by kind", self.pruned.clone());
        registry.register_with_unit("freed", "About what pruned rows took", Unit::Bytes, self.freed.clone());
        registry.register("passes", "Passes of retention done here", self.passes.clone());
        registry.register(
            "passes_troubled",
            "Passes in which some data had to stay",
            self.passes_troubled.clone(),
        );
        registry.register_with_unit(
            "last_pass_timestamp",
            "When the last pass of this worker ended",
            Unit::Seconds,
            self.last_pass.clone(),
        );
    }
}
