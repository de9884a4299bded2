//! What the daemon counts, in Prometheus' form. Every metric is listed in docs/metrics.md.

mod batcher;
mod database;
mod liveness;
mod retention;
mod walk;

pub use batcher::BatcherMetrics;
pub use database::{DatabaseMetrics, Depth, HorizonAge};
pub use liveness::LivenessMetrics;
pub use retention::RetentionMetrics;
pub use walk::{Call, Names, WalkMetrics, Work};

use crate::state::State;
use futures::future::BoxFuture;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};
use std::sync::{Arc, OnceLock};

/// Counts of the whole daemon; cheap to clone, shared by all parts.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    look: Arc<OnceLock<Look>>,
    pub batcher: BatcherMetrics,
    pub walk: WalkMetrics,
    pub database: DatabaseMetrics,
    pub liveness: LivenessMetrics,
    pub retention: RetentionMetrics,
    rows: Family<OutcomeLabel, Counter>,
    tasks: Family<StateLabel, Counter>,
    /// Rows sent to another try.
    pub row_retries: Counter,
    /// Outcomes that came too late: their block had been given to another worker.
    pub fenced: Counter,
    /// Blocks claimed.
    pub blocks: Counter,
    /// Batches this worker finished.
    pub batches_completed: Counter,
    /// Looks at batches whose lines did not add up. Always 0, unless the tables were changed by hand.
    pub batches_unbalanced: Counter,
    /// Lines that the sweep let run again because nothing was recorded of them.
    pub lines_reopened: Counter,
    /// Scopes that were over and that only the sweep found.
    pub sweep_found: Counter,
    pub blocks_held: Gauge,
    pub tasks_held: Gauge,
    /// Rows that were not started when the worker stopped, and went back.
    pub rows_given_back: Counter,
    /// Whether Redis answers; zero also when it is not used.
    pub redis_up: Gauge,
    /// Rows and tasks whose handler runs on past its timeout and cannot be stopped.
    pub handlers_overdue: Gauge,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// A [`State`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// From half a millisecond to half a minute.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 16))
}

/// What is read for every scrape.
struct Look(Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>);

impl std::fmt::Debug for Look {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Look")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Names::default())
    }
}

impl Metrics {
    /// The names are those of the configuration; only they become labels.
    pub fn new(names: Names) -> Self {
        let metrics = Self {
            registry: Arc::default(),
            look: Arc::default(),
            batcher: BatcherMetrics::default(),
            walk: WalkMetrics::new(names.clone()),
            database: DatabaseMetrics::new(names),
            liveness: LivenessMetrics::default(),
            retention: RetentionMetrics::new(),
            rows: Family::default(),
            tasks: Family::default(),
            row_retries: Counter::default(),
            fenced: Counter::default(),
            blocks: Counter::default(),
            batches_completed: Counter::default(),
            batches_unbalanced: Counter::default(),
            lines_reopened: Counter::default(),
            sweep_found: Counter::default(),
            blocks_held: Gauge::default(),
            tasks_held: Gauge::default(),
            rows_given_back: Counter::default(),
            redis_up: Gauge::default(),
            handlers_overdue: Gauge::default(),
        };
        let mut registry = Registry::with_prefix("musterd");
        metrics.register(&mut registry);
        Self { registry: Arc::new(registry), ..metrics }
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("build", "The program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        registry.register("rows", "Rows that reached a final state here", self.rows.clone());
        registry.register("row_retries", "Rows sent to another try", self.row_retries.clone());
        registry.register("tasks", "Attempts of tasks, by the state they led to", self.tasks.clone());
        registry.register(
            "fenced",
            "Outcomes refused because the block was another worker's",
            self.fenced.clone(),
        );
        registry.register("blocks_claimed", "Blocks claimed", self.blocks.clone());
        registry.register(
            "batches_completed",
            "Batches finished by this worker",
            self.batches_completed.clone(),
        );
        registry.register(
            "batches_unbalanced",
            "Looks at batches whose lines did not add up",
            self.batches_unbalanced.clone(),
        );
        registry.register(
            "lines_reopened",
            "Lines that ran again because nothing was recorded of them",
            self.lines_reopened.clone(),
        );
        registry.register("sweep_found", "Scopes that only the sweep found over", self.sweep_found.clone());
        registry.register("blocks_held", "Blocks in hand", self.blocks_held.clone());
        registry.register("tasks_held", "Tasks in hand", self.tasks_held.clone());
        registry.register("rows_given_back", "Rows given back unstarted", self.rows_given_back.clone());
        registry.register("redis_up", "Whether Redis answers", self.redis_up.clone());
        registry.register(
            "handlers_overdue",
            "Handlers past their timeout that do not stop",
            self.handlers_overdue.clone(),
        );
        self.walk.register(registry);
        self.database.register(registry);
        self.batcher.register(registry.sub_registry_with_prefix("batcher"));
        let dead = self.liveness.declared_dead.clone();
        registry.register("workers_declared_dead", "Workers this one declared dead", dead);
        self.liveness.register(registry.sub_registry_with_prefix("liveness"));
        self.retention.register(registry.sub_registry_with_prefix("retention"));
    }

    pub fn count_rows(&self, succeeded: u64, failed: u64) {
        for (outcome, count) in [("succeeded", succeeded), ("failed", failed)] {
            self.rows.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
        }
    }

    pub fn count_tasks(&self, state: State, count: u64) {
        self.tasks.get_or_create(&StateLabel { state: state.as_str() }).inc_by(count);
    }

    /// Who looks at what is not counted along the way; asked before each scrape, and bounded by itself.
    pub fn on_scrape(&self, look: impl Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static) {
        // A second one is a bug of the wiring, and harmless: the first goes on looking.
        let _ = self.look.set(Look(Box::new(look)));
    }

    /// Everything, in the text form that Prometheus scrapes.
    pub async fn scrape(&self) -> Result<String, std::fmt::Error> {
        if let Some(Look(look)) = self.look.get() {
            look().await;
        }
        self.text()
    }

    /// The same, without a look at what only others know.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        self.liveness.refresh();
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
