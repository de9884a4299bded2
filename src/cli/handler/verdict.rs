//! What a handler's answer means for the row or the task that it was tried on.

use crate::cli::screen::Tone;
use musterd::{
    handler::{Done, Failed, Outcome, Spawn, TaskDone, TaskOutcome},
    json::Json,
};
use serde::Serialize;
use std::time::Duration;

#[derive(Default, Serialize)]
pub(super) struct Verdict {
    /// Of a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) line: Option<i32>,
    pub(super) outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Json>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<f64>,
    /// Rows that would be added to the batch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    append: Vec<Json>,
    /// Children the task would have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) spawn: Vec<Spawn>,
    /// Uncles it would have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) after: Vec<Spawn>,
}

const SUCCEEDED: &str = "succeeded";

impl Verdict {
    pub(super) fn of_row(line: i32, outcome: Outcome) -> Self {
        let verdict = match outcome {
            Outcome::Succeeded(Done { result, append, .. }) => {
                Self { outcome: SUCCEEDED, result, append, ..Self::default() }
            }
            Outcome::Failed(error) => Self::failed(error),
            Outcome::Retry { error, after } => Self::retry(error, after),
        };
        Self { line: Some(line), ..verdict }
    }

    pub(super) fn of_task(outcome: TaskOutcome) -> Self {
        match outcome {
            TaskOutcome::Done(TaskDone { result, spawn, after }) => {
                Self { outcome: SUCCEEDED, result, spawn, after, ..Self::default() }
            }
            TaskOutcome::Committed(_) => Self { outcome: SUCCEEDED, ..Self::default() },
            TaskOutcome::Failed(error) => Self::failed(error),
            TaskOutcome::Retry { error, after } => Self::retry(error, after),
            TaskOutcome::Postponed { error, after, .. } => Self::retry(error.into(), after),
        }
    }

    fn failed(failed: Failed) -> Self {
        let Failed { error, code, result, .. } = failed;
        Self { outcome: "failed", error: Some(error), error_code: code, result, ..Self::default() }
    }

    fn retry(failed: Failed, after: Option<Duration>) -> Self {
        let retry_after = after.map(|after| after.as_secs_f64());
        Self { outcome: "retry", retry_after, ..Self::failed(failed) }
    }

    pub(super) fn is_good(&self) -> bool {
        self.outcome == SUCCEEDED
    }

    pub(super) fn tone(&self) -> Tone {
        match self.outcome {
            SUCCEEDED => Tone::Good,
            "retry" => Tone::Doubtful,
            _ => Tone::Bad,
        }
    }

    /// The error, or else the result.
    pub(super) fn said(&self) -> Option<&str> {
        self.error.as_deref().or(self.result.as_ref().map(Json::text))
    }
}
