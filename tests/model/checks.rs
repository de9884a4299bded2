//! The checks: what holds with all guards, and that each guard, taken out, breaks the promise it is there for.

use super::{
    guards::Guards,
    promises::{ENDS, Promise},
    reach,
    state::Left,
    walk::{KINDS_OF_STEPS, Walk},
};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::HashSet;

/// Two workers, one block after another, and so much that goes wrong.
const NOTHING_WRONG: Walk = Walk {
    guards: Guards::ALL,
    rows: 2,
    block_size: 2,
    workers: 2,
    looks: 1,
    left: Left { faults: 0, failures: 0, give_backs: 0, appends: 0, redrives: 0, aborts: 0, deletes: 0 },
};

/// Crashes, pauses, broken connections and losses of Redis, with partial flushes of a block of two lines.
fn faults(faults: u8) -> Walk {
    Walk { left: Left { faults, ..NOTHING_WRONG.left }, ..NOTHING_WRONG }
}

/// Two blocks, two completers, an append and a redrive, and one thing that goes wrong.
fn steered() -> Walk {
    let left = Left { faults: 1, failures: 1, appends: 1, redrives: 1, ..NOTHING_WRONG.left };
    Walk { rows: 1, block_size: 1, looks: 2, left, ..NOTHING_WRONG }
}

fn given_back() -> Walk {
    Walk { left: Left { faults: 1, give_backs: 1, ..NOTHING_WRONG.left }, ..NOTHING_WRONG }
}

fn aborted() -> Walk {
    Walk { left: Left { faults: 1, aborts: 1, ..NOTHING_WRONG.left }, looks: 2, ..NOTHING_WRONG }
}

fn deleted_by_hand() -> Walk {
    Walk { left: Left { faults: 1, deletes: 1, ..NOTHING_WRONG.left }, ..NOTHING_WRONG }
}

/// No promise is broken in any order of the steps, the end is reached, and no state is stuck.
fn holds(what: &str, walk: Walk) {
    let checker = walk.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    let reached = reach::all(&walk);
    assert_eq!(reached.stuck, None, "{what}: the batch can never end from here");
    assert_eq!(reached.states, checker.unique_state_count(), "{what}: the two searches differ");
    eprintln!("{what}: {} states", reached.states);
}

#[test]
fn faults_break_no_promise() {
    holds("two faults", faults(2));
    holds("one fault, three workers and three lines", Walk { workers: 3, rows: 3, ..faults(1) });
}

/// Half a minute and more: `cargo test --test model -- --ignored`.
#[test]
#[ignore = "half a minute and more"]
fn more_faults_break_no_promise() {
    holds("three faults", faults(3));
    holds("two faults, three lines", Walk { rows: 3, ..faults(2) });
    holds("two faults, three workers", Walk { workers: 3, ..faults(2) });
}

#[test]
fn appends_and_redrives_break_no_promise() {
    holds("steered", steered());
}

#[test]
fn a_drain_breaks_no_promise() {
    holds("given back", given_back());
}

#[test]
fn an_abort_breaks_no_promise() {
    holds("aborted", aborted());
}

#[test]
fn a_block_that_is_deleted_by_hand_runs_again() {
    holds("deleted by hand", deleted_by_hand());
}

/// A step that is never taken hides what it would break.
#[test]
fn every_kind_of_step_is_taken() {
    let walks = [faults(1), steered(), given_back(), aborted(), deleted_by_hand()];
    let taken: HashSet<_> = walks.iter().flat_map(|walk| reach::all(walk).steps).collect();
    assert_eq!(taken.len(), KINDS_OF_STEPS);
}

/// Without the guard the checker finds a way to break this promise.
fn breaks(walk: Walk, promise: Promise) {
    let name = promise.name();
    let checker =
        walk.checker().threads(2).finish_when(HasDiscoveries::AnyOf([name].into())).spawn_bfs().join();
    let path = checker.discovery(name).unwrap_or_else(|| panic!("{walk:?} does not break: {name}"));
    eprintln!("{name}: broken after {:?}", path.into_actions());
}

/// Without the guard there are states from which the batch can never end.
fn is_stuck(walk: Walk) {
    let reached = reach::all(&walk);
    assert!(reached.stuck.is_some(), "{walk:?}: the batch can end from all of {} states", reached.states);
}

macro_rules! without {
    ($walk:expr, $($guard:ident),+) => {
        Walk { guards: Guards { $($guard: false,)+ ..Guards::ALL }, ..$walk }
    };
}

#[test]
fn without_the_token_a_zombie_writes() {
    breaks(without!(faults(1), token), Promise::CurrentToken);
}

#[test]
fn without_the_subset_guard_a_line_is_recorded_twice() {
    breaks(without!(faults(1), subset), Promise::RecordedOnce);
}

#[test]
fn without_the_part_a_refused_write_is_taken_for_applied() {
    breaks(without!(faults(2), part), Promise::ToldTheTruth);
}

#[test]
fn a_part_with_other_content_is_taken_for_applied() {
    breaks(without!(faults(1), same_content), Promise::ToldTheTruth);
}

#[test]
fn without_the_lease_a_dead_worker_starts_a_line() {
    breaks(without!(faults(1), lease), Promise::DeadStartNothing);
}

#[test]
fn with_redis_as_the_only_witness_the_living_are_declared_dead() {
    breaks(without!(faults(1), second_witness), Promise::LivingStayAlive);
}

#[test]
fn without_the_recovery_guard_the_living_lose_what_they_hold() {
    breaks(without!(faults(2), recovery_token), Promise::OnlyFromTheDead);
}

#[test]
fn without_the_doubtful_tokens_reconcile_frees_what_was_just_claimed() {
    breaks(without!(faults(0), doubtful), Promise::OnlyFromTheDead);
}

#[test]
fn without_the_set_equation_a_batch_ends_without_a_line() {
    breaks(without!(deleted_by_hand(), set_equation), Promise::EndsBalanced);
}

#[test]
fn without_the_guard_of_the_end_a_batch_ends_twice() {
    breaks(without!(steered(), not_ended), Promise::EndsOnce);
}

#[test]
fn without_the_same_rows_a_batch_ends_with_old_counts() {
    breaks(without!(steered(), same_rows), Promise::EndsBalanced);
}

#[test]
fn without_recovery_what_a_dead_worker_held_is_stuck() {
    is_stuck(without!(faults(1), recovery));
}

#[test]
fn without_reconcile_a_claim_whose_reply_was_lost_is_stuck() {
    is_stuck(without!(faults(1), reconcile));
}

#[test]
fn without_the_sweep_a_crash_after_the_last_commit_leaves_a_batch_open() {
    is_stuck(without!(faults(1), sweep));
}

#[test]
fn without_the_sweep_and_without_asking_no_batch_ends() {
    let walk = without!(faults(0), sweep, ask);
    let checker = walk.checker().spawn_bfs().join();
    assert!(checker.discovery(ENDS).is_none());
}

#[test]
fn without_healing_a_line_of_a_deleted_block_is_stuck() {
    is_stuck(without!(deleted_by_hand(), heal));
}
