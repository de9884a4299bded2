//! Why something is not moving, in a person's words, and what to do about it.

mod batch;
mod task;

pub use batch::{batch, batch_with};
pub use task::{task, task_with};

use crate::store::{
    queues,
    reasons::{self, Horizon, Lane, Troubled, Unhandled},
};
use serde::Serialize;
use std::time::Duration;
use tokio_postgres::{Error, GenericClient};

/// One reason, the most telling first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// A word that machines can rely on.
    pub code: &'static str,
    pub sentence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what_to_do: Option<String>,
}

impl Reason {
    fn new(code: &'static str, sentence: impl Into<String>) -> Self {
        Self { code, sentence: sentence.into(), what_to_do: None }
    }

    fn advise(mut self, what_to_do: impl Into<String>) -> Self {
        self.what_to_do = Some(what_to_do.into());
        self
    }
}

/// What counts as unusual.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A transaction that is open for longer is named.
    pub long_transaction: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { long_transaction: Duration::from_secs(300) }
    }
}

/// Workers whose flushes fail: they keep what they have done and start nothing new.
fn troubled(lane: &Lane) -> Vec<Reason> {
    let told = |troubled: &Troubled| {
        let sentence = format!(
            "worker {}: {}; it keeps what it has done and starts nothing",
            troubled.worker, troubled.trouble
        );
        Reason::new("flushes_failing", sentence).advise("mend the cause; the worker tries again by itself")
    };
    lane.troubled.iter().take(3).map(told).collect()
}

fn long_transaction(horizon: &Horizon) -> Reason {
    let open_for = humantime::format_duration(Duration::from_secs(horizon.seconds as u64));
    let sentence = format!(
        "a transaction of {:?} (pid {}, {}) has been open for {open_for} and keeps dead rows from being cleaned up; \
         its statement: {}",
        horizon.application,
        horizon.pid,
        horizon.state,
        shortened(&horizon.query)
    );
    Reason::new("long_transaction", sentence)
        .advise(format!("end it, or: SELECT pg_terminate_backend({})", horizon.pid))
}

/// The beginning of a statement, on one line.
fn shortened(query: &str) -> String {
    const MOST: usize = 120;
    let words: Vec<&str> = query.split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// What keeps a queue, or a command in it, from being worked on.
fn lane_reasons(lane: &Lane, command: Option<&str>, me: Option<i64>, parent: Option<i64>) -> Vec<Reason> {
    let queue = &lane.queue;
    let mut reasons = Vec::new();
    if lane.paused {
        let advice = format!("musterd queue resume {queue}");
        reasons.push(Reason::new("paused", format!("queue {queue} is paused")).advise(advice));
    }
    if lane.workers == 0 {
        reasons.push(Reason::new("no_worker", "no worker is alive").advise("start one: musterd run"));
    } else if lane.serving == 0 {
        let sentence = format!("none of the {} live workers serves queue {queue}", lane.workers);
        reasons.push(
            Reason::new("queue_not_served", sentence)
                .advise(format!("add [queues.{queue}] to a worker's configuration")),
        );
    } else if let (0, Some(command)) = (lane.capable, command) {
        let sentence =
            format!("none of the {} live workers of queue {queue} handles {command:?}", lane.serving);
        reasons.push(
            Reason::new("no_handler", sentence)
                .advise(format!("add [handlers.{command}] to a worker's configuration")),
        );
    }
    if let Some(focus) = lane.focus.filter(|focus| Some(*focus) != me && Some(*focus) != parent) {
        let sentence = format!("queue {queue} is structured, and all its fibers work on scope {focus}");
        reasons.push(Reason::new("focus_elsewhere", sentence).advise(format!("musterd why task {focus}")));
    }
    reasons
}

/// Work that waits in a queue for somebody who handles it.
fn unhandled(lane: &Lane, found: &[Unhandled]) -> Vec<Reason> {
    const MOST: usize = 5;
    // Without workers at all there is nothing to say of commands.
    let found = if lane.serving == 0 { &[] } else { found };
    let told = |unhandled: &Unhandled| {
        let Unhandled { command, tasks, rows } = unhandled;
        let sentence = format!(
            "none of the {} live workers of queue {} handles {command:?}; of it {tasks} tasks and {rows} rows wait",
            lane.serving, lane.queue
        );
        Reason::new("no_handler", sentence)
            .advise(format!("add [handlers.{command}] to a worker's configuration"))
    };
    let mut reasons: Vec<Reason> = found.iter().take(MOST).map(told).collect();
    if let Some(more @ 1..) = found.len().checked_sub(MOST) {
        let sentence = format!("of {more} other commands that nobody handles something waits");
        reasons.push(Reason::new("no_handler", sentence));
    }
    reasons
}

/// Why a queue is, or is not, being worked on.
pub async fn queue(client: &impl GenericClient, name: &str) -> Result<Option<Vec<Reason>>, Error> {
    queue_with(client, name, Limits::default()).await
}

/// The same, by the caller's own limits.
pub async fn queue_with(
    client: &impl GenericClient,
    name: &str,
    limits: Limits,
) -> Result<Option<Vec<Reason>>, Error> {
    let Some(shown) = queues::list(client).await?.into_iter().find(|queue| queue.name == name) else {
        return Ok(None);
    };
    let lane = reasons::lane(client, name, None).await?;
    let mut reasons = lane_reasons(&lane, None, lane.focus, None);
    reasons.extend(unhandled(&lane, &reasons::unhandled(client, name).await?));
    reasons.extend(troubled(&lane));
    let horizon = reasons::horizon(client, limits.long_transaction.as_secs_f64()).await?;
    reasons.extend(horizon.as_ref().map(long_transaction));
    if let Some(focus) = lane.focus {
        reasons.push(Reason::new("focus", format!("all fibers of queue {name} work on scope {focus}")));
    }
    if !reasons.iter().any(|reason| !matches!(reason.code, "long_transaction" | "focus")) {
        let sentence = format!(
            "nothing is wrong: {} queue {name}; {} tasks and {} rows wait, {} tasks run",
            if lane.serving == 1 {
                "1 worker serves".into()
            } else {
                format!("{} workers serve", lane.serving)
            },
            shown.tasks_queued + shown.tasks_scheduled,
            shown.rows_queued,
            shown.tasks_running
        );
        reasons.push(Reason::new("nothing_wrong", sentence));
    }
    Ok(Some(reasons))
}
