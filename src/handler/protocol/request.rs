//! Requests: a block of rows, one row of a block, or a task.

use super::VERSION;
use crate::{
    handler::{BlockCall, TaskCall, batch_key},
    json::Json,
    store::pages::InputRow,
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::{fmt::Write, time::Duration};

/// What the rows of a request have in common.
#[derive(Serialize)]
struct Head<'a> {
    protocol: &'static str,
    kind: &'static str,
    command: &'a str,
    batch: Batch<'a>,
    block: Block,
    /// Seconds that this request has, or, of rows that are sent ahead, each of them once it is its turn.
    timeout: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    deadline: Option<jiff::Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
}

#[derive(Serialize)]
struct Batch<'a> {
    id: i64,
    context: &'a Json,
}

#[derive(Serialize)]
struct Block {
    id: String,
    attempt: i32,
}

#[derive(Serialize)]
struct Task<'a> {
    protocol: &'static str,
    kind: &'static str,
    command: &'a str,
    task: TaskBody<'a>,
    timeout: f64,
    deadline: Option<jiff::Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
}

#[derive(Serialize)]
struct TaskBody<'a> {
    id: i64,
    parent_id: Option<i64>,
    payload: &'a Json,
    attempt: i32,
    idempotency_key: String,
}

/// A request for `rows` of a block together.
pub fn rows_request(call: &BlockCall<'_>, rows: &[InputRow<'_>]) -> Result<String, serde_json::Error> {
    let mut text = head(call, "rows", deadline(call.timeout))?;
    text.reserve(rows.iter().map(|row| row.input.len() + ROW).sum());
    let key = batch_key(call.block.batch, call.uid);
    text.push_str(",\"rows\":[");
    for (index, row) in rows.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        push_row(&mut text, call, &key, row);
    }
    text.push_str("]}");
    Ok(text)
}

/// Rows of a block as a line each, without its line feed. When it will be a row's turn is not known yet: no deadline.
#[derive(Debug)]
pub struct RowLines<'a> {
    call: &'a BlockCall<'a>,
    head: String,
    key: String,
}

impl<'a> RowLines<'a> {
    pub fn new(call: &'a BlockCall<'a>) -> Result<Self, serde_json::Error> {
        let head = on_one_line(head(call, "row", None)?);
        Ok(Self { call, head, key: batch_key(call.block.batch, call.uid) })
    }

    /// The idempotency key of a line.
    pub fn key(&self, line: i32) -> String {
        format!("{}/{line}", self.key)
    }

    pub fn line(&self, row: &InputRow<'_>) -> String {
        let mut text = String::with_capacity(self.head.len() + row.input.len() + ROW);
        text.push_str(&self.head);
        text.push_str(",\"row\":");
        push_row(&mut text, self.call, &self.key, row);
        text.push('}');
        text
    }
}

/// What a row takes beside its input, about.
const ROW: usize = 100;

/// The input is JSON on one line and goes in as it is, never read and written again.
fn push_row(text: &mut String, call: &BlockCall<'_>, key: &str, row: &InputRow<'_>) {
    let InputRow { line, input } = row;
    let attempt = call.attempt;
    // Writing into a string cannot fail.
    let _ = write!(
        text,
        "{{\"line\":{line},\"input\":{input},\"idempotency_key\":\"{key}/{line}\",\"attempt\":{attempt}}}"
    );
}

/// A task, on one line.
pub fn task_request(call: &TaskCall<'_>) -> Result<String, serde_json::Error> {
    let task = call.task;
    let body = TaskBody {
        id: task.reference.id,
        parent_id: task.parent,
        payload: &task.payload,
        attempt: task.attempt,
        idempotency_key: call.idempotency_key(),
    };
    let request = Task {
        protocol: VERSION,
        kind: "task",
        command: &task.command,
        task: body,
        timeout: call.timeout.as_secs_f64(),
        deadline: deadline(call.timeout),
        traceparent: call.traceparent,
    };
    serde_json::to_string(&request).map(on_one_line)
}

/// The key of a whole request: the same whenever the same lines of the same batch are asked for.
pub fn request_key(call: &BlockCall<'_>, rows: &[InputRow<'_>]) -> String {
    let batch = batch_key(call.block.batch, call.uid);
    match rows {
        [row] => format!("{batch}/{}", row.line),
        _ => {
            let mut lines = Sha256::new();
            rows.iter().for_each(|row| lines.update(row.line.to_be_bytes()));
            let (first, last) = (rows.first().map_or(0, |r| r.line), rows.last().map_or(0, |r| r.line));
            format!("{batch}/{first}-{last}/{}", hex::encode(&lines.finalize()[..8]))
        }
    }
}

/// The fields that all rows share, without the closing brace.
fn head(
    call: &BlockCall<'_>,
    kind: &'static str,
    deadline: Option<jiff::Timestamp>,
) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string(&Head {
        protocol: VERSION,
        kind,
        command: call.command,
        batch: Batch { id: call.block.batch, context: call.context },
        block: Block { id: call.block.token.to_string(), attempt: call.attempt },
        timeout: call.timeout.as_secs_f64(),
        deadline,
        traceparent: call.traceparent,
    })?;
    text.pop();
    Ok(text)
}

fn deadline(timeout: Duration) -> Option<jiff::Timestamp> {
    let timeout = jiff::SignedDuration::try_from(timeout).ok()?;
    let until = jiff::Timestamp::now().checked_add(timeout).ok()?;
    until.round(jiff::Unit::Millisecond).ok()
}

/// A line feed can only stand between the tokens of JSON, where a blank does as well.
fn on_one_line(text: String) -> String {
    if memchr::memchr2(b'\n', b'\r', text.as_bytes()).is_none() {
        return text;
    }
    text.replace(['\n', '\r'], " ")
}
