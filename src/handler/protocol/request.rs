//! Requests: a block of rows, one row of a block, or a task.

use super::VERSION;
use crate::{
    handler::{BlockCall, TaskCall},
    json::Json,
    store::blocks::InputRow,
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::time::Duration;

#[derive(Serialize)]
struct Rows<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    rows: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct OneRow<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    row: Row<'a>,
}

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
struct Row<'a> {
    line: i32,
    input: &'a Json,
    idempotency_key: String,
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
pub fn rows_request(call: &BlockCall<'_>, rows: &[InputRow]) -> Result<String, serde_json::Error> {
    let head = head(call, "rows", deadline(call.timeout));
    let rows = rows.iter().map(|row| row_of(call, row)).collect();
    serde_json::to_string(&Rows { head, rows })
}

/// One row as a line, without its line feed. When it will be this row's turn is not known yet: no deadline.
pub fn row_line(call: &BlockCall<'_>, row: &InputRow) -> Result<String, serde_json::Error> {
    let line = OneRow { head: head(call, "row", None), row: row_of(call, row) };
    serde_json::to_string(&line).map(on_one_line)
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
pub fn request_key(call: &BlockCall<'_>, rows: &[InputRow]) -> String {
    match rows {
        [row] => format!("{}/{}", call.block.batch, row.line),
        _ => {
            let mut lines = Sha256::new();
            rows.iter().for_each(|row| lines.update(row.line.to_be_bytes()));
            let (first, last) = (rows.first().map_or(0, |r| r.line), rows.last().map_or(0, |r| r.line));
            format!("{}/{first}-{last}/{}", call.block.batch, hex::encode(&lines.finalize()[..8]))
        }
    }
}

fn head<'a>(call: &BlockCall<'a>, kind: &'static str, deadline: Option<jiff::Timestamp>) -> Head<'a> {
    Head {
        protocol: VERSION,
        kind,
        command: call.command,
        batch: Batch { id: call.block.batch, context: call.context },
        block: Block { id: call.block.token.to_string(), attempt: call.attempt },
        timeout: call.timeout.as_secs_f64(),
        deadline,
        traceparent: call.traceparent,
    }
}

fn row_of<'a>(call: &BlockCall<'a>, row: &'a InputRow) -> Row<'a> {
    Row {
        line: row.line,
        input: &row.input,
        idempotency_key: format!("{}/{}", call.block.batch, row.line),
        attempt: call.attempt,
    }
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
