//! Why a task is where it is.

use super::{
    Code, Limits, Reason, UNEXPLAINED, ago, batch_with, lane_reasons, long_transaction, owner_silent,
    troubled,
};
use crate::state::State;
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
    // A batch is a task, too; what is said of a task does not fit it.
    if let Some(reasons) = batch_with(client, id, limits).await? {
        return Ok(Some(reasons));
    }
    let Some(task) = tasks::show(client, id).await? else { return Ok(None) };
    let mut reasons = Vec::new();
    match task.state {
        State::Succeeded => reasons.push(Reason::new(Code::Ended, format!("task {id} has succeeded"))),
        State::Failed | State::Aborted => {
            let why = task.error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
            let advice = format!("musterd task retry {id}");
            reasons
                .push(Reason::new(Code::Ended, format!("task {id} has {}{why}", task.state)).advise(advice));
        }
        State::Held => {
            let advice = format!("release it, in SQL: SELECT musterd.release({id})");
            reasons.push(Reason::new(Code::Held, format!("task {id} is held")).advise(advice));
        }
        State::Waiting => reasons.push(waiting(client, &task).await?),
        State::Scheduled if !task.after.is_empty() => {
            let named: Vec<String> = task.after.iter().map(ToString::to_string).collect();
            let sentence = format!("task {id} starts after {} has ended", named.join(", "));
            reasons.push(
                Reason::new(Code::WaitingForTasks, sentence)
                    .advise(format!("musterd why task {}", task.after[0])),
            );
        }
        State::Scheduled => reasons.push(scheduled(id, &task)),
        State::Running => reasons.push(running(client, &task).await?),
        State::Queued => reasons.extend(queued(client, &task, limits).await?),
    }
    Ok(Some(reasons))
}

async fn waiting(client: &impl GenericClient, task: &tasks::Shown) -> Result<Reason, Error> {
    let id = task.id;
    let children = reasons::open_children(client, id).await?;
    let Some((first, ..)) = children.first() else {
        let sentence =
            format!("task {id} waited for its children, which have all ended; it was not ended yet");
        let advice = "nothing: the sweep ends it, within completion.sweep_max (10m) if a worker is alive";
        return Ok(Reason::new(Code::Ending, sentence).advise(advice));
    };
    let named: Vec<String> =
        children.iter().map(|(id, command, state)| format!("{id} ({command}, {state})")).collect();
    let sentence = format!("task {id} waits for {} children: {}", task.open_children, named.join(", "));
    Ok(Reason::new(Code::WaitingForChildren, sentence).advise(format!("musterd why task {first}")))
}

async fn running(client: &impl GenericClient, task: &tasks::Shown) -> Result<Reason, Error> {
    let id = task.id;
    let Some(worker) = &task.worker else {
        let sentence =
            format!("task {id} is marked as running, and no worker has it: tables were changed by hand");
        let advice = format!("end it by: musterd task abort {id}; then, to run it: musterd task retry {id}");
        return Ok(Reason::new(Code::Unexplained, sentence).advise(advice));
    };
    if let Some(seconds) = reasons::silent_for(client, worker).await? {
        return Ok(owner_silent(&format!("task {id} is"), worker, Some(seconds)));
    }
    let sentence = format!("nothing is wrong: task {id} is running on {worker}, attempt {}", task.attempt);
    Ok(Reason::new(Code::NothingWrong, sentence))
}

/// A task that is due and that no worker claims is unusual after this many seconds.
const PATIENCE: f64 = 60.0;

async fn queued(
    client: &impl GenericClient,
    task: &tasks::Shown,
    limits: Limits,
) -> Result<Vec<Reason>, Error> {
    let (id, queue) = (task.id, &task.queue);
    if !reasons::has_ticket(client, id).await? {
        let sentence =
            format!("task {id} has no ticket, so no worker can claim it; tables were changed by hand");
        let advice =
            "nothing: the sweep issues another, within completion.sweep_max (10m) if a worker is alive";
        return Ok(vec![Reason::new(Code::NoTicket, sentence).advise(advice)]);
    }
    let lane = reasons::lane(client, queue, Some(&task.command)).await?;
    let mut reasons = lane_reasons(&lane, Some(&task.command), Some(id), task.parent_id);
    reasons.extend(troubled(&lane));
    let horizon = reasons::horizon(client, limits.long_transaction.as_secs_f64()).await?;
    reasons.extend(horizon.as_ref().map(long_transaction));
    if reasons.iter().any(|reason| reason.code != Code::LongTransaction) {
        return Ok(reasons);
    }
    if task.crashes >= 2 {
        let sentence = format!(
            "task {id} must run alone, for processes have died with it; a worker with nothing else in hand takes it"
        );
        reasons.push(Reason::new(Code::Alone, sentence));
        return Ok(reasons);
    }
    let ahead = reasons::tasks_ahead(client, id).await?;
    let due = task.run_at.map_or(task.created_at, |due| due.max(task.created_at));
    let waited = jiff::Timestamp::now().duration_since(due).as_secs_f64();
    if ahead == 0 && waited > PATIENCE && reasons::busy(client, queue, None).await? == 0 {
        let sentence = format!(
            "task {id} is due for {} and comes first in queue {queue}, and no worker has claimed it; no known reason applies",
            ago(waited)
        );
        reasons.push(Reason::new(Code::Unexplained, sentence).advise(UNEXPLAINED));
    } else {
        let sentence = format!("nothing is wrong: {ahead} tasks of queue {queue} come first");
        reasons.push(Reason::new(Code::NothingWrong, sentence));
    }
    Ok(reasons)
}

fn scheduled(id: i64, task: &tasks::Shown) -> Reason {
    let Some(when) = task.run_at else {
        let sentence = format!("task {id} waited for others, which have all ended: the next sweep starts it");
        return Reason::new(Code::WaitingForTasks, sentence);
    };
    match &task.error {
        Some(error) => Reason::new(
            Code::Backoff,
            format!(
                "task {id} failed and is tried again (attempt {}) at {when}; the error: {error}",
                task.attempt
            ),
        ),
        None => Reason::new(Code::Scheduled, format!("task {id} is not due before {when}")),
    }
    .advise(format!("to run it now: musterd task retry {id}"))
}
