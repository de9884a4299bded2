//! How long each step of the walk takes. Labels are names of the configuration; any other name is `other`.

use super::seconds;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// What a queue has: rows of batches, and tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    Rows,
    Tasks,
}

impl Work {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Tasks => "tasks",
        }
    }
}

/// What one call of a handler is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    Row,
    Block,
    Task,
}

impl Call {
    fn as_str(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Block => "block",
            Self::Task => "task",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneLabel {
    queue: String,
    work: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabel {
    command: String,
    call: &'static str,
}

/// The names that may be labels: those of the configuration. A submitter must not choose how many series there are.
#[derive(Clone, Debug, Default)]
pub struct Names {
    queues: Arc<BTreeSet<String>>,
    commands: Arc<BTreeSet<String>>,
}

/// The label of every name that is not of the configuration.
const OTHER: &str = "other";

impl Names {
    pub fn new(queues: impl IntoIterator<Item = String>, commands: impl IntoIterator<Item = String>) -> Self {
        Self {
            queues: Arc::new(queues.into_iter().collect()),
            commands: Arc::new(commands.into_iter().collect()),
        }
    }

    pub fn queues(&self) -> impl Iterator<Item = &String> {
        self.queues.iter()
    }

    fn queue(&self, name: &str) -> String {
        if self.queues.contains(name) { name } else { OTHER }.to_owned()
    }

    fn command(&self, name: &str) -> String {
        if self.commands.contains(name) { name } else { OTHER }.to_owned()
    }
}

/// The steps of the walk.
#[derive(Clone, Debug)]
pub struct WalkMetrics {
    names: Names,
    claims: Family<LaneLabel, Histogram, fn() -> Histogram>,
    pickups: Family<LaneLabel, Histogram, fn() -> Histogram>,
    handlers: Family<CallLabel, Histogram, fn() -> Histogram>,
    pub completions: Histogram,
}

impl WalkMetrics {
    pub(super) fn new(names: Names) -> Self {
        Self {
            names,
            claims: Family::new_with_constructor(seconds),
            pickups: Family::new_with_constructor(waits),
            handlers: Family::new_with_constructor(waits),
            completions: seconds(),
        }
    }

    /// One claim of a queue's rows or tasks, whether it found any or not.
    pub fn claimed(&self, queue: &str, work: Work, took: Duration) {
        let label = LaneLabel { queue: self.names.queue(queue), work: work.as_str() };
        self.claims.get_or_create(&label).observe(took.as_secs_f64());
    }

    /// How long something that was due waited to be claimed, by the server's clock.
    pub fn picked_up(&self, queue: &str, work: Work, waited: f64) {
        let label = LaneLabel { queue: self.names.queue(queue), work: work.as_str() };
        self.pickups.get_or_create(&label).observe(waited.max(0.0));
    }

    /// Where the calls of one command are counted; asked once for many of them.
    pub fn handler(&self, command: &str, call: Call) -> Histogram {
        let label = CallLabel { command: self.names.command(command), call: call.as_str() };
        self.handlers.get_or_create_owned(&label)
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register_with_unit("claim", "Time of one claim", Unit::Seconds, self.claims.clone());
        registry.register_with_unit(
            "pickup",
            "Time from submit, or from being due, to the claim",
            Unit::Seconds,
            self.pickups.clone(),
        );
        registry.register_with_unit(
            "handler",
            "Time of one call of a handler",
            Unit::Seconds,
            self.handlers.clone(),
        );
        registry.register_with_unit(
            "completion",
            "Time to finish a scope that was over",
            Unit::Seconds,
            self.completions.clone(),
        );
    }
}

/// From half a millisecond to some three hours: what people wait for, and what handlers take.
fn waits() -> Histogram {
    Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.0005, 4.0, 13))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_configured_makes_no_series_of_its_own() {
        let names = Names::new(["default".to_owned()], ["noop".to_owned()]);
        let walk = WalkMetrics::new(names);
        for n in 0..100 {
            walk.claimed(&format!("queue-{n}"), Work::Rows, Duration::ZERO);
            walk.handler(&format!("command-{n}"), Call::Row).observe(1.0);
        }
        walk.claimed("default", Work::Rows, Duration::ZERO);
        walk.handler("noop", Call::Task).observe(1.0);
        let mut registry = Registry::default();
        walk.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let series = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!((series("claim_seconds_count"), series("handler_seconds_count")), (2, 2), "{text}");
    }
}
