//! What each role may do, and what it may not.

use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::{refusal, value};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

const BATCH: &str = "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)";

/// The session of a user of its own with the rights of a role.
async fn session(db: &TestDb, role: &str) -> (Client, JoinHandle<()>) {
    connect(&db.login(role).await.url).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_submits_steers_and_reads_its_own_and_touches_no_table() {
    let db = TestDb::new().await;
    let (client, _connection) = session(&db, "musterd_producer").await;
    value(&client, "INSERT INTO musterd.tasks (command, payload) VALUES ('a', '{}') RETURNING id").await;
    let task = value(&client, "SELECT musterd.enqueue('b')").await;
    value(&client, "SELECT musterd.submit_batch('work', '[]'::jsonb)").await;
    let batch = value(&client, BATCH).await;
    let steer = format!(
        "SELECT musterd.append_rows({batch}, '[3]'::jsonb), musterd.hold({batch}), musterd.release({batch}), musterd.abort({batch})"
    );
    assert_eq!(value(&client, &steer).await, "3|held|running|aborting");
    let more = format!(
        "SELECT musterd.spawn('c', '{{}}', {task}) > 0, musterd.enqueue_after('d', '{{}}', ARRAY[{task}]) > 0,
                musterd.has_pending_children({task}), musterd.has_failed_siblings({task})"
    );
    assert_eq!(value(&client, &more).await, "t|t|t|f");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.my_batches").await, "2");
    let commands = "SELECT string_agg(command, ' ' ORDER BY id) FROM musterd.my_tasks";
    assert_eq!(value(&client, commands).await, "a b work work c d");
    assert_eq!(value(&client, &format!("SELECT count(*) FROM musterd.batch_rows({batch})")).await, "3");
    for forbidden in [
        "INSERT INTO musterd.task_records (command, state) VALUES ('a', 'succeeded')",
        "INSERT INTO musterd.tasks (command, parent_id) VALUES ('a', 1)",
        "INSERT INTO musterd.tasks (command, submitted_by) VALUES ('a', 'another')",
        "UPDATE musterd.task_records SET state = 'queued'",
        "DELETE FROM musterd.chunks",
        "INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error) VALUES (1, 1, 1, 1, 1, 'no')",
        "SELECT payload FROM musterd.tasks",
        "SELECT count(*) FROM musterd.batch_progress",
        "SELECT count(*) FROM musterd.results",
        "SELECT count(*) FROM musterd.task_claims",
        "SELECT count(*) FROM musterd.events",
        "SELECT musterd.claimed_tasks(NULL)",
        "SELECT musterd.complete_scope(1)",
        "SELECT musterd.register_command('evil', 'q', 'sql', 'x')",
        "SELECT musterd.pause_queue('default')",
        "SELECT musterd.retry_task(1)",
        "SELECT musterd.record_event('abort')",
        "CALL musterd.process_tasks()",
        "SELECT musterd.grant_roles()",
    ] {
        let said = refusal(&client, forbidden).await;
        assert!(said.starts_with("42501"), "{forbidden}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_submitted_a_producer_can_neither_steer_nor_join_nor_see() {
    let db = TestDb::new().await;
    let (one, _connection) = session(&db, "musterd_producer").await;
    let task = value(&one, "SELECT musterd.enqueue('pay', '{\"iban\": 1}', dedup_key => 'k')").await;
    let batch = value(&one, BATCH).await;
    let child = value(&one, &format!("SELECT musterd.spawn('c', '{{}}', {task})")).await;
    let (other, _connection) = session(&db, "musterd_producer").await;
    for forbidden in [
        format!("SELECT musterd.hold({batch})"),
        format!("SELECT musterd.release({batch})"),
        format!("SELECT musterd.abort({batch})"),
        format!("SELECT musterd.abort({task})"),
        format!("SELECT musterd.abort({child})"),
        format!("SELECT state FROM musterd.redrive({batch})"),
        format!("SELECT musterd.append_rows({batch}, '[3]'::jsonb)"),
        format!("SELECT musterd.spawn('c', '{{}}', {task})"),
        format!("SELECT musterd.submit_batch('work', '[1]'::jsonb, parent_id => {task})"),
        format!("SELECT musterd.enqueue_after('d', '{{}}', ARRAY[{task}])"),
        "SELECT musterd.enqueue('pay', '{\"iban\": 2}', dedup_key => 'k', dedup_replace => true)".to_owned(),
    ] {
        let said = refusal(&other, &forbidden).await;
        assert!(said.starts_with("42501") && said.contains("was not submitted by"), "{forbidden}: {said}");
    }
    // Functions and operators of its own, cheap and first in its search_path, are shown nothing either.
    let owner = db.client().await;
    let spy = "CREATE SCHEMA spy; GRANT ALL ON SCHEMA spy TO PUBLIC";
    owner.batch_execute(spy).await.unwrap();
    let spies = "SET search_path = spy, pg_catalog;
        CREATE FUNCTION spy.seen(jsonb) RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS $$ BEGIN RAISE EXCEPTION 'seen %', $1; END $$;
        CREATE FUNCTION spy.always(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
        CREATE OPERATOR spy.= (leftarg = text, rightarg = text, function = spy.always)";
    other.batch_execute(spies).await.unwrap();
    assert_eq!(value(&other, "SELECT count(*) FROM musterd.my_tasks WHERE spy.seen(payload)").await, "0");
    assert_eq!(value(&other, "SELECT count(*) FROM musterd.my_batches").await, "0");
    assert_eq!(value(&other, &format!("SELECT count(*) FROM musterd.batch_rows({batch})")).await, "0");
    assert_eq!(
        value(&owner, &format!("SELECT payload FROM musterd.tasks WHERE id = {task}")).await,
        "{\"iban\": 1}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_handlers_and_ends_add_belongs_to_the_producer() {
    let db = TestDb::new().await;
    let (client, _connection) = session(&db, "musterd_producer").await;
    let parent = value(&client, "SELECT musterd.enqueue('p')").await;
    value(&client, "SELECT musterd.submit_batch('work', '[]'::jsonb, on_done => 'told')").await;
    // By a worker, whose login is another.
    let (worker, _connection) = session(&db, "musterd_worker").await;
    value(&worker, &format!("SELECT musterd.spawn('child', '{{}}', {parent})")).await;
    let commands = "SELECT string_agg(command, ' ' ORDER BY id) FROM musterd.my_tasks";
    assert_eq!(value(&client, commands).await, "p work told child");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_was_set_is_the_caller_within_the_functions_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (one, other) = (db.login("musterd_producer").await.name, db.login("musterd_producer").await.name);
    client.batch_execute(&format!("SET ROLE \"{one}\"")).await.unwrap();
    let task = value(&client, "SELECT musterd.enqueue('a')").await;
    client.batch_execute(&format!("SET ROLE \"{other}\"")).await.unwrap();
    assert!(refusal(&client, &format!("SELECT musterd.hold({task})")).await.starts_with("42501"));
    client.batch_execute("RESET ROLE").await.unwrap();
    let by = format!("SELECT submitted_by FROM musterd.tasks WHERE id = {task}");
    assert_eq!(value(&client, &by).await, one);
    assert_eq!(value(&client, &format!("SELECT musterd.hold({task})")).await, "held");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_of_their_command_alone() {
    let db = TestDb::new().await;
    let (client, _connection) = session(&db, "musterd_producer").await;
    let paid = value(&client, "SELECT musterd.enqueue('pay', '{\"iban\": 1}', dedup_key => 'k')").await;
    let other =
        value(&client, "SELECT musterd.enqueue('noop', '{}', dedup_key => 'k', dedup_replace => true)").await;
    assert_ne!(paid, other);
    let payload = format!("SELECT payload FROM musterd.my_tasks WHERE id = {paid}");
    assert_eq!(value(&client, &payload).await, "{\"iban\": 1}");
    let once = |command: &str, payload: &str| {
        format!("SELECT musterd.enqueue('{command}', '{payload}', idempotency_key => 'once')")
    };
    let first = value(&client, &once("pay", "{}")).await;
    assert_ne!(value(&client, &once("noop", "[1]")).await, first);
    assert_eq!(value(&client, &once("pay", "{}")).await, first);
    assert!(refusal(&client, &once("pay", "[1]")).await.starts_with("23505"));
    let batch = "SELECT musterd.submit_batch('work', '[1]'::jsonb, idempotency_key => 'once')";
    let batched = value(&client, batch).await;
    assert_eq!(value(&client, batch).await, batched);
    let many = |command: &str| {
        format!(
            "SELECT min(i) FROM musterd.enqueue_many('{command}', '{{1,2}}'::jsonb[], idempotency_key => 'm') i"
        )
    };
    let first = value(&client, &many("pay")).await;
    assert_ne!(value(&client, &many("noop")).await, first);
    assert_eq!(value(&client, &many("pay")).await, first);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_steers_everything_reads_no_token_and_submits_nothing() {
    let db = TestDb::new().await;
    let (producer, _connection) = session(&db, "musterd_producer").await;
    let batch = value(&producer, BATCH).await;
    let task = value(&producer, "SELECT musterd.enqueue('a')").await;
    let (client, _connection) = session(&db, "musterd_operator").await;
    let steer = format!(
        "SELECT musterd.hold({batch}), musterd.release({batch}), musterd.abort({batch}), musterd.abort({task}), musterd.retry_task({task})"
    );
    assert_eq!(value(&client, &steer).await, "held|running|aborting|aborted|queued");
    client.batch_execute("SELECT musterd.pause_queue('q'), musterd.resume_queue('q')").await.unwrap();
    assert_eq!(value(&client, &format!("SELECT count(*) FROM musterd.batch_rows({batch})")).await, "2");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.tasks").await, "2");
    value(&client, "SELECT count(id), count(state), count(trouble) FROM musterd.workers").await;
    for forbidden in [
        "SELECT musterd.enqueue('b')",
        BATCH,
        "SELECT token FROM musterd.task_claims",
        "SELECT token FROM musterd.blocks",
        "SELECT token FROM musterd.outcomes",
        "SELECT lock_key FROM musterd.workers",
        "SELECT musterd.claimed_tasks(NULL)",
        "UPDATE musterd.queues SET paused = false",
        "SELECT musterd.register_command('evil', 'q', 'sql', 'x')",
        "DELETE FROM musterd.events",
    ] {
        assert!(refusal(&client, forbidden).await.starts_with("42501"), "{forbidden}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_reads_and_does_nothing_else() {
    let db = TestDb::new().await;
    let batch = value(&db.client().await, BATCH).await;
    let login = db.login("musterd_observer").await;
    let (client, _connection) = connect(&login.url).await;
    assert_eq!(value(&client, &format!("SELECT count(*) FROM musterd.batch_rows({batch})")).await, "2");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.blocks").await, "0");
    assert_eq!(value(&client, &format!("SELECT musterd.has_pending_children({batch})")).await, "f");
    for forbidden in [
        "SELECT musterd.enqueue('b')",
        BATCH,
        "SELECT musterd.abort(1)",
        "INSERT INTO musterd.tasks (command) VALUES ('a')",
        "UPDATE musterd.batches SET open = false",
    ] {
        assert!(refusal(&client, forbidden).await.starts_with("42501"), "{forbidden}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_ends_batches_and_grants_nothing() {
    let db = TestDb::new().await;
    let batch = value(&db.client().await, BATCH).await;
    let login = db.login("musterd_worker").await;
    let (client, _connection) = connect(&login.url).await;
    assert_eq!(value(&client, &format!("SELECT musterd.abort({batch})")).await, "aborting");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({batch}, 1, 2, 0, 0)")).await,
        "completed"
    );
    client
        .batch_execute(
            "SELECT musterd.register_command('mine', 'q', 'sql', 'app.x'); CALL musterd.process_tasks()",
        )
        .await
        .unwrap();
    let open = "SELECT musterd.open_batch(musterd.reserve_batch_id(), 'work', p_rows => 3) > 0";
    assert_eq!(value(&client, open).await, "t");
    for forbidden in [
        "SELECT musterd.grant_roles()",
        "SELECT musterd.make_role('x')",
        "DROP TABLE musterd.chunks",
        "TRUNCATE musterd.chunks",
    ] {
        assert!(refusal(&client, forbidden).await.starts_with("42501"), "{forbidden}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_has_nothing() {
    let db = TestDb::new().await;
    let login = db.login("pg_monitor").await;
    let (client, _connection) = connect(&login.url).await;
    for forbidden in ["SELECT musterd.enqueue('b')", "SELECT count(*) FROM musterd.tasks", BATCH] {
        assert!(refusal(&client, forbidden).await.starts_with("42501"), "{forbidden}");
    }
}
