//! A `[handlers.NAME]` section: the name is the command.

use super::builtin::{Failure, Which};
use crate::{config::Problems, queue};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub kind: Kind,
    /// The queue its work goes to when the submitter names none.
    pub queue: String,
    /// A row or task that runs longer is cancelled and counts as a failed try.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Which builtin; the handler's own name when left out.
    pub builtin: Option<Which>,
    /// How long a builtin waits before it answers.
    #[serde(with = "humantime_serde")]
    pub duration: Option<Duration>,
    /// The share of rows that `fail` fails, 0.0 to 1.0; the same rows at every try.
    pub rate: Option<f64>,
    /// How `fail` fails.
    pub failure: Option<Failure>,
    /// The wait that `fail` asks for before the next try.
    #[serde(with = "humantime_serde")]
    pub retry_after: Option<Duration>,
    /// An output file to which a builtin adds every row's input as a line.
    pub output: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Builtin,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            kind: Kind::default(),
            queue: queue::DEFAULT.into(),
            timeout: Duration::from_secs(300),
            builtin: None,
            duration: None,
            rate: None,
            failure: None,
            retry_after: None,
            output: None,
        }
    }
}

impl Config {
    pub(crate) fn check<'a>(
        &self,
        name: &str,
        mut queues: impl Iterator<Item = &'a String>,
        problems: &mut Problems,
    ) {
        let key = |field: &str| format!("handlers.{name}.{field}");
        if !queue::is_valid_name(name) {
            problems.error(format!("handlers.{name}"), "a command's name is letters, digits and _-.: only");
        }
        problems.unless(!self.timeout.is_zero(), &key("timeout"), "must be above zero");
        problems.unless(
            queues.any(|queue| *queue == self.queue),
            &key("queue"),
            format!("there is no [queues.{}]: add one, or name a queue that exists", self.queue),
        );
        problems.unless(
            self.builtin.or(Which::named(name)).is_some(),
            &key("builtin"),
            "must say which builtin: noop, sleep, echo or fail",
        );
        problems.unless(
            self.rate.is_none_or(|rate| (0.0..=1.0).contains(&rate)),
            &key("rate"),
            "must be a share between 0.0 and 1.0",
        );
    }
}
