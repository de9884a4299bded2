//! Why a task is where it is.

use super::{Limits, Reason, lane_reasons, long_transaction, troubled};
use crate::store::{reasons, tasks};
use tokio_postgres::{Error, GenericClient};

/// Why a task is where it is; `None` when there is no such task.
pub async fn task(client: &impl GenericClient, id: i64) -> Result<Option<Vec<Reason>>, Error> {
    task_with(client, id, Limits::default()).await
}

/// The same, by the caller's own limits.
pub async fn task_with(
    client: &impl GenericClient,
    id: i64,
    limits: Limits,
) -> Result<Option<Vec<Reason>>, Error> {
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
                format!("nothing is wrong: task {id} is running on {worker}, attempt {}", task.attempt),
            ));
        }
        _ => {
            let lane = reasons::lane(client, &task.queue, Some(&task.command)).await?;
            reasons.extend(lane_reasons(&lane, Some(&task.command), Some(id), task.parent_id));
            reasons.extend(troubled(&lane));
            let horizon = reasons::horizon(client, limits.long_transaction.as_secs_f64()).await?;
            reasons.extend(horizon.as_ref().map(long_transaction));
            if !reasons.iter().any(|reason| reason.code != "long_transaction") {
                let ahead = reasons::tasks_ahead(client, id).await?;
                let sentence = format!("nothing is wrong: {ahead} tasks of queue {} come first", task.queue);
                reasons.push(Reason::new("nothing_wrong", sentence));
            }
        }
    }
    Ok(Some(reasons))
}

fn scheduled(id: i64, task: &tasks::Shown) -> Reason {
    let Some(when) = task.run_at else {
        let sentence = format!("task {id} waited for others, which have all ended: the next sweep starts it");
        return Reason::new("waiting_for_tasks", sentence);
    };
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
