//! The `[retention]` section: how long things stay after their end.

use crate::{keep::Keep, problems::Problems, queue, store::retention as store};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

/// The `[retention]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The rows of a batch with their results, and the payload and result of a task.
    pub data: Keep,
    /// The batch and the task themselves, with totals and keys; and events.
    pub records: Keep,
    /// What is held and untouched for this long is aborted.
    pub held: Keep,
    /// Rows with results are written to the store of the outputs before they go.
    pub archive: bool,
    /// Output files go with the rows.
    pub outputs: bool,
    /// Time between two passes, of all replicas together.
    #[serde(with = "humantime_serde")]
    pub every: Duration,
    pub rules: BTreeMap<String, Rule>,
}

/// `[retention.rules.NAME]`: other times for some work.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    pub queue: Option<String>,
    pub command: Option<String>,
    pub state: Option<Ended>,
    pub data: Option<Keep>,
    pub records: Option<Keep>,
}

/// How work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    Succeeded,
    Failed,
    Aborted,
}

impl Ended {
    fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data: Keep::days(30),
            records: Keep::years(1),
            held: Keep::years(1),
            archive: false,
            outputs: false,
            every: Duration::from_secs(3_600),
            rules: BTreeMap::new(),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            self.data <= self.records,
            "retention.records",
            "must be at least retention.data: what has rows has a record",
        );
        problems.unless(
            (Duration::from_millis(100)..=Duration::from_secs(86_400)).contains(&self.every),
            "retention.every",
            "must be between 100ms and 1d",
        );
        for (name, rule) in &self.rules {
            rule.check(name, self, problems);
        }
    }

    /// What is written to the database.
    pub fn policy(&self) -> store::Policy {
        let rule = |(name, rule): (&String, &Rule)| store::Rule {
            name: name.clone(),
            queue: rule.queue.clone(),
            command: rule.command.clone(),
            state: rule.state.map(Ended::as_str),
            data: rule.data,
            records: rule.records,
        };
        store::Policy {
            data: self.data,
            records: self.records,
            held: self.held,
            archive: self.archive,
            outputs: self.outputs,
            rules: self.rules.iter().map(rule).collect(),
        }
    }
}

impl Rule {
    fn check(&self, name: &str, config: &Config, problems: &mut Problems) {
        let key = format!("retention.rules.{name}");
        problems.unless(
            self.queue.is_some() || self.command.is_some() || self.state.is_some(),
            &key,
            "must name a queue, a command or a state (succeeded, failed or aborted)",
        );
        problems.unless(
            self.data.is_some() || self.records.is_some(),
            &key,
            "must have data or records: how long they stay",
        );
        for (field, value) in [("queue", &self.queue), ("command", &self.command)] {
            problems.unless(
                value.as_deref().is_none_or(queue::is_valid_name),
                &format!("{key}.{field}"),
                "is no name: letters, digits and _-.: only, at most 100",
            );
        }
        problems.unless(
            self.records.is_none_or(|records| self.data.unwrap_or(config.data) <= records),
            &format!("{key}.records"),
            "must be at least the time of its data",
        );
    }
}
