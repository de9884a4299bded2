//! Every function and table of the schema has its place: a new one fails here until it was decided who may use it.

use std::collections::{BTreeMap, BTreeSet};

use tokio_postgres::Client;

use crate::suite::support::database::TestDb;

/// They compute, or read only what the caller submitted: for every role.
const EVERYONE: &str = "allowed_failures batch_errors batch_redrives batch_row batch_rows caller canary_limit canary_size check_batch check_keep check_key check_limits check_name check_task count_lines \
    describe_error error_group_name error_group_of errors has_failed_siblings has_pending_children id_set is_alive is_final is_name is_open is_server_trouble is_unfinished \
    line_set lines_of redrive_preview row_array row_texts shown_state task_ids";
/// They only look: for everyone who may read all.
const READERS: &str = "acts_as audit batch_has_work_now begun_parent children_by_state chunks_of data_is_gone failed_now focus has_work_now is_about_to_end may_see prune_plan retention_of rows_priority \
    shortest_retention steers_all task_at";
/// They submit, as SECURITY DEFINER.
const PRODUCERS: &str = "append_rows enqueue enqueue_after enqueue_many set_result spawn submit_batch";
/// They steer: operators everything, producers what they submitted.
const STEERING: &str = "abort canary hold hold_data redrive release release_data";
/// They steer what is not a producer's.
const OPERATORS: &str = "pause_queue resume_queue retry_task";
/// They change tables, or hand out tokens: for workers.
const WORKERS: &str = "abort_abandoned abort_batch abort_children abort_task add_task add_tasks_by_key append_texts begin_prune_pass check_budget check_isolation check_submitter \
    claim_solo_task claim_sql_task claim_tasks claimed_tasks clean_session complete_batch complete_or_ask complete_parent complete_parent_if_ready \
    complete_scope complete_scopes count_errors cut_chunks declare_retention describe_task drop_free_blocks due_at due_batches end_task enforce_no_grandchildren extend_batch fail_attempt failed_lines \
    fill_in_task find_append find_by_idempotency_key find_many_by_idempotency_key finish_batch finish_canary finish_own_tasks finish_parent finish_tasks first_waiting_parent \
    free_claims grow_batch heal_batch issue_first_tickets issue_tickets join_pending keep_data lock_for_append lock_for_outcomes lock_task lock_ticket \
    make_ready open_batch open_rest outputs_gone pass_by_locked process_queue process_tasks prune_batch prune_bodies prune_events prune_records prune_rows prune_tasks \
    ready_heads record_death record_event record_prune record_steering record_unbalanced \
    register_command reissue_ticket release_batch release_uncles remember_append reopen_failed_lines reopen_lines report_canary reserve_batch_id run_task runs_under \
    start_ready_uncles suspect_ticket sweep_tickets sweep_uncles take_tickets tell_ended tell_states wake_structured with_children";
/// They grant.
const OWNER: &str = "grant_functions grant_reading grant_roles make_role";

/// Workers write them; operators and observers read.
const TABLES: &str = "appends batches chunks commands failures failures_history queues rate_limits retention retention_rules task_records task_tickets task_waits";
/// The same, but for a column that is the workers' own.
const WITH_SECRETS: &str = "blocks outcomes task_claims workers";
/// Only migrations, or functions, write them.
const FIXED: &str = "events schema_compat schema_history";
const VIEWS: &str = "batch_progress batches_over batches_to_prune canaries_over output_texts parents_aborting parents_over recorded_lines results rows tasks trees_to_prune uncles_ready";
/// For producers, too.
const OWN: &str = "my_batches my_tasks paused_queues";

const ROLES: [&str; 4] = ["musterd_observer", "musterd_operator", "musterd_producer", "musterd_worker"];

/// By name: what each role may do, `sql` giving a name and a word for each role.
async fn found(client: &Client, sql: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in client.query(sql, &[]).await.unwrap() {
        found.entry(row.get(0)).or_default().insert(row.get(1));
    }
    found
}

/// Asserts that `found` is what was decided, name by name.
fn agrees(what: &str, found: &BTreeMap<String, BTreeSet<String>>, decided: &[(&str, &str)]) {
    let decided: BTreeMap<&str, &str> = decided
        .iter()
        .flat_map(|(names, rights)| names.split_whitespace().map(move |name| (name, *rights)))
        .collect();
    for (name, rights) in found {
        let expected =
            decided.get(name.as_str()).unwrap_or_else(|| panic!("decide who may use the {what} {name}"));
        assert_eq!(
            rights,
            &BTreeSet::from([(*expected).to_owned()]),
            "{what} {name}: every form has the same rights"
        );
    }
    let gone: Vec<_> = decided.keys().filter(|name| !found.contains_key(**name)).collect();
    assert!(gone.is_empty(), "no such {what} any more: {gone:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_function_has_its_callers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let may = ROLES
        .map(|role| format!("has_function_privilege('{role}', p.oid, 'EXECUTE')::int"))
        .join(" || '' || ");
    let sql = format!(
        "SELECT p.proname::text, {may} FROM pg_proc p WHERE p.pronamespace = 'musterd'::regnamespace"
    );
    let decided = [
        (EVERYONE, "1111"),
        (READERS, "1101"),
        (STEERING, "0111"),
        (PRODUCERS, "0011"),
        (OPERATORS, "0101"),
        (WORKERS, "0001"),
        (OWNER, "0000"),
    ];
    agrees("function", &found(&client, &sql).await, &decided);
    // A role that has none of the four may call nothing, trigger functions included.
    let stranger = "SELECT count(*) FROM pg_proc p WHERE p.pronamespace = 'musterd'::regnamespace
                      AND has_function_privilege('pg_monitor', p.oid, 'EXECUTE')";
    assert_eq!(client.query_one(stranger, &[]).await.unwrap().get::<_, i64>(0), 0);
    // A function that runs with its owner's rights finds nothing but what it names.
    let open = "SELECT count(*) FROM pg_proc p WHERE p.pronamespace = 'musterd'::regnamespace AND p.prosecdef
                   AND NOT coalesce(p.proconfig, '{}') @> ARRAY['search_path=pg_catalog, pg_temp']";
    assert_eq!(client.query_one(open, &[]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_has_its_readers_and_writers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Read, insert, update, delete, truncate.
    let rights = |role: &str| {
        ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE"]
            .map(|right| format!("has_table_privilege('{role}', c.oid, '{right}')::int"))
            .join(" || '' || ")
    };
    let may = ROLES.map(rights).join(" || ' ' || ");
    let sql = format!(
        "SELECT c.relname::text, {may} FROM pg_class c WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"
    );
    let read = "10000 10000 00000 10000";
    let decided = [
        (TABLES, "10000 10000 00000 11110"),
        (WITH_SECRETS, "00000 00000 00000 11110"),
        (FIXED, read),
        (VIEWS, read),
        (OWN, "10000 10000 10000 10000"),
    ];
    agrees("table", &found(&client, &sql).await, &decided);
    let secrets =
        "SELECT string_agg(DISTINCT r || ' ' || c.relname || '.' || a.attname, ', ') FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
       CROSS JOIN unnest(ARRAY['musterd_observer', 'musterd_operator', 'musterd_producer']) r
       WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind IN ('r', 'v')
         AND a.attname IN ('token', 'lock_key') AND has_column_privilege(r, c.oid, a.attnum, 'SELECT')";
    assert_eq!(client.query_one(secrets, &[]).await.unwrap().get::<_, Option<String>>(0), None);
    let columns = "SELECT string_agg(a.attname, ' ' ORDER BY a.attname) FROM pg_attribute a
        WHERE a.attrelid = 'musterd.tasks'::regclass AND a.attnum > 0 AND has_column_privilege('musterd_producer', a.attrelid, a.attnum, 'INSERT')";
    let inserted: String = client.query_one(columns, &[]).await.unwrap().get(0);
    assert_eq!(
        inserted,
        "command dedup_key idempotency_key max_attempts on_child_failure payload priority queue run_at timeout traceparent"
    );
    let sequences = "SELECT count(*) FROM pg_class c, unnest(ARRAY['musterd_observer', 'musterd_operator', 'musterd_producer', 'pg_monitor']) r
        WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind = 'S' AND has_sequence_privilege(r, c.oid, 'USAGE, SELECT, UPDATE')";
    assert_eq!(client.query_one(sequences, &[]).await.unwrap().get::<_, i64>(0), 0);
}
