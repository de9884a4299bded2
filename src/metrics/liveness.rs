//! Alive, dead and back.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::{Registry, Unit},
};
use std::{
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

#[derive(Clone, Debug, Default)]
pub struct LivenessMetrics {
    /// When the last heartbeat was taken by PostgreSQL, in Unix seconds of this machine.
    last_beat: Gauge<f64, AtomicU64>,
    beat_age: Gauge<f64, AtomicU64>,
    beats: Counter,
    pub beats_failed: Counter,
    /// Times this worker found itself declared dead and took a new name.
    pub renamed: Counter,
    /// Workers this one declared dead.
    pub declared_dead: Counter,
    /// Blocks of dead workers freed here.
    pub recovered_blocks: Counter,
    /// Rows failed because they killed their process once too often.
    pub failed_after_crashes: Counter,
    /// Blocks and claims of dead workers that only their sets in Redis knew of.
    pub only_in_redis: Counter,
    /// Blocks and claims of dead workers that their sets in Redis did not know of.
    pub only_in_postgres: Counter,
    /// Blocks that this worker owned without holding them, or held without owning them.
    pub reconciled: Counter,
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

impl LivenessMetrics {
    /// PostgreSQL took a heartbeat.
    pub fn beat_taken(&self) {
        self.beats.inc();
        self.last_beat.set(now());
    }

    /// What depends on the moment of the scrape.
    pub(super) fn refresh(&self) {
        let last = self.last_beat.get();
        self.beat_age.set(if last > 0.0 { (now() - last).max(0.0) } else { 0.0 });
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "last_beat_timestamp",
            "When the last heartbeat was written",
            Unit::Seconds,
            self.last_beat.clone(),
        );
        registry.register_with_unit(
            "heartbeat_age",
            "Time since the last heartbeat was written",
            Unit::Seconds,
            self.beat_age.clone(),
        );
        registry.register("beats", "Heartbeats written to PostgreSQL", self.beats.clone());
        registry.register("beats_failed", "Heartbeats PostgreSQL did not take", self.beats_failed.clone());
        registry.register(
            "renamed",
            "Times this worker was declared dead and took a new name",
            self.renamed.clone(),
        );
        registry.register("recovered_blocks", "Blocks of dead workers freed", self.recovered_blocks.clone());
        registry.register(
            "failed_after_crashes",
            "Rows and tasks failed because processes died with them",
            self.failed_after_crashes.clone(),
        );
        registry.register(
            "only_in_redis",
            "Blocks and claims of dead workers that only Redis knew of",
            self.only_in_redis.clone(),
        );
        registry.register(
            "only_in_postgres",
            "Blocks and claims of dead workers that Redis did not know of",
            self.only_in_postgres.clone(),
        );
        registry.register(
            "reconciled",
            "Blocks owned and not held, or held and not owned",
            self.reconciled.clone(),
        );
    }
}
