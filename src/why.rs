//! Why something is not moving, in a person's words, and what to do about it.

mod batch;
mod retention;
mod task;

pub use batch::{batch, batch_with};
pub use retention::retention;
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
    pub code: Code,
    pub sentence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what_to_do: Option<String>,
}

impl Reason {
    fn new(code: Code, sentence: impl Into<String>) -> Self {
        Self { code, sentence: sentence.into(), what_to_do: None }
    }

    fn advise(mut self, what_to_do: impl Into<String>) -> Self {
        self.what_to_do = Some(what_to_do.into());
        self
    }
}

/// A word that machines can rely on; docs/operations.md says what each means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    Ended,
    Held,
    Paused,
    Aborting,
    Scheduled,
    WaitingForTasks,
    WaitingForChildren,
    NothingWrong,
    Moving,
    NoWorker,
    QueueNotServed,
    NoHandler,
    HandlerUnavailable,
    Focus,
    FocusElsewhere,
    Behind,
    Failing,
    Budget,
    Canary,
    CanaryHeld,
    Retrying,
    Backoff,
    Postponed,
    Alone,
    NoTicket,
    OwnerSilent,
    FlushesFailing,
    LongTransaction,
    Unended,
    Ending,
    Auditing,
    Unbalanced,
    Uploading,
    OutputsMissing,
    RetentionUndeclared,
    RetentionTroubled,
    RetentionBehind,
    RetentionOff,
    Unexplained,
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

/// Advice where no known reason applies.
const UNEXPLAINED: &str = "look into the workers' logs, and run: musterd doctor";

/// Workers whose flushes fail: they keep what they have done and start nothing new.
fn troubled(lane: &Lane) -> Vec<Reason> {
    let explain = |troubled: &Troubled| {
        let sentence = format!(
            "worker {}: {}; it keeps what it has done and starts nothing",
            troubled.worker, troubled.trouble
        );
        Reason::new(Code::FlushesFailing, sentence).advise("fix the cause; the worker tries again by itself")
    };
    lane.troubled.iter().take(3).map(explain).collect()
}

fn no_worker() -> Reason {
    Reason::new(Code::NoWorker, "no worker is alive").advise("start one: musterd run")
}

/// Work in the hands of a worker that may not be alive; since when, if that is known.
fn owner_silent(what: &str, worker: &str, seconds: Option<f64>) -> Reason {
    let since = match seconds {
        Some(seconds) if seconds.is_finite() => format!("was not heard of for {}", ago(seconds)),
        _ => "does not beat".to_owned(),
    };
    let sentence = format!(
        "{what} held by worker {worker}, which {since}; it is freed when the worker is declared dead"
    );
    Reason::new(Code::OwnerSilent, sentence).advise("musterd worker list")
}

/// A length of time, in whole seconds.
fn ago(seconds: f64) -> String {
    humantime::format_duration(Duration::from_secs(seconds.max(0.0) as u64)).to_string()
}

fn long_transaction(horizon: &Horizon) -> Reason {
    let open_for = ago(horizon.seconds);
    let sentence = format!(
        "a transaction of {:?} (pid {}, {}) has been open for {open_for} and keeps dead rows from being cleaned up; \
         its statement: {}",
        horizon.application,
        horizon.pid,
        horizon.state,
        shortened(&horizon.query)
    );
    Reason::new(Code::LongTransaction, sentence)
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
        reasons.push(Reason::new(Code::Paused, format!("queue {queue} is paused")).advise(advice));
    }
    if lane.workers == 0 {
        reasons.push(no_worker());
    } else if lane.serving == 0 {
        let sentence = format!("none of the {} live workers serves queue {queue}", lane.workers);
        reasons.push(
            Reason::new(Code::QueueNotServed, sentence)
                .advise(format!("add [queues.{queue}] to a worker's configuration")),
        );
    } else if let (0, Some(command)) = (lane.capable, command) {
        let sentence =
            format!("none of the {} live workers of queue {queue} handles {command:?}", lane.serving);
        reasons.push(
            Reason::new(Code::NoHandler, sentence)
                .advise(format!("add [handlers.{command}] to a worker's configuration")),
        );
    }
    if let Some(focus) = lane.focus.filter(|focus| Some(*focus) != me && Some(*focus) != parent) {
        let sentence = format!("queue {queue} is structured, and all its fibers work on scope {focus}");
        reasons.push(Reason::new(Code::FocusElsewhere, sentence).advise(format!("musterd why task {focus}")));
    }
    reasons
}

/// Work that waits in a queue and that no live worker handles.
fn unhandled(lane: &Lane, found: &[Unhandled]) -> Vec<Reason> {
    const MOST: usize = 5;
    // Without workers at all there is nothing to say of commands.
    let found = if lane.serving == 0 { &[] } else { found };
    let explain = |unhandled: &Unhandled| {
        let Unhandled { command, tasks, rows } = unhandled;
        let sentence = format!(
            "none of the {} live workers of queue {} handles {command:?}; of it {tasks} tasks and {rows} rows wait",
            lane.serving, lane.queue
        );
        Reason::new(Code::NoHandler, sentence)
            .advise(format!("add [handlers.{command}] to a worker's configuration"))
    };
    let mut reasons: Vec<Reason> = found.iter().take(MOST).map(explain).collect();
    if let Some(more @ 1..) = found.len().checked_sub(MOST) {
        let sentence = format!("work of {more} other commands waits that no live worker handles");
        reasons.push(Reason::new(Code::NoHandler, sentence));
    }
    reasons
}

/// The end of a batch takes a moment: only those that are still there after this time are named.
const MOMENT: Duration = Duration::from_secs(2);

async fn unended(client: &impl GenericClient, queue: &str) -> Result<Option<Reason>, Error> {
    let mut ids = reasons::unended(client, queue).await?;
    if !ids.is_empty() {
        tokio::time::sleep(MOMENT).await;
        let still = reasons::unended(client, queue).await?;
        ids.retain(|id| still.contains(id));
    }
    let Some(first) = ids.first() else { return Ok(None) };
    let sentence = match ids.len() {
        1 => format!("batch {first} of queue {queue} has nothing left to run and has not ended"),
        many => format!(
            "{many} batches of queue {queue} have nothing left to run and have not ended, {first} among them"
        ),
    };
    Ok(Some(Reason::new(Code::Unended, sentence).advise(format!("musterd why batch {first}"))))
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
    reasons.extend(unended(client, name).await?);
    let horizon = reasons::horizon(client, limits.long_transaction.as_secs_f64()).await?;
    reasons.extend(horizon.as_ref().map(long_transaction));
    if let Some(focus) = lane.focus {
        reasons.push(Reason::new(Code::Focus, format!("all fibers of queue {name} work on scope {focus}")));
    }
    if !reasons.iter().any(|reason| !matches!(reason.code, Code::LongTransaction | Code::Focus)) {
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
        reasons.push(Reason::new(Code::NothingWrong, sentence));
    }
    Ok(Some(reasons))
}
