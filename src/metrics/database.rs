//! What only the database knows: read by a few cheap statements at a scrape, and not more often than that.

use super::Names;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use std::sync::atomic::AtomicU64;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct QueueLabel {
    queue: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TaskLabel {
    queue: String,
    state: &'static str,
}

/// What waits in one queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Depth {
    pub queue: String,
    pub rows: i64,
    pub tasks_queued: i64,
    pub tasks_scheduled: i64,
    /// Since when the oldest of what is due has waited, in seconds; zero when nothing is due.
    pub oldest_due: f64,
}

/// The oldest transaction that keeps dead rows from being cleaned up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HorizonAge {
    pub pid: i32,
    pub seconds: f64,
}

#[derive(Clone, Debug)]
pub struct DatabaseMetrics {
    names: Names,
    rows: Family<QueueLabel, Gauge>,
    tasks: Family<TaskLabel, Gauge>,
    oldest_due: Family<QueueLabel, Gauge<f64, AtomicU64>>,
    horizon_age: Gauge<f64, AtomicU64>,
    horizon_pid: Gauge,
    /// When these were read, in Unix seconds of this machine: what is older than a few scrapes is of no use.
    pub read_at: Gauge<f64, AtomicU64>,
}

impl DatabaseMetrics {
    pub(super) fn new(names: Names) -> Self {
        Self {
            names,
            rows: Family::default(),
            tasks: Family::default(),
            oldest_due: Family::default(),
            horizon_age: Gauge::default(),
            horizon_pid: Gauge::default(),
            read_at: Gauge::default(),
        }
    }

    /// The queues to look at: those of the configuration.
    pub fn queues(&self) -> Vec<String> {
        self.names.queues().cloned().collect()
    }

    pub fn show(&self, depths: &[Depth], horizon: Option<HorizonAge>) {
        for depth in depths {
            let queue = QueueLabel { queue: depth.queue.clone() };
            self.rows.get_or_create(&queue).set(depth.rows);
            self.oldest_due.get_or_create(&queue).set(depth.oldest_due);
            for (state, count) in [("queued", depth.tasks_queued), ("scheduled", depth.tasks_scheduled)] {
                self.tasks.get_or_create(&TaskLabel { queue: depth.queue.clone(), state }).set(count);
            }
        }
        let horizon = horizon.unwrap_or_default();
        self.horizon_age.set(horizon.seconds);
        self.horizon_pid.set(horizon.pid.into());
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("queue_rows", "Rows that wait in a queue", self.rows.clone());
        registry.register("queue_tasks", "Tasks that wait in a queue", self.tasks.clone());
        registry.register_with_unit(
            "queue_oldest_due",
            "How long the oldest due work of a queue has waited",
            Unit::Seconds,
            self.oldest_due.clone(),
        );
        registry.register_with_unit(
            "xmin_horizon_age",
            "Age of the oldest transaction that holds the xmin horizon",
            Unit::Seconds,
            self.horizon_age.clone(),
        );
        registry.register(
            "xmin_horizon_pid",
            "The server process that holds the xmin horizon",
            self.horizon_pid.clone(),
        );
        registry.register_with_unit(
            "database_read_timestamp",
            "When what only the database knows was read",
            Unit::Seconds,
            self.read_at.clone(),
        );
    }
}
