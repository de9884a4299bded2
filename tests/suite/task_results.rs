//! What a procedure stores as the result of its task, and how the children of a task are counted.

use serde_json::json as value;
use tokio_postgres::Client;

use crate::suite::support::config::json;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::refusal;
use crate::suite::support::tasks::{
    QUICK, RUNNING_PROCEDURES, SOON, becomes, end_of, field, number, text, texts,
};
use crate::suite::support::wait::within;

const PROCEDURES: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.gate (open boolean);
    CREATE PROCEDURE app.answer(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM musterd.set_result('\"a first thought\"');
        PERFORM musterd.set_result(jsonb_build_object('task', current_setting('musterd.task_id')::bigint, 'nothing', null));
    END $$;
    CREATE PROCEDURE app.silent(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM musterd.set_result('1');
        PERFORM musterd.set_result(NULL);
    END $$;
    CREATE PROCEDURE app.failing(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM musterd.set_result('\"never\"');
        RAISE EXCEPTION 'after all not';
    END $$;
    CREATE PROCEDURE app.gated(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM musterd.set_result('\"soon\"');
        PERFORM pg_advisory_xact_lock_shared(7);
    END $$;
    CREATE PROCEDURE app.large(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM musterd.set_result(to_jsonb(repeat('x', 1048577)));
    END $$;
    SELECT musterd.register_command(name, 'default', 'sql', 'app.' || name)
      FROM unnest(ARRAY['answer', 'silent', 'failing', 'gated', 'large']) name";

fn config() -> String {
    let handler = |name: &str| format!("[handlers.{name}]\nkind = \"sql\"\nprocedure = \"app.{name}\"\n");
    let handlers: String =
        ["answer", "silent", "failing", "gated", "large"].into_iter().map(handler).collect();
    format!("{QUICK}{handlers}")
}

async fn with_procedures() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURES).await.unwrap();
    (db, client)
}

async fn enqueue(client: &Client, arguments: &str) -> i64 {
    number(client, &format!("SELECT musterd.enqueue({arguments})")).await
}

const RIGHT: &str = "SELECT count(*) FROM musterd.tasks WHERE command = 'answer' AND state = 'succeeded'
    AND result = jsonb_build_object('task', id, 'nothing', null)";

#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_tasks_has_its_own_result() {
    let (db, client) = with_procedures().await;
    // Enough at once for a worker to run them in common transactions.
    let many = "SELECT count(*) FROM musterd.enqueue_many('answer', array_fill('{}'::jsonb, ARRAY[300]))";
    assert_eq!(number(&client, many).await, 300);
    let silent = enqueue(&client, "'silent'").await;
    let failing = enqueue(&client, "'failing', max_attempts => 1").await;
    let large = enqueue(&client, "'large', max_attempts => 1").await;
    let _daemon = Daemon::builder(&db, &config()).start();
    becomes(&client, RIGHT, "300").await;
    assert_eq!(end_of(&client, silent).await, "succeeded");
    assert_eq!(field(&client, silent, "result IS NULL").await, "t");
    assert_eq!(end_of(&client, failing).await, "failed");
    assert_eq!(field(&client, failing, "result IS NULL").await, "t", "an attempt that failed has no result");
    assert_eq!(end_of(&client, large).await, "failed");
    assert!(field(&client, large, "error").await.contains("at most 1 MiB"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_daemon_it_is_the_same() {
    let (_db, client) = with_procedures().await;
    let two = "SELECT musterd.enqueue('answer'), musterd.enqueue('answer')";
    client.batch_execute(two).await.unwrap();
    let failing = enqueue(&client, "'failing', max_attempts => 1").await;
    client.batch_execute("CALL musterd.process_tasks()").await.unwrap();
    assert_eq!(number(&client, RIGHT).await, 2);
    assert_eq!(field(&client, failing, "state, result IS NULL").await, "failed|t");
    assert_eq!(text(&client, "SELECT COALESCE(current_setting('musterd.task_id', true), '')").await, "");
    // Nothing that a caller sets makes it a task's procedure.
    let task = enqueue(&client, "'answer'").await;
    for claim in ["", &format!("SET musterd.task_id = '{task}'"), "SET musterd.task_token = 'x'"] {
        client.batch_execute(claim).await.unwrap();
        let said = refusal(&client, "SELECT musterd.set_result('1')").await;
        assert!(said.contains("outside of a task's procedure"), "{claim}: {said}");
    }
    let _ = texts(&client, "RESET ALL").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_does_not_wait_for_a_procedure_that_has_stored_a_result() {
    let (db, client) = with_procedures().await;
    let (gate, _connection) = connect(db.url()).await;
    gate.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
    let _daemon = Daemon::builder(&db, &config()).start();
    let task = enqueue(&client, "'gated'").await;
    becomes(&client, RUNNING_PROCEDURES, "1").await;
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    becomes(&client, waits, "1").await;
    client.batch_execute("SET lock_timeout = '5s'").await.unwrap();
    let abort = format!("SELECT musterd.abort({task})");
    assert_eq!(within(SOON, text(&client, &abort)).await, "aborted");
    assert_eq!(field(&client, task, "result IS NULL").await, "t");
}

#[tokio::test(flavor = "multi_thread")]
async fn children_are_counted_by_state() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, QUICK).start();
    let family = "BEGIN; SELECT musterd.enqueue('echo', '{}', delay => interval '1 hour');
        SELECT musterd.spawn('noop', '{}', currval('musterd.task_records_id_seq')); COMMIT";
    client.batch_execute(family).await.unwrap();
    let parent = number(&client, "SELECT id FROM musterd.tasks WHERE parent_id IS NULL").await;
    let more = format!(
        "SELECT musterd.spawn('fail', '{{}}', {parent}), musterd.spawn('noop', '{{}}', {parent}), musterd.spawn('unknown', '{{}}', {parent})"
    );
    client.batch_execute(&more).await.unwrap();
    let counted = format!(
        "SELECT musterd.children_by_state({parent}) ->> 'queued', (SELECT count(*) FROM musterd.tasks WHERE parent_id = {parent} AND state IN ('succeeded', 'failed'))"
    );
    becomes(&client, &counted, "1|3").await;
    let shown = json(&daemon.config().musterd(&["task", "show", &parent.to_string(), "--json"]).await);
    assert_eq!(shown["children_by_state"], value!({"failed": 1, "queued": 1, "succeeded": 2}));
    assert_eq!((&shown["children"], &shown["open_children"]), (&value!(4), &value!(1)));
    assert_eq!(text(&client, "SELECT musterd.children_by_state(0)").await, "{}");
}
