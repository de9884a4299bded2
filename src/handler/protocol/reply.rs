//! Replies: read row by row, so that a malformed one spoils nothing but itself.

use super::quote;
use crate::{
    backoff, error_group,
    handler::{Done, Failed, Outcome, Spawn, TaskDone, TaskOutcome},
    json::Json,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::{collections::BTreeMap, time::Duration};

/// A reply that says nothing about any row.
#[derive(Debug, thiserror::Error)]
pub enum BadReply {
    #[error("the reply is not JSON of the protocol ({reason}): {quoted}")]
    NotAReply { reason: serde_json::Error, quoted: String },
    #[error("the reply has neither \"rows\" nor \"outcome\"")]
    Empty,
    #[error("the reply has no \"line\": {quoted}")]
    NoLine { quoted: String },
    #[error("the reply is about another request than the one that was asked: {quoted}")]
    Another { quoted: String },
}

/// What a reply says about itself: all of it may be left out.
#[derive(Default, Deserialize)]
struct Named<'a> {
    id: Option<i64>,
    #[serde(borrow)]
    idempotency_key: Option<std::borrow::Cow<'a, str>>,
}

/// Whether a reply names the request that it answers, by the key or by the id of a task; an error when it names another.
pub fn names_request(bytes: &[u8], key: &str, id: Option<i64>) -> Result<bool, BadReply> {
    let another = || BadReply::Another { quoted: quote(bytes) };
    let named: Named<'_> = serde_json::from_slice(bytes).map_err(|_| another())?;
    let is_other = named.idempotency_key.as_deref().is_some_and(|named| named != key)
        || matches!((named.id, id), (Some(named), Some(id)) if named != id);
    match is_other {
        true => Err(another()),
        false => Ok(named.idempotency_key.is_some() || (named.id.is_some() && id.is_some())),
    }
}

/// Whether there is an outcome in a reply.
pub fn has_outcome(bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct OnlyOutcome {
        #[expect(dead_code, reason = "only whether it can be read")]
        outcome: Word,
    }
    serde_json::from_slice::<OnlyOutcome>(bytes).is_ok()
}

/// What a reply says: row by row, and for all the others.
#[derive(Debug, Default)]
pub struct RowsReply {
    pub rows: Vec<(i32, Outcome)>,
    /// For every line that is not in `rows`.
    pub others: Option<Outcome>,
    /// Entries of which not even the line could be read.
    pub unreadable: usize,
}

#[derive(Deserialize)]
struct Whole<'a> {
    #[serde(borrow)]
    rows: Option<Vec<&'a RawValue>>,
    outcome: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OnlyLine {
    line: i32,
}

#[derive(Deserialize)]
struct Said {
    outcome: Word,
    #[serde(default)]
    result: Option<Json>,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    error_code: Option<String>,
    #[serde(default)]
    retry_after: Option<f64>,
    #[serde(default)]
    outputs: Option<BTreeMap<String, String>>,
    #[serde(default)]
    append: Option<Vec<Json>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Succeeded,
    Failed,
    Retry,
}

/// What a task wants to happen next.
#[derive(Deserialize)]
struct Next {
    #[serde(default)]
    spawn: Option<Vec<Spawn>>,
    #[serde(default)]
    after: Option<Vec<Spawn>>,
}

/// The reply to a block of rows.
pub fn read_rows(bytes: &[u8]) -> Result<RowsReply, BadReply> {
    let whole: Whole<'_> = parse(bytes)?;
    let others = whole.outcome.map(|_| for_all(read_outcome(bytes)));
    let Some(entries) = whole.rows else {
        return others.map_or(Err(BadReply::Empty), |others| {
            Ok(RowsReply { others: Some(others), ..RowsReply::default() })
        });
    };
    let mut reply = RowsReply { others, ..RowsReply::default() };
    for entry in entries {
        match serde_json::from_str::<OnlyLine>(entry.get()) {
            Ok(OnlyLine { line }) => reply.rows.push((line, read_outcome(entry.get().as_bytes()))),
            Err(_) => reply.unreadable += 1,
        }
    }
    Ok(reply)
}

/// The reply to one row: its line and its outcome.
pub fn read_row(bytes: &[u8]) -> Result<(i32, Outcome), BadReply> {
    let _: &RawValue = parse(bytes)?;
    match serde_json::from_slice::<OnlyLine>(bytes) {
        Ok(OnlyLine { line }) => Ok((line, read_outcome(bytes))),
        Err(_) => Err(BadReply::NoLine { quoted: quote(bytes) }),
    }
}

/// The reply to a task.
pub fn read_task(bytes: &[u8]) -> Result<TaskOutcome, BadReply> {
    let _: &RawValue = parse(bytes)?;
    Ok(match read_outcome(bytes).checked() {
        Outcome::Succeeded(Done { append, .. }) if !append.is_empty() => TaskOutcome::Failed(
            "\"append\" is for rows, which have a batch to append to; a task may call musterd.append_rows"
                .into(),
        ),
        Outcome::Succeeded(Done { outputs, .. }) if !outputs.is_empty() => {
            TaskOutcome::Failed(NO_FILES.into())
        }
        Outcome::Succeeded(Done { result, .. }) => match serde_json::from_slice::<Next>(bytes) {
            Ok(next) => TaskOutcome::Done(TaskDone {
                result,
                spawn: next.spawn.unwrap_or_default(),
                after: next.after.unwrap_or_default(),
            }),
            Err(error) => TaskOutcome::Retry {
                error: format!("\"spawn\" or \"after\" of the reply is malformed: {error}").into(),
                after: None,
            },
        },
        Outcome::Failed(failed) => TaskOutcome::Failed(without_files(failed)),
        Outcome::Retry { error, after } => TaskOutcome::Retry { error: without_files(error), after },
    })
}

const NO_FILES: &str =
    "\"outputs\" is for rows, whose batch has files; what a task has to say is its \"result\"";

/// What a task cannot leave behind is named in its error.
fn without_files(mut failed: Failed) -> Failed {
    if !std::mem::take(&mut failed.outputs).is_empty() {
        failed.error = format!("{} ({NO_FILES})", failed.error);
    }
    failed
}

/// One outcome stands for many rows; rows to append must come from one of them, or they would be appended many times.
fn for_all(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Succeeded(done) if !done.append.is_empty() => Outcome::Retry {
            error: "\"append\" must stand in a row's own entry, not beside an outcome for all".into(),
            after: None,
        },
        outcome => outcome,
    }
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, BadReply> {
    serde_json::from_slice(bytes).map_err(|reason| BadReply::NotAReply { reason, quoted: quote(bytes) })
}

/// An outcome that cannot be read is a failed try of what it is about.
fn read_outcome(bytes: &[u8]) -> Outcome {
    match serde_json::from_slice::<Said>(bytes) {
        Ok(said) => said.judge(),
        Err(error) => Outcome::Retry {
            error: format!("the outcome in the reply is malformed: {error}").into(),
            after: None,
        },
    }
}

impl Said {
    fn judge(self) -> Outcome {
        if let Some(Err(problem)) = self.error_code.as_deref().map(error_group::check_code) {
            let error = format!("the outcome in the reply is malformed: {problem}").into();
            return Outcome::Retry { error, after: None };
        }
        match self.outcome {
            Word::Failed => Outcome::Failed(self.failed()),
            Word::Retry => {
                let wait = self.retry_after.and_then(|s| Duration::try_from_secs_f64(s).ok());
                let after = wait.map(|wait| wait.min(backoff::LONGEST_ASKED));
                Outcome::Retry { error: self.failed(), after }
            }
            Word::Succeeded => self.succeeded(),
        }
    }

    /// What it leaves behind counts when there is no further try.
    fn failed(self) -> Failed {
        Failed {
            error: self.error.unwrap_or_else(|| "the handler gave no reason".to_owned()),
            code: self.error_code,
            result: self.result,
            outputs: self.outputs.into_iter().flatten().collect(),
        }
    }

    fn succeeded(self) -> Outcome {
        let outputs = self.outputs.into_iter().flatten().collect();
        Outcome::Succeeded(Done { result: self.result, outputs, append: self.append.unwrap_or_default() })
    }
}
