//! A batch that has nothing left to run and has not ended: whether its lines add up, and what its end waits for.

use super::{Code, Reason, ago, no_worker, rows};
use crate::{
    lines::Lines,
    store::{
        batches::Unbalanced,
        reasons::{self, Audit, BatchFacts, Lane},
    },
};
use tokio_postgres::{Error, GenericClient};

/// For so many seconds it is the usual way of things: a worker is just about to end it.
const SETTLED: f64 = 5.0;
/// Ranges of lines that are named.
const NAMED: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Over {
    JustNow,
    Audited { audit: Audit, uploading: bool },
}

impl Over {
    /// Audits a batch that has been over for a while; `None` when it is not over.
    pub(super) async fn look(
        client: &impl GenericClient,
        id: i64,
        facts: &BatchFacts,
    ) -> Result<Option<Self>, Error> {
        if !facts.over {
            return Ok(None);
        } else if facts.quiet < SETTLED {
            return Ok(Some(Self::JustNow));
        }
        let audit = reasons::audit(client, id).await?;
        let uploading = facts.outputs && reasons::is_uploading(client, id).await?;
        Ok(Some(Self::Audited { audit, uploading }))
    }

    pub(super) fn explain(&self, id: i64, facts: &BatchFacts, lane: &Lane) -> Vec<Reason> {
        let mut reasons = Vec::new();
        if lane.workers == 0 && !facts.aborting {
            reasons.push(no_worker());
        }
        match self {
            Self::Audited { audit: Audit::Unbalanced(found), .. } => reasons.push(unbalanced(id, found)),
            Self::Audited { audit: Audit::TimedOut, .. } => {
                let sentence = format!(
                    "batch {id} has nothing left to run and is being audited line by line before its end; it is so large that \
                     this takes longer than a few seconds"
                );
                reasons.push(Reason::new(Code::Auditing, sentence));
            }
            // The reason that it is being aborted is enough.
            _ if facts.aborting => {}
            Self::JustNow => {
                reasons.push(Reason::new(
                    Code::Ending,
                    format!("every row of batch {id} has ended; a worker is about to end it"),
                ));
            }
            Self::Audited { audit: Audit::Balanced, uploading } => {
                reasons.push(ending(id, facts, *uploading))
            }
        }
        reasons
    }
}

fn unbalanced(id: i64, found: &Unbalanced) -> Reason {
    let Unbalanced { missing, doubled, outside, .. } = found;
    if *doubled > 0 || *outside > 0 {
        let sentence = format!(
            "the lines of batch {id} do not add up: {doubled} are recorded more than once, {outside} are not lines of the batch{}; \
             it stays open",
            if missing.is_empty() {
                String::new()
            } else {
                format!(", nothing is recorded of {}", named(missing))
            }
        );
        return Reason::new(Code::Unbalanced, sentence).advise(format!(
            "a person has to decide which record is right: SELECT * FROM musterd.audit({id}), then look at the lines in \
             musterd.outcomes and musterd.failures"
        ));
    }
    let sentence = format!(
        "batch {id} has nothing left to run, but of {} nothing is recorded: {}",
        rows(missing.len() as i64, "row", "rows"),
        named(missing)
    );
    Reason::new(Code::Unbalanced, sentence).advise(
        "nothing: the sweep lets them run again, within completion.sweep_max (10m) if a worker is alive",
    )
}

/// The first of some lines.
fn named(lines: &Lines) -> String {
    let one = |range: &std::ops::Range<i32>| match range.len() {
        1 => range.start.to_string(),
        _ => format!("{} to {}", range.start, range.end - 1),
    };
    let first: Vec<String> = lines.ranges().iter().take(NAMED).map(one).collect();
    let more = if lines.ranges().len() > NAMED { " and others" } else { "" };
    format!("{} {}{more}", if lines.len() == 1 { "line" } else { "lines" }, first.join(", "))
}

fn ending(id: i64, facts: &BatchFacts, uploading: bool) -> Reason {
    let since = ago(facts.quiet);
    if uploading {
        let sentence = format!(
            "every row of batch {id} ended {since} ago; a session, as a rule a worker, holds the lock for the upload of its output \
             files, and it ends when that is done"
        );
        return Reason::new(Code::Uploading, sentence);
    }
    if facts.outputs {
        let sentence = format!(
            "every row of batch {id} ended {since} ago, and its lines add up; it ends when its output files are uploaded, which no \
             worker is doing at this moment"
        );
        return Reason::new(Code::OutputsMissing, sentence).advise(format!(
            "look into the workers' logs for \"outputs cannot be uploaded\" and fix the cause; without its files it ends by: \
             musterd batch abort {id}"
        ));
    }
    let sentence =
        format!("every row of batch {id} ended {since} ago, and its lines add up; it was not ended yet");
    Reason::new(Code::Ending, sentence)
        .advise("nothing: the sweep ends it, within completion.sweep_max (10m) if a worker is alive")
}
