//! A `[handlers.NAME]` section: the name is the command.

use super::{
    builtin::{Failure, Which},
    exec, http,
    http::RateLimit,
    sql::QualifiedName,
};
use crate::{objects::file_name_problem, problems::Problems, queue, secret::Secret};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    num::{NonZeroU32, NonZeroU64, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub kind: Kind,
    /// The queue its work goes to when the submitter names none.
    pub queue: String,
    /// A row or task that runs longer is cancelled and counts as a failed try.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// The longest timeout that a submitter may ask for; what asks for more gets this. A day when left out.
    #[serde(with = "humantime_serde")]
    pub max_timeout: Option<Duration>,
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
    /// Of kind sql: the function over blocks, `(bigint, jsonb, jsonb)`, with its schema.
    pub function: Option<String>,
    /// Of kind sql: the role that runs the procedure.
    pub role: Option<String>,
    /// Of kind sql: where the procedure finds what it does not name in full.
    pub search_path: Option<String>,
    /// Of kind sql: the longest single statement; the handler's timeout when left out.
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Option<Duration>,
    /// Of kind sql: the most tasks whose procedures run in one transaction, when each takes only milliseconds.
    pub tasks_per_transaction: Option<NonZeroUsize>,
    /// Of kinds http, exec and sql: the most rows of one call.
    pub block_size: Option<NonZeroUsize>,
    /// Of kind http: where to POST.
    pub url: Option<String>,
    /// Of kind http: headers of every request.
    pub headers: BTreeMap<String, Secret>,
    /// Of kind http: for `Authorization: Bearer`.
    pub bearer_token: Option<Secret>,
    /// Of kind http: the key that signs requests by the rules of Standard Webhooks.
    pub secret: Option<Secret>,
    /// Of kind http: the most requests under way in one replica.
    pub concurrency: Option<NonZeroU32>,
    /// Of kind http: the most requests in a time, by all replicas together.
    pub rate_limit: Option<RateLimit>,
    /// Of kind http: the longest a connection may take to be made; the timeout covers all of a request.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Option<Duration>,
    /// Of kind http: the longest request; rows that do not fit go in several.
    pub max_request_bytes: Option<usize>,
    /// Of kinds http and exec: the longest reply.
    pub max_reply_bytes: Option<usize>,
    /// Of kind http: certificate authorities to trust beside the system's, as a PEM file.
    pub ca_file: Option<PathBuf>,
    /// Of kind http: whether names may lead to private addresses.
    pub allow_private: Option<bool>,
    /// Of kind exec: the program and its arguments. No shell reads them.
    pub argv: Vec<String>,
    /// Of kind exec: processes of one replica, at most; as many as its queue has fibers when left out.
    pub processes: Option<NonZeroU32>,
    /// Of kind exec: the variables of musterd's own environment that the program gets.
    pub env: Option<Vec<String>>,
    /// Of kind exec: the directory the program runs in.
    pub cwd: Option<PathBuf>,
    /// Of kind exec: the most memory (address space) of one process, in bytes.
    pub max_memory: Option<NonZeroU64>,
    /// Of kind exec: the most processor time of one process in its life; the kernel kills what uses more.
    #[serde(with = "humantime_serde")]
    pub max_cpu_time: Option<Duration>,
    /// Of kind exec: the most open files of one process.
    pub max_open_files: Option<NonZeroU64>,
    /// Of kind exec: the longest file that a process can write, in bytes.
    pub max_file_size: Option<NonZeroU64>,
    /// Of kind exec: the most processes and threads that the program's user may have, those of other programs included.
    pub max_user_processes: Option<NonZeroU64>,
    /// Of kind exec: the user that the program runs as; needs root.
    pub user: Option<String>,
    /// Of kind exec: whether the program can never gain rights by what it executes (setuid files); true when left out.
    pub no_new_privs: Option<bool>,
    /// Of kind exec: a process is replaced after so many rows and tasks.
    pub max_requests: Option<NonZeroU32>,
    /// Of kind exec: a process is replaced when it is older than this and between two blocks or tasks.
    #[serde(with = "humantime_serde")]
    pub max_age: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Builtin,
    Sql,
    Http,
    Exec,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Sql => "sql",
            Self::Http => "http",
            Self::Exec => "exec",
        }
    }
}

/// The longest timeout that a submitter may ask for where the operator says nothing.
const LONGEST_ASKED: Duration = Duration::from_secs(24 * 3600);

/// What every handler has, whatever its kind.
const COMMON: [&str; 4] = ["kind", "queue", "timeout", "max_timeout"];

impl Kind {
    /// The keys that mean something to this kind, beside those of every handler.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Builtin => &["builtin", "duration", "rate", "failure", "retry_after", "output"],
            Self::Sql => &[
                "procedure",
                "function",
                "role",
                "search_path",
                "statement_timeout",
                "tasks_per_transaction",
                "block_size",
            ],
            Self::Http => &[
                "url",
                "headers",
                "bearer_token",
                "secret",
                "concurrency",
                "rate_limit",
                "connect_timeout",
                "block_size",
                "max_request_bytes",
                "max_reply_bytes",
                "ca_file",
                "allow_private",
            ],
            Self::Exec => &[
                "argv",
                "processes",
                "env",
                "cwd",
                "user",
                "no_new_privs",
                "max_memory",
                "max_cpu_time",
                "max_open_files",
                "max_file_size",
                "max_user_processes",
                "max_requests",
                "max_age",
                "block_size",
                "max_reply_bytes",
            ],
        }
    }

    /// A key of another kind would be ignored, and it was written for a reason.
    pub(crate) fn refuse_foreign(self, handler: &str, field: &str, problems: &mut Problems) {
        if COMMON.contains(&field) || self.keys().contains(&field) {
            return;
        }
        let (kind, keys) = (self.as_str(), self.keys().join(", "));
        let message = format!("is no key of kind {kind}, which has {keys}");
        problems.error(format!("handlers.{handler}.{field}"), message);
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            kind: Kind::default(),
            queue: queue::DEFAULT.into(),
            timeout: Duration::from_secs(300),
            max_timeout: None,
            builtin: None,
            duration: None,
            rate: None,
            failure: None,
            retry_after: None,
            output: None,
            procedure: None,
            function: None,
            role: None,
            search_path: None,
            statement_timeout: None,
            tasks_per_transaction: None,
            block_size: None,
            url: None,
            headers: BTreeMap::new(),
            bearer_token: None,
            secret: None,
            concurrency: None,
            rate_limit: None,
            connect_timeout: None,
            max_request_bytes: None,
            max_reply_bytes: None,
            ca_file: None,
            allow_private: None,
            argv: Vec::new(),
            processes: None,
            env: None,
            cwd: None,
            max_memory: None,
            max_cpu_time: None,
            max_open_files: None,
            max_file_size: None,
            max_user_processes: None,
            user: None,
            no_new_privs: None,
            max_requests: None,
            max_age: None,
        }
    }
}

impl Config {
    /// How long an attempt may take: what its submitter asked for, within the operator's limit, else the handler's own timeout.
    pub fn timeout_for(&self, asked: Option<Duration>) -> Duration {
        let longest = self.max_timeout.unwrap_or(LONGEST_ASKED).max(self.timeout);
        asked.map_or(self.timeout, |asked| asked.min(longest))
    }

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
        let is_zero = self.max_timeout.is_some_and(|longest| longest.is_zero());
        problems.unless(!is_zero, &key("max_timeout"), "must be above zero");
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
            Kind::Http => http::check(name, self, problems),
            Kind::Exec => exec::check(name, self, problems),
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
        if self.procedure.is_none() && self.function.is_none() {
            let missing = "must name the procedure to CALL for tasks, such as \"app.derive_units\", or function for rows";
            problems.error(key("procedure"), missing);
        }
        let names = [("procedure", &self.procedure), ("function", &self.function), ("role", &self.role)];
        for (field, name) in names {
            if let Some(Err(error)) = name.as_deref().map(QualifiedName::parse) {
                problems.error(key(field), error.to_string());
            }
        }
    }
}
