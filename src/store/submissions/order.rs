//! What a submission asks for and what became of it.

use crate::{json::Json, traceparent::Traceparent};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::time::Duration;

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

/// What the reading thread found when it had read everything.
#[derive(Debug)]
pub struct Whole {
    pub rows: u64,
    /// Stands for the rows and options of a request with an idempotency key; others have none.
    pub hash: Option<[u8; 32]>,
}

impl Order {
    /// What makes two requests the same, besides their rows.
    pub fn fingerprint(&self) -> Sha256 {
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
