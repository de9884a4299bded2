//! Submitting: a stream of rows becomes a batch, all of it or none of it, in constant memory.
//!
//! A thread reads and checks the rows and writes them in COPY's binary form; this side sends them on. Task, batch and
//! rows are one transaction.

mod copy;
mod exported;

pub use exported::{ADDED, WHOLE};

use super::input::{Format, InputError, Limits, Reader};
use crate::{config::Problems, json::Json, spans::Span, store::submissions, traceparent::Traceparent};
use bytes::Bytes;
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

/// PostgreSQL's jsonb cannot be much larger, and memory is bounded by it.
const LARGEST_ROW: usize = 128 << 20;

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            (1..=LARGEST_ROW).contains(&self.max_row_bytes),
            "submit.max_row_bytes",
            format!("must be between 1 and {LARGEST_ROW}"),
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
    /// Handed on to the handlers; not part of what makes two requests the same.
    pub traceparent: Option<Traceparent>,
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
    /// What the batch has now.
    pub rows: i32,
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
struct Whole {
    rows: u64,
    hash: [u8; 32],
}

/// Reads `source` to its end and makes a batch of it.
pub async fn submit(
    client: &mut Client,
    order: &Order,
    given: Given<impl Read + Send + 'static>,
    meter: Meter,
) -> Result<Submitted, SubmitError> {
    let known = match &order.idempotency_key {
        Some(key) => submissions::find(client, key).await?,
        None => None,
    };
    let id = match &known {
        Some(known) => known.id,
        None => submissions::reserve(client).await?,
    };
    let _span = Span::begin("submit", order.traceparent.as_ref().map(Traceparent::as_str))
        .name("command", &order.command)
        .number("batch", id);
    let seed = order.fingerprint();
    let (chunks, received) = mpsc::channel(4);
    let reading = tokio::task::spawn_blocking(move || read_all(given, id, seed, &chunks, &meter));
    if let Some(known) = known {
        // The rows are there already: read only to see that they are the same.
        drain(received).await;
        let read = reading.await.map_err(|_| SubmitError::ReaderDied)??;
        submissions::same_or_conflict(&known, order, &read.hash)?;
        return Ok(Submitted { id: known.id, rows: read.rows, repeated: true });
    }
    let finish =
        async { reading.await.map_err(|_| SubmitError::ReaderDied)?.map(|read| (read.rows, read.hash)) };
    submissions::copy_in(client, id, order, received, finish).await
}

/// Reads `source` to its end and adds its rows to a batch that is held or running; how many it has then.
pub async fn append(
    client: &mut Client,
    id: i64,
    given: Given<impl Read + Send + 'static>,
    meter: Meter,
) -> Result<Appended, SubmitError> {
    let (chunks, received) = mpsc::channel(4);
    let reading = tokio::task::spawn_blocking(move || read_all(given, id, Sha256::new(), &chunks, &meter));
    let finish = async { reading.await.map_err(|_| SubmitError::ReaderDied)?.map(|read| read.rows) };
    submissions::copy_onto(client, id, received, finish).await
}

async fn drain(mut chunks: mpsc::Receiver<Bytes>) {
    while chunks.recv().await.is_some() {}
}

/// Runs in a thread of its own: reading and checking is work for a core.
fn read_all<R: Read>(
    given: Given<R>,
    batch: i64,
    seed: Sha256,
    chunks: &mpsc::Sender<Bytes>,
    meter: &Meter,
) -> Result<Whole, SubmitError> {
    let Given { source, format, limits, exported } = given;
    let mut reader = Reader::new(source, format, limits);
    let mut buffer = copy::Buffer::new(batch);
    let mut hash = seed;
    let mut row = Vec::new();
    let mut rows: u64 = 0;
    while reader.next_row(&mut row)?.is_some() {
        rows += 1;
        let line = i32::try_from(rows).map_err(|_| SubmitError::TooMany)?;
        if exported {
            row = exported::input_of(&row, format)
                .map_err(|problem| SubmitError::NotExported { row: rows, problem })?;
        }
        hash.update((row.len() as u64).to_be_bytes());
        hash.update(&row);
        buffer.push(line, &row);
        if let Some(chunk) = buffer.take_if_full() {
            meter.set(rows, reader.bytes_read());
            if chunks.blocking_send(chunk).is_err() {
                // The other side has an error of its own to report.
                return Err(SubmitError::ReaderDied);
            }
        }
    }
    meter.set(rows, reader.bytes_read());
    // Refused only when the other side has ended with its own error.
    let _ = chunks.blocking_send(buffer.finish());
    Ok(Whole { rows, hash: hash.finalize().into() })
}

impl Order {
    /// What makes two requests the same, besides their rows.
    fn fingerprint(&self) -> Sha256 {
        let mut hash = Sha256::new();
        let told = serde_json::json!([
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
        ]);
        hash.update(told.to_string());
        hash
    }
}
