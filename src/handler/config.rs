//! A `[handlers.NAME]` section: the name is the command.

use super::{
    builtin::{Failure, Which},
    sql::QualifiedName,
};
use crate::{config::Problems, objects::file_name_problem, queue};
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
    /// Of kind sql: the procedure `(bigint, jsonb)` to CALL with a task's id and payload, with its schema.
    pub procedure: Option<String>,
    /// Of kind sql: the role that runs the procedure.
    pub role: Option<String>,
    /// Of kind sql: where the procedure finds what it does not name in full.
    pub search_path: Option<String>,
    /// Of kind sql: the longest single statement; the handler's timeout when left out.
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Builtin,
    Sql,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Sql => "sql",
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
            procedure: None,
            role: None,
            search_path: None,
            statement_timeout: None,
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
        match self.kind {
            Kind::Builtin => problems.unless(
                self.builtin.or(Which::named(name)).is_some(),
                &key("builtin"),
                "must say which builtin: noop, sleep, echo or fail",
            ),
            Kind::Sql => self.check_sql(name, problems),
        }
        if let Some(problem) = self.output.as_deref().and_then(file_name_problem) {
            problems.error(key("output"), format!("cannot name an output file: {problem}"));
        }
        problems.unless(
            self.rate.is_none_or(|rate| (0.0..=1.0).contains(&rate)),
            &key("rate"),
            "must be a share between 0.0 and 1.0",
        );
    }

    fn check_sql(&self, name: &str, problems: &mut Problems) {
        let key = |field: &str| format!("handlers.{name}.{field}");
        match &self.procedure {
            None => problems
                .error(key("procedure"), "must name the procedure to CALL, such as \"app.derive_units\""),
            Some(procedure) => {
                if let Err(error) = QualifiedName::parse(procedure) {
                    problems.error(key("procedure"), error.to_string());
                }
            }
        }
        if let Some(Err(error)) = self.role.as_deref().map(QualifiedName::parse) {
            problems.error(key("role"), error.to_string());
        }
    }
}
