//! The sessions of `sql` handlers go back to the pool clean: nothing that a procedure or a function leaves in one meets the
//! next call, and the session itself is used again.

use serde_json::json;
use tokio_postgres::Client;

use crate::suite::support::config::is_pooled;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::pgbouncer::PgBouncer;
use crate::suite::support::tasks::{QUICK, becomes, end_of, field, number, text, texts};
use crate::suite::support::worker;

/// Everything that a session can be left with, and a look at it.
const PROCEDURES: &str = "
    CREATE SCHEMA app;
    CREATE SCHEMA evil;
    CREATE TABLE app.seen (pid int, path text, found text[]);
    CREATE FUNCTION app.leave() RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        CREATE TEMP TABLE scratch (n int);
        PERFORM set_config('search_path', 'evil, app, public', false), set_config('app.secret', 'x', false);
        PERFORM pg_advisory_lock(4711), setval('app.numbers', 5), nextval('app.numbers');
        EXECUTE 'LISTEN strangers';
        EXECUTE 'PREPARE \"Left Over\" AS SELECT 1';
        EXECUTE 'DECLARE kept CURSOR WITH HOLD FOR SELECT 1';
    END $$;
    CREATE SEQUENCE app.numbers;
    CREATE FUNCTION app.look() RETURNS void LANGUAGE plpgsql AS $$
    DECLARE v_found text[] := '{}';
    BEGIN
        IF to_regclass('pg_temp.scratch') IS NOT NULL THEN v_found := v_found || text 'table'; END IF;
        IF NULLIF(current_setting('app.secret', true), '') IS NOT NULL THEN v_found := v_found || text 'setting'; END IF;
        IF EXISTS (SELECT FROM pg_listening_channels()) THEN v_found := v_found || text 'channel'; END IF;
        IF EXISTS (SELECT FROM pg_prepared_statements WHERE from_sql) THEN v_found := v_found || text 'statement'; END IF;
        IF EXISTS (SELECT FROM pg_cursors WHERE is_holdable) THEN v_found := v_found || text 'cursor'; END IF;
        IF EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) THEN
            v_found := v_found || text 'lock';
        END IF;
        BEGIN
            -- Not lastval(): the sequence may be one that the worker used itself in a session of a pooler.
            PERFORM currval('app.numbers');
            v_found := v_found || text 'sequence';
        EXCEPTION WHEN object_not_in_prerequisite_state THEN
            NULL;
        END;
        INSERT INTO app.seen VALUES (pg_backend_pid(), current_setting('search_path'), v_found);
    END $$;
    CREATE PROCEDURE app.leaving(bigint, jsonb) LANGUAGE sql AS $$ SELECT app.leave() $$;
    CREATE PROCEDURE app.looking(bigint, jsonb) LANGUAGE sql AS $$ SELECT app.look() $$;
    CREATE FUNCTION app.rows_leaving(batch bigint, context jsonb, rows jsonb)
    RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM app.look();
        PERFORM app.leave();
        RETURN QUERY SELECT r.line, 'succeeded', NULL::jsonb, NULL FROM jsonb_to_recordset(rows) AS r (line int);
    END $$;";

const HANDLERS: &str = "[queues.default]\nfibers = 1
    [handlers.leaving]\nkind = \"sql\"\nprocedure = \"app.leaving\"
    [handlers.looking]\nkind = \"sql\"\nprocedure = \"app.looking\"
    [handlers.rows]\nkind = \"sql\"\nfunction = \"app.rows_leaving\"\nblock_size = 1\n";

async fn with_procedures() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURES).await.unwrap();
    (db, client)
}

async fn runs(client: &Client, command: &str) {
    let id = number(client, &format!("SELECT musterd.enqueue('{command}', max_attempts => 1)")).await;
    assert_eq!(end_of(client, id).await, "succeeded", "{}", field(client, id, "error").await);
}

const ADVISORY_LOCKS: &str = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
     WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objid = 4711";

/// The one session of the handlers served every call. A pooler gives each transaction any session it has.
async fn is_used_again(client: &Client) {
    if !is_pooled() {
        assert_eq!(number(client, "SELECT count(DISTINCT pid) FROM app.seen").await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_procedure_leaves_in_its_session_meets_the_next_one() {
    let (db, client) = with_procedures().await;
    let one = "[database]\nsql_connections = 1\n";
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLERS}{one}")).start();
    for _ in 0..3 {
        runs(&client, "leaving").await;
        // Also while no task runs.
        becomes(&client, ADVISORY_LOCKS, "0").await;
        runs(&client, "looking").await;
    }
    assert_eq!(text(&client, "SELECT DISTINCT path, found FROM app.seen").await, "\"$user\", public|{}");
    is_used_again(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_function_over_rows_leaves_in_its_session_meets_the_next_call() {
    let (db, client) = with_procedures().await;
    let one = "[database]\nsql_connections = 1\n";
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLERS}{one}")).start();
    let rows: Vec<_> = (0..4).map(|n| json!(n)).collect();
    let submit = "SELECT musterd.submit_batch('rows', ARRAY (SELECT jsonb_array_elements($1)))";
    let batch: i64 = client.query_one(submit, &[&json!(rows)]).await.unwrap().get(0);
    let end = worker::end_of(&client, batch).await;
    let errors = texts(&client, "SELECT DISTINCT error FROM musterd.failures").await;
    assert_eq!(end, ("succeeded".into(), 4, 0, 0), "{errors:?}");
    becomes(&client, ADVISORY_LOCKS, "0").await;
    runs(&client, "looking").await;
    let seen = texts(&client, "SELECT count(*), path, found FROM app.seen GROUP BY 2, 3").await;
    assert_eq!(seen, ["5|\"$user\", public|{}"]);
    is_used_again(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_nothing_is_left_to_other_applications() {
    if !has("pgbouncer") {
        return;
    }
    let (db, client) = with_procedures().await;
    let pooler = PgBouncer::start("default_pool_size = 1\n");
    let through = format!("[database]\nurl = {:?}\ndirect_url = {:?}\n", pooler.url(&db), db.url());
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLERS}{through}")).start();
    for _ in 0..3 {
        runs(&client, "leaving").await;
        becomes(&client, ADVISORY_LOCKS, "0").await;
        runs(&client, "looking").await;
    }
    assert_eq!(text(&client, "SELECT DISTINCT path, found FROM app.seen").await, "\"$user\", public|{}");
}
