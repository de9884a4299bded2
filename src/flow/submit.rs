//! Submitting: a stream of rows becomes a batch, all of it or none of it, in constant memory.
//!
//! A thread reads and checks the rows and writes chunks of them in COPY's binary form; this side sends them on. Task, batch
//! and chunks are one transaction.

mod chunks;
mod exported;
pub(super) mod read;

pub use crate::store::submissions::{Appended, Canary, MaxFailed, OnBudget, Order, Submitted};
pub use exported::{ADDED, WHOLE};

use super::input::{Format, InputError, Limits};
use crate::{
    json::check::LARGEST,
    problems::Problems,
    spans::Span,
    store::submissions::{self, ReadFailure, SubmissionError, Whole},
    traceparent::Traceparent,
};
use bytes::Bytes;
use chunks::{Chunks, Target};
use read::read_beside;
use serde::{Deserialize, Serialize};
use sha2::Digest;
use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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

/// Rows to be read, and how.
#[derive(Debug)]
pub struct Given<R> {
    pub source: R,
    pub format: Format,
    pub limits: Limits,
    /// Written by `batch export`: the rows are the inputs in it.
    pub exported: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("more than {} rows: split the file", i32::MAX)]
    TooMany,
    #[error(transparent)]
    Store(#[from] SubmissionError),
    #[error("row {row} is not one of an export: {problem}")]
    NotExported { row: u64, problem: String },
    #[error("the reading thread died")]
    ReaderDied,
}

impl ReadFailure for SubmitError {
    fn is_cut_off(&self) -> bool {
        matches!(self, Self::ReaderDied)
    }
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
    let hash = idempotency_key.map(|_| sha2::Sha256::new());
    let (messages, reading) = read_beside(given, Chunks::new(Target::Staged, hash), meter);
    submissions::copy_onto(client, id, idempotency_key, messages, reading).await
}

async fn drain(mut messages: mpsc::Receiver<Bytes>) {
    while messages.recv().await.is_some() {}
}
