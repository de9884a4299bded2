//! The service behind the `http` handlers: does what the rows say, writes down every run, and is made to fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Result;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::faults::now;
use super::ledger::{Ledger, Run};
use super::work::{self, Say};

/// The handlers' timeout. An answer that takes nearly as long may come too late.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);
pub(crate) const SECRET: &str = "whsec_dG9ydHVyZS10b3J0dXJlLXRvcnR1cmUtdG9ydHVyZQ==";

/// What is wrong with the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mood {
    Well,
    Broken,
    Busy,
    Away,
    Silent,
    Garbled,
    Half,
}

const MOODS: [Mood; 7] =
    [Mood::Well, Mood::Broken, Mood::Busy, Mood::Away, Mood::Silent, Mood::Garbled, Mood::Half];

#[derive(Clone, Debug)]
pub(crate) struct Sink {
    mood: Arc<AtomicU8>,
    ledger: Ledger,
}

impl Sink {
    pub(crate) async fn start(ledger: Ledger, tasks: &mut JoinSet<()>) -> Result<(Self, u16)> {
        let sink = Self { mood: Arc::default(), ledger };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let limit = axum::extract::DefaultBodyLimit::disable();
        let router = Router::new().route("/work", post(answer)).layer(limit).with_state(sink.clone());
        tasks.spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Ok((sink, port))
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.mood.store(mood as u8, Ordering::SeqCst);
    }

    fn mood(&self) -> Mood {
        MOODS[usize::from(self.mood.load(Ordering::SeqCst))]
    }
}

async fn answer(State(sink): State<Sink>, headers: HeaderMap, body: Bytes) -> Response {
    let began = now();
    let replica =
        headers.get("x-replica").and_then(|name| name.to_str().ok()).and_then(|name| name.parse().ok());
    let (Some(replica), true) = (replica, headers.contains_key("webhook-signature")) else {
        return (StatusCode::BAD_REQUEST, "who asks?").into_response();
    };
    let request: Value = serde_json::from_slice(&body).unwrap();
    let mood = sink.mood();
    let (mut runs, reply) = match request["kind"].as_str() {
        Some("task") => task(&request),
        _ => rows(&request),
    };
    let hangs = mood == Mood::Silent || runs.iter().any(|run| run.said == "hang");
    let whole = match mood {
        Mood::Well => None,
        Mood::Broken | Mood::Busy | Mood::Away => Some("refused"),
        Mood::Garbled | Mood::Half => Some("garbled"),
        Mood::Silent => Some("hang"),
    };
    let slow = runs.iter().map(|run| run.ended as u64).max().unwrap_or(0);
    if hangs {
        tokio::time::sleep(TIMEOUT + Duration::from_millis(500)).await;
    } else if slow > 0 && whole.is_none() {
        tokio::time::sleep(Duration::from_millis(slow)).await;
    }
    let late = now() - began > TIMEOUT.as_secs_f64() * 0.6;
    for run in &mut runs {
        (run.replica, run.began, run.ended) = (replica, began, now());
        if let Some(word) = whole {
            run.said = word.into();
        } else if hangs {
            run.said = "hang".into();
        } else if late {
            run.said = "late".into();
        }
    }
    sink.ledger.write(&runs).await;
    match mood {
        Mood::Well | Mood::Silent => Json(reply).into_response(),
        Mood::Broken => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Mood::Busy => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")]).into_response(),
        Mood::Away => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Mood::Garbled => "these are no outcomes".into_response(),
        Mood::Half => {
            let text = reply.to_string();
            text[..text.len() / 2].to_owned().into_response()
        }
    }
}

fn run(scope: i64, line: i64, attempt: i64, said: Say, takes: u64) -> Run {
    Run {
        http: true,
        replica: 0,
        scope,
        line,
        attempt: attempt as i32,
        block: None,
        began: 0.0,
        // Until the answer: how long it is to take.
        ended: takes as f64,
        said: said.word().into(),
    }
}

fn rows(request: &Value) -> (Vec<Run>, Value) {
    let (mut runs, mut replies) = (Vec::new(), Vec::new());
    let block = request["block"]["id"].as_str().map(str::to_owned);
    for row in request["rows"].as_array().unwrap() {
        let (line, attempt) = (row["line"].as_i64().unwrap(), row["attempt"].as_i64().unwrap());
        let input = &row["input"];
        let said = work::say(input, attempt);
        let batch = request["batch"]["id"].as_i64().unwrap();
        runs.push(Run { block: block.clone(), ..run(batch, line, attempt, said, work::takes(input)) });
        let mut reply = match said {
            Say::Missing => continue,
            Say::Failed => json!({ "outcome": "failed", "error": "asked to fail" }),
            Say::Retry | Say::Exit => json!({ "outcome": "retry", "error": "asked to", "retry_after": 0.05 }),
            Say::Unstorable => json!({ "outcome": "succeeded", "result": "\u{0}" }),
            Say::Succeeded | Say::Hang => json!({ "outcome": "succeeded", "result": work::result(input) }),
        };
        reply["line"] = line.into();
        if said == Say::Succeeded {
            for (name, value) in work::extras(input, line).as_object().unwrap() {
                reply[name] = value.clone();
            }
        }
        replies.push(reply);
    }
    (runs, json!({ "rows": replies }))
}

fn task(request: &Value) -> (Vec<Run>, Value) {
    let task = &request["task"];
    let (id, attempt) = (task["id"].as_i64().unwrap(), task["attempt"].as_i64().unwrap());
    let payload = &task["payload"];
    let said = work::say(payload, attempt);
    let said = if said == Say::Missing { Say::Retry } else { said };
    (vec![run(0, id, attempt, said, work::takes(payload))], work::task_reply(id, payload, said))
}
