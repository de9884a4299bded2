//! Why a batch is where it is.

mod over;

use super::{
    Code, Limits, Reason, UNEXPLAINED, ago, lane_reasons, long_transaction, no_worker, owner_silent, troubled,
};
use crate::state::State;
use crate::store::reasons::{self, BatchFacts, Horizon, Lane};
use over::Over;
use std::time::Duration;
use tokio_postgres::{Error, GenericClient};

/// Why a batch is where it is; `None` when there is no such batch.
pub async fn batch(client: &impl GenericClient, id: i64) -> Result<Option<Vec<Reason>>, Error> {
    batch_with(client, id, Limits::default()).await
}

/// The same, by the caller's own limits.
pub async fn batch_with(
    client: &impl GenericClient,
    id: i64,
    limits: Limits,
) -> Result<Option<Vec<Reason>>, Error> {
    let Some(facts) = reasons::batch(client, id).await? else { return Ok(None) };
    let lane = reasons::lane(client, &facts.queue, Some(&facts.command)).await?;
    let horizon = reasons::horizon(client, limits.long_transaction.as_secs_f64()).await?;
    let seen = Seen {
        over: Over::look(client, id, &facts).await?,
        busy: reasons::busy(client, &facts.queue, Some(id)).await?,
        horizon,
    };
    Ok(Some(explain_batch(id, &facts, &lane, &seen)))
}

/// What was found beside the facts of the batch.
#[derive(Debug)]
struct Seen {
    /// Only of a batch that has nothing left to run.
    over: Option<Over>,
    /// Blocks and tasks of its queue that workers hold, beside its own.
    busy: i64,
    horizon: Option<Horizon>,
}

fn explain_batch(id: i64, facts: &BatchFacts, lane: &Lane, seen: &Seen) -> Vec<Reason> {
    match facts.state {
        State::Succeeded => return vec![Reason::new(Code::Ended, format!("batch {id} has succeeded"))],
        State::Failed | State::Aborted => {
            let why = facts.error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
            return vec![Reason::new(Code::Ended, format!("batch {id} has {}{why}", facts.state))];
        }
        _ => {}
    }
    let mut reasons = Vec::new();
    if facts.aborting {
        let sentence =
            format!("batch {id} is being aborted; {} blocks are still in hand", facts.blocks_owned);
        reasons.push(Reason::new(Code::Aborting, sentence));
    } else if !facts.open {
        reasons.push(held(id, facts));
    }
    if let Some(over) = &seen.over {
        reasons.extend(over.explain(id, facts, lane));
    } else if reasons.is_empty() {
        reasons.extend(lane_reasons(lane, Some(&facts.command), Some(id), facts.parent));
        if reasons.is_empty() && facts.ahead > 0 && facts.blocks_owned == 0 {
            let sentence = format!("{} batches of queue {} have a better priority", facts.ahead, facts.queue);
            reasons.push(Reason::new(Code::Behind, sentence));
        }
    }
    reasons.extend(canary(id, facts));
    reasons.extend(failing(id, facts));
    reasons.extend(backoff(facts));
    reasons.extend(alone(facts));
    reasons.extend(unavailable(facts));
    if let (Some(worker), 1..) = (&facts.silent_worker, facts.blocks_silent) {
        let what = rows(facts.blocks_silent, "block of the batch is", "blocks of the batch are");
        reasons.push(owner_silent(&what, worker, None));
    }
    reasons.extend(troubled(lane));
    reasons.extend(seen.horizon.as_ref().map(long_transaction));
    let all_troubled = lane.troubled.len() as i64 >= lane.serving;
    let stuck = |reason: &Reason| match reason.code {
        Code::Failing | Code::LongTransaction | Code::Retrying | Code::Alone | Code::Canary => false,
        Code::HandlerUnavailable => facts.recent == 0,
        Code::FlushesFailing => all_troubled,
        // The other blocks, and what waits, go on without that worker.
        Code::OwnerSilent => facts.blocks_owned == facts.blocks_silent && !has_waiting(facts),
        _ => true,
    };
    if !reasons.iter().any(stuck) {
        let beside = !reasons.is_empty();
        reasons.push(moving(id, facts, seen.busy, beside));
    }
    reasons
}

/// Rows that a worker could claim now.
fn has_waiting(facts: &BatchFacts) -> bool {
    facts.blocks_due > 0 || facts.carved < facts.rows
}

fn failing(id: i64, facts: &BatchFacts) -> Option<Reason> {
    if facts.failed == 0 {
        return None;
    }
    let last = facts.error.as_deref().map(|error| format!("; one of them: {error}")).unwrap_or_default();
    let failed = rows(facts.failed, "row has", "rows have");
    let sentence = format!("{failed} failed, {} are allowed{}{last}", facts.allowed, forgiven(facts));
    Some(Reason::new(Code::Failing, sentence).advise(format!("musterd batch rows {id} --failed")))
}

/// A canary that runs; one that has ended is why the batch is held.
fn canary(id: i64, facts: &BatchFacts) -> Option<Reason> {
    let size = facts.canary.filter(|_| !facts.canary_over && !facts.aborting)?;
    let left = (i64::from(size) - facts.done).max(0);
    let sentence =
        format!("batch {id} runs its canary of {size} rows first, of which {left} are left; the others wait");
    Some(Reason::new(Code::Canary, sentence))
}

fn alone(facts: &BatchFacts) -> Option<Reason> {
    let alone = rows(facts.solo, "row must run alone", "rows must run alone");
    let sentence =
        format!("{alone}, for processes have died with it; a worker with nothing else in hand takes it");
    (facts.solo > 0).then(|| Reason::new(Code::Alone, sentence))
}

/// What an operator has forgiven beyond what is allowed.
fn forgiven(facts: &BatchFacts) -> String {
    match facts.forgiven > facts.allowed {
        true => format!(" and {} were forgiven when it was released", facts.forgiven),
        false => String::new(),
    }
}

/// Rows that are tried again, or were given back for a while: all that is left, or beside what goes on.
fn backoff(facts: &BatchFacts) -> Option<Reason> {
    let error =
        facts.last_error.as_deref().map(|error| format!("; one failed with: {error}")).unwrap_or_default();
    let is_all = facts.blocks_owned == 0 && !has_waiting(facts);
    let many = facts.retrying;
    match (facts.next_attempt, facts.next_due) {
        (Some(attempt), Some(due)) if is_all => {
            let wait = rows(many, "row waits for its", "rows wait for their");
            let sentence = format!("{wait} next try (attempt {attempt}), the first at {due}{error}");
            Some(Reason::new(Code::Backoff, sentence))
        }
        (Some(attempt), _) => {
            let failed = rows(many, "row failed and is", "rows failed and are");
            Some(Reason::new(Code::Retrying, format!("{failed} tried again (attempt {attempt}){error}")))
        }
        // Their handler could not be asked, or the budget.
        (None, Some(due)) if is_all && facts.postponed == 0 => Some(Reason::new(
            Code::Postponed,
            format!("rows were given back without a try; they are due again at {due}"),
        )),
        _ => None,
    }
}

/// Rows whose handler could not take them, and why.
fn unavailable(facts: &BatchFacts) -> Option<Reason> {
    let error = facts.postponed_error.as_deref()?;
    let given_back = rows(facts.postponed, "row was", "rows were");
    let due = facts.next_due.map(|due| format!("; the next is due at {due}")).unwrap_or_default();
    let sentence = format!(
        "the handler of {} takes no work now: {error} ({given_back} given back, no attempt is charged{due})",
        facts.command
    );
    let advice = format!("fix the handler, and try it: musterd handler test {}", facts.command);
    Some(Reason::new(Code::HandlerUnavailable, sentence).advise(advice))
}

/// One row, or several.
fn rows(count: i64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn held(id: i64, facts: &BatchFacts) -> Reason {
    if let Some(size) = facts.canary.filter(|_| facts.canary_over) {
        let failed = rows(facts.failed, "row", "rows");
        let sentence =
            format!("batch {id} is held: its canary of {size} rows has ended, {failed} of it failed");
        return Reason::new(Code::CanaryHeld, sentence)
            .advise(format!("musterd batch show {id} has the report; then: musterd batch release {id}"));
    }
    if facts.on_budget.as_deref() == Some("hold") && facts.failed > facts.may_fail() {
        let failed = rows(facts.failed, "row", "rows");
        let sentence = format!(
            "batch {id} was held because {failed} failed and {} are allowed{}",
            facts.allowed,
            forgiven(facts)
        );
        return Reason::new(Code::Budget, sentence)
            .advise(format!("fix the cause, then: musterd batch release {id}"));
    }
    Reason::new(Code::Held, format!("batch {id} is held")).advise(format!("musterd batch release {id}"))
}

/// A batch whose rows could be claimed and are not is unusual after this many seconds.
const PATIENCE: f64 = 60.0;

/// What goes on, as far as it was seen. Beside what went wrong it is no claim that nothing did.
fn moving(id: i64, facts: &BatchFacts, busy: i64, beside: bool) -> Reason {
    let left = i64::from(facts.rows) - facts.done;
    let (code, opening) = match beside {
        true => (Code::Moving, "the rest goes on"),
        false => (Code::NothingWrong, "nothing is wrong"),
    };
    let is_running = facts.blocks_owned > facts.blocks_silent;
    let what = if facts.recent > 0 {
        let per_second = facts.recent as f64 / 60.0;
        let eta = Duration::from_secs((left as f64 / per_second.max(0.001)) as u64);
        let eta = humantime::format_duration(eta);
        return Reason::new(
            code,
            format!("{opening}: {left} rows are left at {per_second:.1} rows/s, about {eta}"),
        );
    } else if is_running && facts.done == 0 {
        "its first rows are running".to_owned()
    } else if is_running {
        format!("rows are running, the longest for {}", ago(facts.oldest_claim.unwrap_or_default()))
    } else if busy > 0 {
        format!("the workers of queue {} are at other work ({busy} blocks and tasks)", facts.queue)
    } else if has_waiting(facts) && facts.quiet < PATIENCE {
        "a worker will take it up".to_owned()
    } else {
        let sentence = format!(
            "rows of batch {id} could be claimed for {}, and no worker has claimed any; no known reason applies",
            ago(facts.quiet)
        );
        return Reason::new(Code::Unexplained, sentence).advise(UNEXPLAINED);
    };
    Reason::new(code, format!("{opening}: {what}, {left} rows are left"))
}

#[cfg(test)]
mod tests;
