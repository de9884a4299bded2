use super::*;
use crate::{
    lines::Lines,
    store::{batches::Unbalanced, reasons::Audit},
};

fn facts() -> BatchFacts {
    BatchFacts {
        state: crate::state::State::Running,
        queue: "default".into(),
        command: "noop".into(),
        priority: 100,
        parent: None,
        open: true,
        aborting: false,
        rows: 10,
        carved: 5,
        canary: None,
        canary_over: false,
        done: 3,
        failed: 0,
        allowed: 0,
        forgiven: 0,
        on_budget: None,
        blocks_owned: 1,
        blocks_silent: 0,
        silent_worker: None,
        oldest_claim: Some(1.0),
        blocks_due: 0,
        solo: 0,
        next_due: None,
        retrying: 0,
        next_attempt: None,
        last_error: None,
        postponed: 0,
        postponed_error: None,
        recent: 0,
        quiet: 0.0,
        over: false,
        outputs: false,
        error: None,
        ahead: 0,
    }
}

fn explain(facts: &BatchFacts, over: Option<Over>, busy: i64) -> Vec<Reason> {
    let lane = Lane {
        queue: "default".into(),
        paused: false,
        workers: 1,
        serving: 1,
        capable: 1,
        focus: None,
        troubled: Vec::new(),
    };
    explain_batch(7, facts, &lane, &Seen { over, busy, horizon: None })
}

fn codes(facts: &BatchFacts) -> Vec<Code> {
    explain(facts, None, 0).iter().map(|reason| reason.code).collect()
}

#[test]
fn beside_a_failure_it_is_not_said_that_nothing_is_wrong() {
    assert_eq!(codes(&facts()), [Code::NothingWrong]);
    let retrying = BatchFacts { retrying: 2, next_attempt: Some(2), ..facts() };
    assert_eq!(codes(&retrying), [Code::Retrying, Code::Moving]);
    assert_eq!(codes(&BatchFacts { failed: 1, ..facts() }), [Code::Failing, Code::Moving]);
}

#[test]
fn rows_that_no_worker_claims_are_not_all_right_for_long() {
    let waiting = BatchFacts { blocks_owned: 0, quiet: 10.0, ..facts() };
    assert_eq!(codes(&waiting), [Code::NothingWrong]);
    let forgotten = BatchFacts { quiet: 120.0, ..waiting };
    assert_eq!(codes(&forgotten), [Code::Unexplained]);
    let behind = explain(&forgotten, None, 4);
    assert_eq!(
        behind[0].sentence,
        "nothing is wrong: the workers of queue default are at other work (4 blocks and tasks), 7 rows are left"
    );
    // Free blocks that are never due, and nothing else: not even then.
    let nothing = BatchFacts { blocks_owned: 0, carved: 10, ..facts() };
    assert_eq!(codes(&nothing), [Code::Unexplained]);
}

#[test]
fn a_block_of_a_silent_worker_is_named() {
    let silent = BatchFacts { blocks_silent: 1, silent_worker: Some("w-1".into()), carved: 10, ..facts() };
    let reasons = explain(&silent, None, 0);
    assert_eq!(reasons.len(), 1);
    assert!(reasons[0].sentence.starts_with("1 block of the batch is held by worker w-1"), "{reasons:?}");
    let beside = BatchFacts { blocks_owned: 2, ..silent };
    assert_eq!(codes(&beside), [Code::OwnerSilent, Code::Moving]);
}

#[test]
fn a_budget_counts_what_was_forgiven() {
    let spent = BatchFacts { open: false, on_budget: Some("hold".into()), failed: 5, allowed: 2, ..facts() };
    assert_eq!(codes(&spent), [Code::Budget, Code::Failing]);
    let forgiven = BatchFacts { forgiven: 5, ..spent };
    assert_eq!(codes(&forgiven), [Code::Held, Code::Failing], "an operator held it after the release");
    let again = explain(&BatchFacts { failed: 6, ..forgiven }, None, 0);
    let sentence =
        "batch 7 was held because 6 rows failed and 2 are allowed and 5 were forgiven when it was released";
    assert_eq!(again[0].sentence, sentence);
}

#[test]
fn a_batch_whose_lines_do_not_add_up_is_named_with_its_lines() {
    let over = BatchFacts { over: true, blocks_owned: 0, carved: 10, quiet: 9.0, ..facts() };
    let found = |missing: Lines, doubled| {
        let audit = Audit::Unbalanced(Unbalanced { id: 7, missing, doubled, outside: 0 });
        explain(&over, Some(Over::Audited { audit, uploading: false }), 0)
    };
    let missing = found([2, 4, 5, 6, 9].into_iter().collect(), 0);
    assert_eq!(missing.len(), 1);
    let sentence = "batch 7 has nothing left to run, but of 5 rows nothing is recorded: lines 2, 4 to 6, 9";
    assert_eq!((missing[0].code, &*missing[0].sentence), (Code::Unbalanced, sentence));
    assert!(missing[0].what_to_do.as_deref().unwrap().contains("the sweep lets them run again"));
    let doubled = found(Lines::new(), 2);
    assert!(doubled[0].sentence.contains("2 are recorded more than once"), "{doubled:?}");
    assert!(doubled[0].what_to_do.as_deref().unwrap().contains("musterd.audit(7)"), "{doubled:?}");
}

#[test]
fn the_end_of_a_batch_is_explained_by_what_it_waits_for() {
    let over = BatchFacts { over: true, blocks_owned: 0, carved: 10, quiet: 9.0, ..facts() };
    let code = |facts: &BatchFacts, over: Over| explain(facts, Some(over), 0)[0].code;
    let audited = |audit, uploading| Over::Audited { audit, uploading };
    assert_eq!(code(&over, Over::JustNow), Code::Ending);
    assert_eq!(code(&over, audited(Audit::Balanced, false)), Code::Ending);
    assert_eq!(code(&over, audited(Audit::TimedOut, false)), Code::Auditing);
    let files = BatchFacts { outputs: true, ..over };
    assert_eq!(code(&files, audited(Audit::Balanced, true)), Code::Uploading);
    assert_eq!(code(&files, audited(Audit::Balanced, false)), Code::OutputsMissing);
}

#[test]
fn rows_that_must_run_alone_are_named_beside_what_goes_on() {
    let facts = BatchFacts { solo: 1, blocks_due: 1, blocks_owned: 0, carved: 10, done: 9, ..facts() };
    let reasons = explain(&facts, None, 4);
    let codes: Vec<Code> = reasons.iter().map(|reason| reason.code).collect();
    assert_eq!(codes, [Code::Alone, Code::Moving]);
    assert!(reasons[0].sentence.starts_with("1 row must run alone"), "{}", reasons[0].sentence);
}
