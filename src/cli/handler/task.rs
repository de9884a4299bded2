//! A handler tried on a task that is in no database: what it is sent, what it answers, and what that would mean.

use super::{Heard, all_of, show, verdict::Verdict};
use crate::cli::{Exit, Global, screen};
use anyhow::{Context, Result};
use musterd::{
    handler::{self, Entry, TaskCall},
    json::Json,
    store::tasks::{Task, TaskRef},
};
use std::time::Instant;

pub(super) async fn run(
    name: &str,
    entry: &Entry,
    payload: &str,
    heard: Heard,
    global: &Global,
) -> Result<Exit> {
    let payload: Json = serde_json::from_str(payload).context("--payload is not JSON")?;
    let task = sample(name, entry, payload);
    let began = Instant::now();
    let call = TaskCall { task: &task, timeout: entry.config.timeout, traceparent: None };
    let verdict = Verdict::of_task(handler::run_task(&*entry.handler, call).await);
    let took = began.elapsed().as_millis() as u64;
    let exchanges = all_of(heard);
    let good = verdict.is_good();
    if global.json {
        screen::json(&serde_json::json!({
            "handler": name, "ok": good, "took_ms": took, "exchanges": exchanges, "task": verdict,
        }))?;
    } else {
        show(&exchanges)?;
        screen::line(&format!("{} in {took} ms", headline(&verdict)))?;
        for (what, made) in [("child", &verdict.spawn), ("uncle", &verdict.after)] {
            for spawn in made {
                let payload = spawn.payload.as_ref().map_or("{}", Json::text);
                screen::line(&format!("{what}: {} {payload}", spawn.command))?;
            }
        }
    }
    Ok(if good { Exit::Done } else { Exit::Failed })
}

fn sample(name: &str, entry: &Entry, payload: Json) -> Task {
    Task {
        reference: TaskRef { id: 0, token: uuid::Uuid::new_v4() },
        parent: None,
        queue: entry.config.queue.clone(),
        command: name.to_owned(),
        payload,
        attempt: 1,
        max_attempts: None,
        crashes: 0,
        solo_crashes: 0,
        is_solo: false,
        timeout: None,
        traceparent: None,
        waited: None,
    }
}

fn headline(verdict: &Verdict) -> String {
    match verdict.said() {
        Some(said) => format!("{}: {said}", verdict.outcome),
        None => verdict.outcome.to_owned(),
    }
}
