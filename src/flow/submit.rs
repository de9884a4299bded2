//! Submitting: a stream of rows becomes a batch, all of it or none of it, in constant memory.
//!
//! A thread reads and checks the rows and writes chunks of them in COPY's binary form; this side sends them on. Task, batch
//! and chunks are one transaction.

mod chunks;
mod exported;
pub(super) mod read;

pub use exported::{ADDED, WHOLE};

use super::input::{Format, InputError, LARGEST, Limits};
use crate::{config::Problems, json::Json, spans::Span, store::submissions, traceparent::Traceparent};
use bytes::Bytes;
use chunks::{Chunks, Target};
use read::read_beside;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::mpsc;
use tokio_postgres::Client;

/// The `[submit]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The largest row accepted, in bytes of JSON.
    pub max_row_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { max_row_bytes: Limits::default().max_row_bytes }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            (1..=LARGEST).contains(&self.max_row_bytes),
            "submit.max_row_bytes",
            format!("must be between 1 and {LARGEST}"),
        );
    }
}

/// What to do with the rows.
#[derive(Clone, Debug)]
pub struct Order {
    pub command: String,
    pub queue: Option<String>,
    pub context: Json,
    pub priority: Option<i32>,
    pub idempotency_key: Option<String>,
    pub hold: bool,
    pub max_attempts: Option<i32>,
    pub row_timeout: Option<Duration>,
    pub max_failed: MaxFailed,
    pub on_done: Option<String>,
    pub on_budget: Option<OnBudget>,
    pub canary: Option<Canary>,
    /// How long its data stays after its end; as the workers' configuration says when left out.
    pub keep: Option<Duration>,
    /// Handed on to the handlers; not part of what makes two requests the same.
    pub traceparent: Option<Traceparent>,
}

/// Some rows that run first, alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canary {
    /// A number of rows, or a share of them such as `2%`.
    pub rows: String,
    /// Spread over the batch, not its first rows.
    pub sample: bool,
    /// The rest runs by itself if this is true of them, such as `failed<0.5%`.
    pub auto_release: Option<String>,
}

/// What to do as soon as more rows have failed than a batch allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBudget {
    Hold,
    Abort,
}

impl OnBudget {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Abort => "abort",
        }
    }
}

impl std::str::FromStr for OnBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hold" => Ok(Self::Hold),
            "abort" => Ok(Self::Abort),
            _ => Err("must be hold or abort".into()),
        }
    }
}

/// Rows to be read, and how.
#[derive(Debug)]
pub struct Given<R> {
    pub source: R,
    pub format: Format,
    pub limits: Limits,
    /// Written by `batch export`: the rows are the inputs in it.
    pub exported: bool,
}

/// How many rows may fail before the batch counts as failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MaxFailed {
    Rows(i32),
    Percent(f32),
}

impl std::str::FromStr for MaxFailed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is neither a number of rows (10) nor a share (5%)");
        match text.trim().strip_suffix('%') {
            Some(percent) => match percent.trim().parse::<f32>() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Percent(percent)),
                _ => Err(wrong()),
            },
            None => match text.trim().parse::<i32>() {
                Ok(rows) if rows >= 0 => Ok(Self::Rows(rows)),
                _ => Err(wrong()),
            },
        }
    }
}

/// What became of a submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Submitted {
    pub id: i64,
    pub rows: u64,
    /// The key stood for this batch already; nothing was added.
    pub repeated: bool,
}

/// What became of rows that were added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Appended {
    pub id: i64,
    pub added: u64,
    /// What the batch has now; of a repeat, what it had then.
    pub rows: i32,
    /// The key stood for these rows already; nothing was added.
    pub repeated: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("more than {} rows: split the file", i32::MAX)]
    TooMany,
    #[error(transparent)]
    Store(#[from] submissions::SubmissionError),
    #[error("row {row} is not one of an export: {problem}")]
    NotExported { row: u64, problem: String },
    #[error("the reading thread died")]
    ReaderDied,
}

/// How far a submission is, for a progress bar.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<(AtomicU64, AtomicU64)>);

impl Meter {
    pub fn rows(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> u64 {
        self.0.1.load(Ordering::Relaxed)
    }

    fn set(&self, rows: u64, bytes: u64) {
        self.0.0.store(rows, Ordering::Relaxed);
        self.0.1.store(bytes, Ordering::Relaxed);
    }
}

/// What the reading thread found when it had read everything.
#[derive(Debug)]
pub struct Whole {
    pub rows: u64,
    /// Stands for the rows and options of a request with an idempotency key; others have none.
    pub hash: Option<[u8; 32]>,
}

/// Reads `source` to its end and makes a batch of it.
pub async fn submit(
    client: &mut Client,
    order: &Order,
    given: Given<impl Read + Send + 'static>,
    meter: Meter,
) -> Result<Submitted, SubmitError> {
    let known = match &order.idempotency_key {
        Some(key) => submissions::find(client, &order.command, key).await?,
        None => None,
    };
    let id = match &known {
        Some(known) => known.id,
        None => submissions::reserve(client).await?,
    };
    let _span = Span::begin("submit", order.traceparent.as_ref().map(Traceparent::as_str))
        .name("command", &order.command)
        .number("batch", id);
    // Only a key is ever compared by its hash.
    let hash = order.idempotency_key.as_ref().map(|_| order.fingerprint());
    let (messages, reading) = read_beside(given, Chunks::new(Target::Batch(id), hash), meter);
    if let Some(known) = known {
        // The rows are there already: read only to see that they are the same.
        drain(messages).await;
        let read = reading.await?;
        submissions::same_or_conflict(&known, order, read.hash)?;
        return Ok(Submitted { id: known.id, rows: read.rows, repeated: true });
    }
    submissions::copy_in(client, id, order, messages, reading).await
}

/// Reads `source` to its end and adds its rows to a batch that is held or running; how many it has then. With a key of the batch's
/// they are added once, however often they are sent.
pub async fn append(
    client: &mut Client,
    id: i64,
    idempotency_key: Option<&str>,
    given: Given<impl Read + Send + 'static>,
    meter: Meter,
) -> Result<Appended, SubmitError> {
    let hash = idempotency_key.map(|_| Sha256::new());
    let (messages, reading) = read_beside(given, Chunks::new(Target::Staged, hash), meter);
    submissions::copy_onto(client, id, idempotency_key, messages, reading).await
}

async fn drain(mut messages: mpsc::Receiver<Bytes>) {
    while messages.recv().await.is_some() {}
}

impl Order {
    /// What makes two requests the same, besides their rows.
    fn fingerprint(&self) -> Sha256 {
        let mut hash = Sha256::new();
        let options = serde_json::json!([
            self.command,
            self.queue,
            self.context.text(),
            self.priority,
            self.hold,
            self.max_attempts,
            self.row_timeout.map(|timeout| timeout.as_millis() as u64),
            format!("{:?}", self.max_failed),
            self.on_done,
            self.on_budget.map(OnBudget::as_str),
            self.canary.as_ref().map(|c| (&c.rows, c.sample, &c.auto_release)),
            self.keep.map(|keep| keep.as_secs()),
        ]);
        hash.update(options.to_string());
        hash.update(b"\n");
        hash
    }
}
