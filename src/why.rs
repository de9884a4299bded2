//! Why something is not moving, in a person's words, and what to do about it.

use crate::store::{
    queues,
    reasons::{self, BatchFacts, Horizon, Lane},
    tasks,
};
use serde::Serialize;
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

/// Why a batch is where it is; `None` when there is no such batch.
pub async fn batch(client: &impl GenericClient, id: i64) -> Result<Option<Vec<Reason>>, Error> {
    let Some(facts) = reasons::batch(client, id).await? else { return Ok(None) };
    let lane = reasons::lane(client, &facts.queue, Some(&facts.command)).await?;
    let horizon = reasons::horizon(client).await?;
    Ok(Some(explain_batch(id, &facts, &lane, horizon.as_ref())))
}

fn explain_batch(id: i64, facts: &BatchFacts, lane: &Lane, horizon: Option<&Horizon>) -> Vec<Reason> {
    match facts.state.as_str() {
        "succeeded" => return vec![Reason::new("ended", format!("batch {id} has succeeded"))],
        "failed" | "aborted" => {
            let why = facts.error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
            return vec![Reason::new("ended", format!("batch {id} has {}{why}", facts.state))];
        }
        _ => {}
    }
    let mut reasons = Vec::new();
    if facts.aborting {
        let sentence =
            format!("batch {id} is being aborted; {} blocks are still in hand", facts.blocks_owned);
        reasons.push(Reason::new("aborting", sentence));
    } else if !facts.open {
        reasons.push(held(id, facts));
    }
    if reasons.is_empty() {
        reasons.extend(lane_reasons(lane, Some(&facts.command), Some(id), facts.parent));
    }
    if reasons.is_empty() && facts.ahead > 0 && facts.blocks_owned == 0 {
        let sentence = format!("{} batches of queue {} have a better priority", facts.ahead, facts.queue);
        reasons.push(Reason::new("behind", sentence));
    }
    if facts.failed > 0 {
        let last = facts.error.as_deref().map(|error| format!("; one of them: {error}")).unwrap_or_default();
        let sentence = format!("{} rows have failed, {} are allowed{last}", facts.failed, facts.allowed);
        reasons.push(Reason::new("failing", sentence).advise(format!("musterd batch rows {id} --failed")));
    }
    if let (Some(due), 0) = (facts.next_due, facts.blocks_owned + facts.blocks_due) {
        reasons.push(Reason::new("backoff", format!("rows wait for their next try, the first at {due}")));
    }
    reasons.extend(horizon.map(long_transaction));
    let stuck = reasons.iter().any(|reason| !matches!(reason.code, "failing" | "long_transaction"));
    if !stuck {
        reasons.push(moving(facts));
    }
    reasons
}

fn held(id: i64, facts: &BatchFacts) -> Reason {
    if facts.on_budget.as_deref() == Some("hold") && facts.failed > facts.allowed {
        let sentence = format!(
            "batch {id} was held because {} rows failed and {} are allowed",
            facts.failed, facts.allowed
        );
        return Reason::new("budget", sentence)
            .advise(format!("mend the cause, then: musterd batch release {id}"));
    }
    Reason::new("held", format!("batch {id} is held")).advise(format!("musterd batch release {id}"))
}

fn moving(facts: &BatchFacts) -> Reason {
    let left = i64::from(facts.rows) - facts.done;
    if facts.recent == 0 {
        let running =
            if facts.blocks_owned > 0 { "its first rows are running" } else { "a worker will take it up" };
        return Reason::new("nothing_wrong", format!("nothing is wrong: {running}, {left} rows are left"));
    }
    let per_second = facts.recent as f64 / 60.0;
    let eta = std::time::Duration::from_secs((left as f64 / per_second.max(0.001)) as u64);
    Reason::new(
        "nothing_wrong",
        format!(
            "nothing is wrong: {left} rows are left at {per_second:.1} rows/s, about {}",
            humantime::format_duration(eta)
        ),
    )
}

fn long_transaction(horizon: &Horizon) -> Reason {
    let minutes = (horizon.seconds / 60.0) as u64;
    let sentence = format!(
        "a transaction of {:?} (pid {}, {}) has been open for {minutes} minutes and keeps dead rows from being cleaned up",
        horizon.application, horizon.pid, horizon.state
    );
    Reason::new("long_transaction", sentence)
        .advise(format!("end it, or: SELECT pg_terminate_backend({})", horizon.pid))
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

/// Why a task is where it is; `None` when there is no such task.
pub async fn task(client: &impl GenericClient, id: i64) -> Result<Option<Vec<Reason>>, Error> {
    let Some(task) = tasks::show(client, id).await? else { return Ok(None) };
    let mut reasons = Vec::new();
    match task.state.as_str() {
        "succeeded" => reasons.push(Reason::new("ended", format!("task {id} has succeeded"))),
        "failed" | "aborted" => {
            let why = task.error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
            let advice = format!("musterd task retry {id}");
            reasons.push(Reason::new("ended", format!("task {id} has {}{why}", task.state)).advise(advice));
        }
        "held" => {
            let advice = format!("SELECT musterd.release({id})");
            reasons.push(Reason::new("held", format!("task {id} is held")).advise(advice));
        }
        "waiting" => {
            let children = reasons::open_children(client, id).await?;
            let named: Vec<String> =
                children.iter().map(|(id, command, state)| format!("{id} ({command}, {state})")).collect();
            let sentence =
                format!("task {id} waits for {} children: {}", task.open_children, named.join(", "));
            let advice = children.first().map(|(child, ..)| format!("musterd why task {child}"));
            reasons.push(Reason { what_to_do: advice, ..Reason::new("waiting_for_children", sentence) });
        }
        "scheduled" if !task.after.is_empty() => {
            let named: Vec<String> = task.after.iter().map(ToString::to_string).collect();
            let sentence = format!("task {id} starts after {} has ended", named.join(", "));
            reasons.push(
                Reason::new("waiting_for_tasks", sentence)
                    .advise(format!("musterd why task {}", task.after[0])),
            );
        }
        "scheduled" => reasons.push(scheduled(id, &task)),
        "running" => {
            let worker = task.worker.as_deref().unwrap_or("a worker");
            reasons.push(Reason::new(
                "nothing_wrong",
                format!("nothing is wrong: task {id} is running on {worker}"),
            ));
        }
        _ => {
            let lane = reasons::lane(client, &task.queue, Some(&task.command)).await?;
            reasons.extend(lane_reasons(&lane, Some(&task.command), Some(id), task.parent_id));
            if reasons.is_empty() {
                let ahead = reasons::tasks_ahead(client, id).await?;
                let sentence = format!("nothing is wrong: {ahead} tasks of queue {} come first", task.queue);
                reasons.push(Reason::new("nothing_wrong", sentence));
            }
        }
    }
    Ok(Some(reasons))
}

fn scheduled(id: i64, task: &tasks::Shown) -> Reason {
    let when = task.run_at.map(|at| at.to_string()).unwrap_or_default();
    match &task.error {
        Some(error) => Reason::new(
            "backoff",
            format!(
                "task {id} failed and is tried again (attempt {}) at {when}; the error: {error}",
                task.attempt
            ),
        ),
        None => Reason::new("scheduled", format!("task {id} is not due before {when}")),
    }
    .advise(format!("to run it now: musterd task retry {id}"))
}

/// Why a queue is, or is not, being worked on.
pub async fn queue(client: &impl GenericClient, name: &str) -> Result<Option<Vec<Reason>>, Error> {
    let Some(shown) = queues::list(client).await?.into_iter().find(|queue| queue.name == name) else {
        return Ok(None);
    };
    let lane = reasons::lane(client, name, None).await?;
    let mut reasons = lane_reasons(&lane, None, lane.focus, None);
    reasons.extend(reasons::horizon(client).await?.as_ref().map(long_transaction));
    if let Some(focus) = lane.focus {
        reasons.push(Reason::new("focus", format!("all fibers of queue {name} work on scope {focus}")));
    }
    if !reasons.iter().any(|reason| !matches!(reason.code, "long_transaction" | "focus")) {
        let sentence = format!(
            "nothing is wrong: {} workers serve queue {name}; {} tasks and {} rows wait, {} tasks run",
            lane.serving,
            shown.tasks_queued + shown.tasks_scheduled,
            shown.rows_queued,
            shown.tasks_running
        );
        reasons.push(Reason::new("nothing_wrong", sentence));
    }
    Ok(Some(reasons))
}
