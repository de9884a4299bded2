//! Why a batch is where it is.

use super::{Limits, Reason, lane_reasons, long_transaction, troubled};
use crate::store::reasons::{self, BatchFacts, Horizon, Lane};
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
        let failed = rows(facts.failed, "row has", "rows have");
        let sentence = format!("{failed} failed, {} are allowed{last}", facts.allowed);
        reasons.push(Reason::new("failing", sentence).advise(format!("musterd batch rows {id} --failed")));
    }
    reasons.extend(backoff(facts));
    reasons.extend(troubled(lane));
    reasons.extend(horizon.map(long_transaction));
    let all_troubled = lane.troubled.len() as i64 >= lane.serving;
    let stuck = |reason: &Reason| match reason.code {
        "failing" | "long_transaction" => false,
        "flushes_failing" => all_troubled,
        "retrying" => false,
        _ => true,
    };
    if !reasons.iter().any(stuck) {
        let beside = !reasons.is_empty();
        reasons.push(moving(facts, beside));
    }
    reasons
}

/// Rows that failed and are tried again: all that is left, or beside what goes on.
fn backoff(facts: &BatchFacts) -> Option<Reason> {
    let attempt = facts.next_attempt?;
    let error =
        facts.last_error.as_deref().map(|error| format!("; one failed with: {error}")).unwrap_or_default();
    let many = facts.retrying;
    match (facts.next_due, facts.blocks_owned + facts.blocks_due, facts.carved >= facts.rows) {
        (Some(due), 0, true) => {
            let wait = rows(many, "row waits for its", "rows wait for their");
            let sentence = format!("{wait} next try (attempt {attempt}), the first at {due}{error}");
            Some(Reason::new("backoff", sentence))
        }
        _ => {
            let failed = rows(many, "row failed and is", "rows failed and are");
            Some(Reason::new("retrying", format!("{failed} tried again (attempt {attempt}){error}")))
        }
    }
}

/// One row, or several.
fn rows(count: i64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn held(id: i64, facts: &BatchFacts) -> Reason {
    if facts.on_budget.as_deref() == Some("hold") && facts.failed > facts.allowed {
        let failed = rows(facts.failed, "row", "rows");
        let sentence =
            format!("batch {id} was held because {failed} failed and {} are allowed", facts.allowed);
        return Reason::new("budget", sentence)
            .advise(format!("mend the cause, then: musterd batch release {id}"));
    }
    Reason::new("held", format!("batch {id} is held")).advise(format!("musterd batch release {id}"))
}

/// What goes on; beside what went wrong it is no claim that nothing did.
fn moving(facts: &BatchFacts, beside: bool) -> Reason {
    let left = i64::from(facts.rows) - facts.done;
    let (code, opening) = match beside {
        true => ("moving", "the rest goes on"),
        false => ("nothing_wrong", "nothing is wrong"),
    };
    if facts.recent == 0 {
        let running =
            if facts.blocks_owned > 0 { "its first rows are running" } else { "a worker will take it up" };
        return Reason::new(code, format!("{opening}: {running}, {left} rows are left"));
    }
    let per_second = facts.recent as f64 / 60.0;
    let eta = Duration::from_secs((left as f64 / per_second.max(0.001)) as u64);
    let eta = humantime::format_duration(eta);
    Reason::new(code, format!("{opening}: {left} rows are left at {per_second:.1} rows/s, about {eta}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> BatchFacts {
        BatchFacts {
            state: "running".into(),
            queue: "default".into(),
            command: "noop".into(),
            priority: 100,
            parent: None,
            open: true,
            aborting: false,
            rows: 10,
            carved: 5,
            done: 3,
            failed: 0,
            allowed: 0,
            on_budget: None,
            blocks_owned: 1,
            blocks_due: 0,
            next_due: None,
            retrying: 0,
            next_attempt: None,
            last_error: None,
            recent: 0,
            last_tally: None,
            error: None,
            ahead: 0,
        }
    }

    fn codes(facts: &BatchFacts) -> Vec<&'static str> {
        let lane = Lane {
            queue: "default".into(),
            paused: false,
            mode: "parallel".into(),
            workers: 1,
            serving: 1,
            capable: 1,
            focus: None,
            troubled: Vec::new(),
        };
        explain_batch(7, facts, &lane, None).iter().map(|reason| reason.code).collect()
    }

    #[test]
    fn beside_a_failure_nobody_says_that_nothing_is_wrong() {
        assert_eq!(codes(&facts()), ["nothing_wrong"]);
        let retrying = BatchFacts { retrying: 2, next_attempt: Some(2), ..facts() };
        assert_eq!(codes(&retrying), ["retrying", "moving"]);
        assert_eq!(codes(&BatchFacts { failed: 1, ..facts() }), ["failing", "moving"]);
    }
}
