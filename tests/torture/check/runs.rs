//! What ran more than once, and why: each further run of a row must follow from what its handler said, or from a fault that
//! overlaps the two.

use super::super::faults::explained;
use super::super::ledger::Run;
use super::super::work::RUNS_AGAIN;
use super::{Evidence, Figures, Findings};

/// How many of each kind are named.
const SHOWN: usize = 20;

pub(crate) fn check(evidence: &Evidence<'_>, findings: &mut Findings, figures: &mut Figures) {
    let (mut retries, mut repeats, mut unexplained, mut beside) = (0_u64, 0_u64, 0_usize, 0_usize);
    for pair in evidence.runs.windows(2) {
        let [one, next] = pair else { continue };
        if (one.scope, one.line) != (next.scope, next.line) {
            continue;
        }
        if is_asked_for(evidence, one) {
            retries += 1;
            continue;
        }
        repeats += 1;
        if explained(evidence.faults, one.replica as usize, one.http, one.began, next.began) {
            continue;
        }
        unexplained += 1;
        if unexplained <= SHOWN {
            findings.unexplained.push(format!("{} and {}", describe(one), describe(next)));
        }
        beside += usize::from(next.began < one.ended);
    }
    if unexplained > SHOWN {
        findings.unexplained.push(format!("… {unexplained} in all, {beside} of them at the same time"));
    }
    figures.insert("runs".into(), evidence.runs.len().into());
    figures.insert("runs again as asked for".into(), retries.into());
    figures.insert("runs again after a fault".into(), (repeats - unexplained as u64).into());
    never_run(evidence, findings);
}

/// Whether another run follows from what was said, or an operator wanted one.
fn is_asked_for(evidence: &Evidence<'_>, run: &Run) -> bool {
    if RUNS_AGAIN.contains(&&*run.said) {
        return true;
    }
    let failed = matches!(&*run.said, "failed" | "unstorable");
    let undone = match run.scope {
        0 => evidence.retried.contains(&run.line),
        batch => evidence.book.batches.get(&batch).is_some_and(|batch| batch.redriven),
    };
    failed && undone
}

fn describe(run: &Run) -> String {
    let what = if run.scope == 0 {
        format!("task {}", run.line)
    } else {
        format!("row {} of {}", run.line, run.scope)
    };
    let Run { replica, attempt, began, ended, said, .. } = run;
    format!("{what}, attempt {attempt}, by replica {replica} from {began:.3} to {ended:.3}: {said}")
}

/// A task that has succeeded must have run: with the ledger's word that it did.
fn never_run(evidence: &Evidence<'_>, findings: &mut Findings) {
    let ran: std::collections::BTreeSet<(i64, i64)> = evidence
        .runs
        .iter()
        .filter(|run| matches!(&*run.said, "succeeded" | "late"))
        .map(|run| (run.scope, run.line))
        .collect();
    for (id, payload) in &evidence.book.tasks {
        let by_service = payload["do"] == "slow";
        if by_service && !ran.contains(&(0, *id)) {
            findings.lost.push(format!("task {id} has ended and never ran: {payload}"));
        }
    }
}
