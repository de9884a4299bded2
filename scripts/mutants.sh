#!/bin/sh
# Takes one mechanism after another out of the program, or out of the schema, and sees a test notice: a table of mutant, what caught it,
# and seconds. Fails if one survives, and if a test fails without any mutant, for then its verdict says nothing.
# With names it does only those: scripts/mutants.sh no_sweep no_lease
set -eu

cd "$(dirname "$0")/.."
LIMIT=300
REPORT=target/tmp/mutants

# Every mutant and the tests of which one must fail. The mechanisms are in src/failpoint/mutants.rs and tests/suite/support/mutants.rs.
catchers() {
    cat <<'TABLE'
no_token_guard suite::schedules_flush::a_zombie_writes_nothing
no_done_guard suite::schedules_parts::
no_applied suite::schedules_parts::a_part_that_is_repeated_after_a_lost_reply_is_known
no_part_key suite::schedules_parts::a_part_that_is_used_for_other_lines_is_an_error
drop_failed_flush suite::writes_trouble::
untrack_first suite::meanwhile::a_block_is_held_until_its_flush_is_committed
no_advisory_lock suite::task_schedules::two_who_look_after_the_last_child_end_the_parent_once
no_dirty_bit suite::meanwhile::a_check_that_is_asked_for_during_a_check_is_made
no_set_equation suite::broken_ledger::
no_parent_lock suite::sql_races::a_child_and_the_end_of_its_parent_exclude_each_other
no_ticket_guard suite::task_schedules::an_outcome_of_a_claim_that_a_new_ticket_voids_is_refused
recover_the_living suite::zombie:: suite::dead::
no_postgres_witness suite::redis::an_emptied_restarted_or_spoilt_redis_makes_nobody_steal
redis_only_witness suite::dead::what_was_left_by_workers_long_gone_is_recovered_at_the_first_start
no_lease suite::alive::a_worker_that_cannot_renew_starts_nothing_until_it_can
no_reconcile suite::reconcile::
no_sweep suite::walk_crash::the_sweep_of_a_living_worker_ends_a_batch_that_was_missed
heartbeat_first suite::drain::a_worker_that_drains_is_left_in_peace
TABLE
}

suite() { timeout "$LIMIT" "$SUITE" "$@" >"$REPORT/log" 2>&1; }

wanted() { [ -z "$NAMES" ] || case " $NAMES " in *" $1 "*) ;; *) return 1 ;; esac }

NAMES=$*
mkdir -p "$REPORT"
SUITE=$(cargo test --locked --all-features --no-run --test suite 2>&1 | sed -n 's/.*(\(.*suite-[0-9a-f]*\))$/\1/p')
[ -x "$SUITE" ] || { echo "mutants: the suite cannot be built" >&2; exit 2; }

filters=$(catchers | while read -r mutant tests; do if wanted "$mutant"; then printf '%s ' "$tests"; fi; done)
# shellcheck disable=SC2086 # words are filters
LIMIT=1200 suite $filters || { tail -n 40 "$REPORT/log"; echo "mutants: a test fails without any mutant" >&2; exit 1; }

survivors=0
printf '| %-20s | %-88s | %7s |\n' mutant 'caught by' seconds
printf '|%s|%s|%s:|\n' "$(printf '%22s' '' | tr ' ' -)" "$(printf '%90s' '' | tr ' ' -)" "$(printf '%8s' '' | tr ' ' -)"
catchers >"$REPORT/catchers"
while read -r mutant tests <&3; do
    wanted "$mutant" || continue
    began=$(date +%s)
    status=0
    # shellcheck disable=SC2086 # words are filters
    MUSTERD_MUTANT=$mutant suite $tests || status=$?
    took=$(($(date +%s) - began))
    caught=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$REPORT/log" | head -n 1)
    case $status in
        0) caught='NOTHING: it survives' survivors=$((survivors + 1)) ;;
        124) caught="a test that does not end within $LIMIT s" ;;
        *) [ -n "$caught" ] || { cat "$REPORT/log" >&2; echo "mutants: the suite did not run with $mutant" >&2; exit 1; } ;;
    esac
    printf '| %-20s | %-88s | %7s |\n' "$mutant" "$caught" "$took"
done 3<"$REPORT/catchers"
[ "$survivors" = 0 ] || { echo "mutants: $survivors survive" >&2; exit 1; }
