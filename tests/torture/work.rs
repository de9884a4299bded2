//! What rows and tasks are, and what their handlers say of them: decided by the input alone, so that the checker knows it too.

use serde_json::{Value, json};

/// What a handler does with one row or task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    Succeeded,
    Failed,
    Retry,
    /// A success with a result that PostgreSQL cannot store.
    Unstorable,
    /// Nothing: the reply has no entry for it.
    Missing,
    /// Nothing for longer than the timeout, together with all that was asked with it.
    Hang,
    /// The program ends; over HTTP the same as `Retry`.
    Exit,
}

impl Say {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Unstorable => "unstorable",
            Self::Retry => "retry",
            Self::Missing => "missing",
            Self::Hang => "hang",
            Self::Exit => "exit",
        }
    }
}

/// Words after which another run of the row needs no explanation.
pub(crate) const RUNS_AGAIN: &[&str] = &["retry", "missing", "hang", "exit", "refused", "late", "garbled"];

fn wish(input: &Value) -> &str {
    input["do"].as_str().unwrap_or("ok")
}

/// What is said at this try.
pub(crate) fn say(input: &Value, attempt: i64) -> Say {
    match (wish(input), attempt) {
        ("fail", _) => Say::Failed,
        ("bad", _) => Say::Unstorable,
        ("retry", 1) => Say::Retry,
        ("miss", 1) => Say::Missing,
        ("hang", 1) => Say::Hang,
        ("exit", 1) => Say::Exit,
        _ => Say::Succeeded,
    }
}

/// The state that a row or a plain task must end in, unless it is aborted.
pub(crate) const MUST_FAIL: &[&str] = &["fail", "bad"];

/// How long a handler takes for it, in milliseconds.
pub(crate) fn takes(input: &Value) -> u64 {
    if wish(input) == "slow" { 300 } else { 0 }
}

pub(crate) fn result(input: &Value) -> Value {
    json!({ "n": input["n"] })
}

/// What a row's reply adds beside its result.
pub(crate) fn extras(input: &Value, line: i64) -> Value {
    match wish(input) {
        "append" => json!({ "append": [{ "n": input["n"], "do": "ok", "from": line }] }),
        "output" => json!({ "outputs": { "lines.txt": format!("{line}\n") } }),
        _ => json!({}),
    }
}

/// The reply to a task: a parent names its children and an uncle, its first child a sibling.
pub(crate) fn task_reply(id: i64, input: &Value, said: Say) -> Value {
    let mut reply = match said {
        Say::Failed => json!({ "outcome": "failed", "error": "asked to fail" }),
        Say::Retry | Say::Exit => json!({ "outcome": "retry", "error": "asked to", "retry_after": 0.05 }),
        Say::Unstorable => json!({ "outcome": "succeeded", "result": "\u{0}" }),
        _ => json!({ "outcome": "succeeded", "result": result(input) }),
    };
    if wish(input) == "family" && said == Say::Succeeded {
        let children = input["children"].as_i64().unwrap_or(0);
        let child = |number: i64| {
            let what = if Some(number) == input["failing"].as_i64() { "fail" } else { "ok" };
            json!({ "command": "family", "child_key": format!("c{number}"),
                    "payload": { "n": number, "do": what, "sibling": number == 1 && input["sibling"] == true } })
        };
        reply["spawn"] = (1..=children).map(child).collect();
        reply["after"] = json!([{ "command": "work", "payload": { "n": id, "uncle_of": id } }]);
    }
    if input["sibling"] == true && wish(input) != "family" && said == Say::Succeeded {
        reply["spawn"] =
            json!([{ "command": "family", "child_key": "s", "payload": { "n": 0, "do": "ok" } }]);
    }
    reply
}
