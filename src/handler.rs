//! What a command runs: the contract between Muster and the user's work.

pub mod builtin;
pub mod config;

pub use config::{Config, Kind};

use crate::json::Json;
use futures::{FutureExt, future::BoxFuture};
use std::{collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

/// One row, as a handler gets it.
#[derive(Debug)]
pub struct RowCall<'a> {
    pub batch: i64,
    pub line: i32,
    pub input: &'a Json,
    /// The batch's context.
    pub context: &'a Json,
    /// From 1; a row that failed before has a higher one.
    pub attempt: i32,
}

impl RowCall<'_> {
    /// The same for every try of this row: what a receiver uses to do its work once.
    pub fn idempotency_key(&self) -> String {
        format!("{}/{}", self.batch, self.line)
    }
}

/// What became of one row or task.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Succeeded(Done),
    /// The work itself says no; another try would not help.
    Failed(String),
    /// This try failed; there may be another, after the given wait or the usual one.
    Retry {
        error: String,
        after: Option<Duration>,
    },
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    pub result: Option<Json>,
    /// Text to add to named output files.
    pub outputs: Vec<(String, String)>,
}

/// Runs the rows of one command. At least once: a crash between the work and its record repeats the row.
pub trait Handler: Send + Sync + 'static {
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome>;
}

/// The commands this worker can run.
#[derive(Clone, Default)]
pub struct Registry(Arc<BTreeMap<String, Entry>>);

#[derive(Clone)]
pub struct Entry {
    pub handler: Arc<dyn Handler>,
    pub config: Config,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Entry").field(&self.config).finish()
    }
}

impl Registry {
    /// The handlers that a configuration declares.
    pub fn from_config(handlers: &BTreeMap<String, Config>) -> Self {
        let entry = |(name, config): (&String, &Config)| {
            let handler: Arc<dyn Handler> = match config.kind {
                Kind::Builtin => Arc::new(builtin::Builtin::new(name, config)),
            };
            (name.clone(), Entry { handler, config: config.clone() })
        };
        Self(Arc::new(handlers.iter().map(entry).collect()))
    }

    /// With one more command, for embedding and tests.
    pub fn with(self, command: &str, handler: Arc<dyn Handler>, config: Config) -> Self {
        let mut entries = (*self.0).clone();
        entries.insert(command.to_owned(), Entry { handler, config });
        Self(Arc::new(entries))
    }

    pub fn get(&self, command: &str) -> Option<&Entry> {
        self.0.get(command)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.0.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    pub fn commands(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// Runs one row within its time; a panic or a late handler is a failed try, never more.
pub async fn run_row(handler: &dyn Handler, call: RowCall<'_>, timeout: Duration) -> Outcome {
    let guarded = AssertUnwindSafe(handler.row(call)).catch_unwind();
    match tokio::time::timeout(timeout, guarded).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(panic)) => Outcome::Retry {
            error: format!("the handler panicked: {}", crate::supervisor::panic_message(panic.as_ref())),
            after: None,
        },
        Err(_) => Outcome::Retry {
            error: format!("ran longer than its timeout of {}", humantime::format_duration(timeout)),
            after: None,
        },
    }
}
