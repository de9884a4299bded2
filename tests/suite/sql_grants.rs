//! Every function and table of the schema has its place: a new one fails here until it was decided who may use it.

use std::collections::{BTreeMap, BTreeSet};

use tokio_postgres::Client;

use crate::suite::support::database::TestDb;

/// They only look: for everyone who may read.
const READERS: &str = "allowed_failures audit batch_has_work_now batch_row batch_rows check_batch check_key check_limits check_name \
    check_task chunks_of count_lines describe_error due_at failed_now focus has_failed_siblings has_pending_children has_work_now \
    is_alive is_final is_name is_unfinished line_set lines_of row_array row_texts runs_under shown_state";
/// They submit and steer, as SECURITY DEFINER.
const PRODUCERS: &str = "abort append_rows enqueue enqueue_after hold redrive release spawn submit_batch";
/// They change tables, or steer what belongs to operators: for workers, and for the commands that an operator runs as one.
const WORKERS: &str = "abort_batch abort_children abort_task add_task append_texts check_budget claim_sql_task complete_batch \
    complete_or_ask complete_parent complete_parent_if_ready complete_scope complete_scopes cut_chunks describe_task drop_free_blocks \
    end_task enforce_no_grandchildren extend_batch fail_attempt fill_in_task find_by_idempotency_key finish_batch finish_parent \
    finish_tasks first_waiting_parent grow_batch heal_batch join_pending lock_for_append lock_for_outcomes lock_task open_batch \
    pause_queue process_queue process_tasks register_command release_batch release_uncles reopen_failed_lines reopen_lines \
    reserve_batch_id resume_queue retry_task run_task start_ready_uncles sweep_uncles tell_ended wake_queues wake_structured";
/// They grant.
const OWNER: &str = "grant_functions grant_roles make_role";

/// Workers write them, everyone else reads.
const TABLES: &str = "batches blocks chunks commands failures failures_history outcomes queues rate_limits task_waits tasks workers";
/// Only migrations write them.
const FIXED: &str = "schema_compat schema_history";
const VIEWS: &str = "batch_progress batches_over parents_over paused_queues recorded_lines results rows";

const ROLES: [&str; 3] = ["musterd_observer", "musterd_producer", "musterd_worker"];

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
    let decided = [(READERS, "111"), (PRODUCERS, "011"), (WORKERS, "001"), (OWNER, "000")];
    agrees("function", &found(&client, &sql).await, &decided);
    // A role that has none of the three may call nothing, trigger functions included.
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
    let read = "10000 10000 10000";
    let decided = [(TABLES, "10000 10000 11110"), (FIXED, read), (VIEWS, read)];
    agrees("table", &found(&client, &sql).await, &decided);
    let columns = "SELECT string_agg(a.attname, ' ' ORDER BY a.attname) FROM pg_attribute a
        WHERE a.attrelid = 'musterd.tasks'::regclass AND a.attnum > 0 AND has_column_privilege('musterd_producer', a.attrelid, a.attnum, 'INSERT')";
    let inserted: String = client.query_one(columns, &[]).await.unwrap().get(0);
    assert_eq!(
        inserted,
        "command dedup_key idempotency_key max_attempts on_child_failure payload priority queue run_at timeout traceparent"
    );
    let sequences = "SELECT count(*) FROM pg_class c, unnest(ARRAY['musterd_observer', 'musterd_producer', 'pg_monitor']) r
        WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind = 'S' AND has_sequence_privilege(r, c.oid, 'USAGE, SELECT, UPDATE')";
    assert_eq!(client.query_one(sequences, &[]).await.unwrap().get::<_, i64>(0), 0);
}
