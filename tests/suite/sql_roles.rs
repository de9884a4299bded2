//! What each role may do, and what it may not.

use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::{refusal, value};

const BATCH: &str = "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)";

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_submits_and_steers_and_touches_no_table() {
    let db = TestDb::new().await;
    let login = db.login("musterd_producer").await;
    let (client, _connection) = connect(&login.url).await;
    client.batch_execute("INSERT INTO musterd.tasks (command, payload) VALUES ('a', '{}')").await.unwrap();
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
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.batch_progress").await, "2");
    for forbidden in [
        "INSERT INTO musterd.tasks (command, state) VALUES ('a', 'succeeded')",
        "INSERT INTO musterd.tasks (command, parent_id) VALUES ('a', 1)",
        "UPDATE musterd.tasks SET state = 'queued'",
        "DELETE FROM musterd.chunks",
        "INSERT INTO musterd.failures (batch_id, line, generation, attempt, error) VALUES (1, 1, 1, 1, 'no')",
        "SELECT musterd.complete_scope(1)",
        "SELECT musterd.register_command('evil', 'q', 'sql', 'x')",
        "SELECT musterd.pause_queue('default')",
        "CALL musterd.process_tasks()",
        "SELECT musterd.grant_roles()",
    ] {
        let said = refusal(&client, forbidden).await;
        assert!(said.starts_with("42501"), "{forbidden}: {said}");
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
