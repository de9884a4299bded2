//! Why what has ended is still there, or grows.

use super::{Code, Reason};
use crate::store::retention::{self, Planned, Standing};
use std::time::Duration;
use tokio_postgres::{Error, GenericClient};

/// Passes are due at least once a day, whatever the configuration says.
const LATE: f64 = 2.0 * 86_400.0;
/// What the defaults would let go.
const USUAL: (Duration, Duration) = (Duration::from_secs(30 * 86_400), Duration::from_secs(31_557_600));

/// What could go and does not, and why; by estimates, no row is counted.
pub async fn retention(client: &impl GenericClient) -> Result<Vec<Reason>, Error> {
    let Some(standing) = retention::standing(client).await? else {
        let sentence = "no worker has declared [retention] yet, and nothing is pruned before one has";
        return Ok(vec![Reason::new(Code::RetentionUndeclared, sentence).advise("start one: musterd run")]);
    };
    let mut reasons = Vec::new();
    let due = summed(&retention::plan(client, None).await?);
    if standing.data_is_off || standing.records_are_off {
        let could = summed(&retention::plan(client, Some(USUAL)).await?);
        if could.bytes > due.bytes {
            reasons.push(off(&standing, &could));
        }
    }
    if let Some(trouble) = &standing.trouble {
        let sentence = format!("the latest pass left data behind: {trouble}");
        reasons.push(
            Reason::new(Code::RetentionTroubled, sentence).advise("fix the cause; the next pass tries again"),
        );
    }
    if due.items > 0 && standing.passed.is_none_or(|seconds| seconds > LATE) {
        let sentence = match standing.passed {
            Some(seconds) => format!("{due} could go, and the latest pass was {} ago", super::ago(seconds)),
            None => format!("{due} could go, and no worker has done a pass yet"),
        };
        reasons.push(
            Reason::new(Code::RetentionBehind, sentence)
                .advise("musterd worker list; to do it now: musterd prune"),
        );
    }
    if reasons.is_empty() {
        let sentence = match due.items {
            0 => "nothing is wrong: nothing is old enough to go".to_owned(),
            _ => format!("nothing is wrong: {due} goes in the passes to come"),
        };
        reasons.push(Reason::new(Code::NothingWrong, sentence));
    }
    Ok(reasons)
}

fn off(standing: &Standing, could: &Due) -> Reason {
    let key = if standing.data_is_off { "retention.data" } else { "retention.records" };
    let sentence =
        format!("{could} could go after the usual 30 days and a year; retention is off ({key} = \"never\")");
    Reason::new(Code::RetentionOff, sentence)
        .advise(format!("set {key}; what would go then: musterd prune --dry-run"))
}

struct Due {
    items: i64,
    bytes: i64,
}

fn summed(plan: &[Planned]) -> Due {
    Due { items: plan.iter().map(|part| part.items).sum(), bytes: plan.iter().map(|part| part.bytes).sum() }
}

impl std::fmt::Display for Due {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
        let mut size = self.bytes as f64 / 1e3;
        let mut unit = 0;
        while size >= 1e3 && unit + 1 < UNITS.len() {
            size /= 1e3;
            unit += 1;
        }
        write!(f, "{size:.0} {}", UNITS[unit])
    }
}
