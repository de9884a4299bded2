//! The schema `worker`: handlers and tests that were written for the STATBUS worker run as they are.

use serde_json::json as value;
use tokio_postgres::Client;

use crate::suite::support::config::{TestConfig, json, stderr, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::refusal;
use crate::suite::support::tasks::{QUICK, becomes, number, text, texts};

/// As the document has it, to the letter.
const DOCUMENTS_TEST: &str = "
-- Test structured concurrency in pg_regress
BEGIN;

-- Create parent task
INSERT INTO worker.tasks (command, payload)
VALUES ('derive_statistical_unit', '{}');

-- Process to create children
CALL worker.process_tasks(p_queue => 'analytics');

-- Verify parent is waiting
SELECT state FROM worker.tasks WHERE command = 'derive_statistical_unit';
-- Returns: waiting

-- Process children
CALL worker.process_tasks(p_queue => 'analytics');

-- Verify parent completed
SELECT state FROM worker.tasks WHERE command = 'derive_statistical_unit';
-- Returns: completed

ROLLBACK;
";

const HANDLERS: &str = include_str!("../fixtures/structured_concurrency.sql");

/// The queue of the document, and its handlers.
fn config() -> String {
    let handler = |name: &str| {
        format!("[handlers.{name}]\nkind = \"sql\"\nqueue = \"analytics\"\nprocedure = \"app.{name}\"\n")
    };
    let names = ["derive_statistical_unit", "statistical_unit_refresh_batch", "analyze_tables"];
    let handlers: String = names.into_iter().map(handler).collect();
    format!("{QUICK}[queues.analytics]\nmode = \"structured\"\nfibers = 4\n{handlers}")
}

async fn installed() -> (TestDb, TestConfig, Client) {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let output = config.musterd(&["migrate", "--with-worker-schema", "--json"]).await;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(json(&output)["worker_schema"], "installed");
    let client = db.client().await;
    (db, config, client)
}

async fn with_handlers() -> (TestDb, TestConfig, Client) {
    let (db, config, client) = installed().await;
    client.batch_execute(HANDLERS).await.unwrap();
    (db, config, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_test_of_the_document_runs_unchanged() {
    let (_db, _config, client) = with_handlers().await;
    assert_eq!(texts(&client, DOCUMENTS_TEST).await, ["waiting", "completed"]);
    assert_eq!(number(&client, "SELECT count(*) FROM worker.tasks").await, 0, "rolled back");
}

#[tokio::test(flavor = "multi_thread")]
async fn siblings_and_uncles_of_the_document_run_in_its_order() {
    let (_db, _config, client) = with_handlers().await;
    let round = "CALL worker.process_tasks(p_queue => 'analytics')";
    let states = "SELECT command, state, parent_id IS NULL FROM worker.tasks ORDER BY id";
    client
        .batch_execute("INSERT INTO worker.tasks (command) VALUES ('derive_statistical_unit')")
        .await
        .unwrap();
    client.batch_execute(round).await.unwrap();
    let (parent, child) = ("derive_statistical_unit", "statistical_unit_refresh_batch");
    let uncle = "analyze_tables|pending|t";
    assert_eq!(
        texts(&client, states).await,
        [format!("{parent}|waiting|t"), format!("{child}|pending|f"), uncle.into()]
    );
    assert_eq!(
        text(&client, "SELECT worker.has_pending_children(id) FROM worker.tasks WHERE parent_id IS NULL ORDER BY id LIMIT 1").await,
        "t"
    );
    client.batch_execute(round).await.unwrap();
    let completed = format!("{child}|completed|f");
    assert_eq!(
        texts(&client, states).await,
        [format!("{parent}|completed|t"), completed.clone(), uncle.into(), completed]
    );
    assert_eq!(texts(&client, "SELECT batch_seq FROM app.refreshed ORDER BY 1").await, ["1", "99"]);
    assert_eq!(
        number(&client, "SELECT count(*) FROM app.refreshed r JOIN worker.tasks t ON t.id = r.task_id").await,
        2,
        "musterd.task_id names the task whose procedure runs"
    );
    client.batch_execute(round).await.unwrap();
    assert_eq!(
        text(&client, "SELECT state FROM worker.tasks WHERE command = 'analyze_tables'").await,
        "completed"
    );
    let timed = "SELECT count(*) FROM worker.tasks WHERE completed_at >= processed_at AND duration_ms >= 0";
    assert_eq!(number(&client, timed).await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_runs_what_is_inserted_into_the_view() {
    let (db, _config, client) = with_handlers().await;
    let _replicas = [Daemon::builder(&db, &config()).start(), Daemon::builder(&db, &config()).start()];
    let insert =
        "INSERT INTO worker.tasks (command, payload, priority) VALUES ('derive_statistical_unit', '{}', 10)";
    client.batch_execute(insert).await.unwrap();
    becomes(&client, "SELECT state, count(*) FROM worker.tasks GROUP BY 1", "completed|4").await;
    assert_eq!(texts(&client, "SELECT batch_seq FROM app.refreshed ORDER BY 1").await, ["1", "99"]);
    let early = "SELECT count(*) FROM worker.tasks u, worker.tasks p
        WHERE u.command = 'analyze_tables' AND p.command = 'derive_statistical_unit' AND u.processed_at < p.completed_at";
    let times = "SELECT id, command, processed_at, completed_at FROM worker.tasks ORDER BY id";
    assert_eq!(
        number(&client, early).await,
        0,
        "the uncle ran before its time: {:#?}",
        texts(&client, times).await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_child_fails_the_parent_and_a_grandchild_is_refused() {
    let (_db, _config, client) = with_handlers().await;
    let family = "INSERT INTO worker.tasks (command) VALUES ('derive_statistical_unit');
        CALL worker.process_tasks(p_queue => 'analytics');
        INSERT INTO musterd.tasks (command, payload, parent_id, max_attempts)
        SELECT 'statistical_unit_refresh_batch', '{\"fail\": true}', id, 1 FROM worker.tasks WHERE state = 'waiting'";
    client.batch_execute(family).await.unwrap();
    let child = number(&client, "SELECT min(id) FROM worker.tasks WHERE parent_id IS NOT NULL").await;
    let grandchild = format!("CALL worker.spawn('analyze_tables', '{{}}', {child})");
    assert!(refusal(&client, &grandchild).await.contains("cannot have children"));
    // By a trigger of the application's, too.
    let own = "CREATE TABLE app.links (parent_id bigint);
        CREATE TRIGGER one_level BEFORE INSERT ON app.links FOR EACH ROW EXECUTE FUNCTION worker.enforce_no_grandchildren();
        INSERT INTO app.links SELECT id FROM worker.tasks WHERE parent_id IS NULL";
    client.batch_execute(own).await.unwrap();
    let link = "INSERT INTO app.links SELECT id FROM worker.tasks WHERE parent_id IS NOT NULL";
    assert!(refusal(&client, link).await.contains("cannot have children"));
    client.batch_execute("CALL worker.process_tasks(p_queue => 'analytics')").await.unwrap();
    let states = "SELECT t.state, worker.has_failed_siblings(t.id) FROM worker.tasks t WHERE t.parent_id IS NOT NULL ORDER BY t.id";
    assert_eq!(texts(&client, states).await, ["completed|t", "failed|f", "completed|t"]);
    assert_eq!(
        text(&client, "SELECT state, error FROM worker.tasks WHERE command = 'derive_statistical_unit'")
            .await,
        "failed|1 of 3 children failed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_was_left_waiting_is_completed_by_hand() {
    let (_db, _config, client) = with_handlers().await;
    let family = "INSERT INTO worker.tasks (command) VALUES ('derive_statistical_unit');
        CALL worker.process_tasks(p_queue => 'analytics')";
    client.batch_execute(family).await.unwrap();
    let child = number(&client, "SELECT id FROM worker.tasks WHERE parent_id IS NOT NULL").await;
    let complete = format!("SELECT worker.complete_parent_if_ready({child})");
    assert_eq!(text(&client, &complete).await, "f");
    let ended = format!(
        "UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() WHERE id = {child}"
    );
    client.batch_execute(&ended).await.unwrap();
    assert_eq!(text(&client, &complete).await, "t");
    assert_eq!(text(&client, &complete).await, "f", "once");
    assert_eq!(
        text(
            &client,
            "SELECT state FROM worker.tasks WHERE parent_id IS NULL AND command <> 'analyze_tables'"
        )
        .await,
        "completed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn every_state_has_its_word() {
    let (_db, _config, client) = installed().await;
    let words = "SELECT s || ' ' || worker.state_of(s) FROM unnest(enum_range(NULL::musterd.state)) s";
    assert_eq!(
        texts(&client, words).await,
        [
            "held pending",
            "scheduled pending",
            "queued pending",
            "running processing",
            "waiting waiting",
            "succeeded completed",
            "failed failed",
            "aborted failed"
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_and_doctor_say_whether_it_is_there_and_keep_it_up_to_date() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let client = db.client().await;
    let said = async || {
        let checks = json(&config.musterd(&["doctor", "--json"]).await)["checks"].clone();
        let check =
            checks.as_array().unwrap().iter().find(|check| check["name"] == "worker schema").unwrap().clone();
        (check["verdict"].clone(), check["found"].clone())
    };
    assert_eq!(said().await, (value!("pass"), value!("not installed")));
    let plain = config.musterd(&["migrate", "--json"]).await;
    assert_eq!(json(&plain)["worker_schema"], "absent");
    let dry = stdout(&config.musterd(&["migrate", "--dry-run", "--with-worker-schema"]).await);
    assert!(dry.contains("CREATE OR REPLACE VIEW worker.tasks"), "{dry}");
    assert_eq!(number(&client, "SELECT count(*) FROM pg_namespace WHERE nspname = 'worker'").await, 0);
    for _ in 0..2 {
        let output = config.musterd(&["migrate", "--with-worker-schema"]).await;
        assert!(stdout(&output).contains("the schema worker is installed"), "{output:?}");
    }
    assert_eq!(said().await, (value!("pass"), value!("installed")));
    // Another version of it, and a procedure of the user's beside it.
    let other = "COMMENT ON SCHEMA worker IS 'Muster: names of the STATBUS worker over the schema musterd; contents 0';
        DROP PROCEDURE worker.spawn(text, jsonb, bigint, bigint);
        CREATE PROCEDURE worker.own() LANGUAGE sql AS 'SELECT 1'; GRANT EXECUTE ON PROCEDURE worker.own() TO PUBLIC";
    client.batch_execute(other).await.unwrap();
    assert_eq!(said().await, (value!("warn"), value!("installed by another version")));
    let status = stdout(&config.musterd(&["migrate", "--status"]).await);
    assert!(status.contains("the schema worker is installed by another version"), "{status}");
    assert!(config.musterd(&["migrate"]).await.status.success());
    assert_eq!(said().await, (value!("pass"), value!("installed")));
    client.batch_execute("CALL worker.spawn('echo'); CALL worker.own()").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_another_program_is_left_alone() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let client = db.client().await;
    client.batch_execute("CREATE SCHEMA worker; CREATE TABLE worker.tasks (id int)").await.unwrap();
    let refused = config.musterd(&["migrate", "--with-worker-schema"]).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("ALTER SCHEMA worker RENAME TO"), "{refused:?}");
    assert!(config.musterd(&["migrate"]).await.status.success(), "without the option there is no quarrel");
    assert_eq!(number(&client, "SELECT count(*) FROM worker.tasks").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_have_in_it_what_they_have_in_musterd() {
    let (db, _config, client) = with_handlers().await;
    let login = db.login("musterd_producer").await;
    let (producer, _connection) = connect(&login.url).await;
    let may = "INSERT INTO worker.tasks (command, payload) VALUES ('derive_statistical_unit', '{}');
        CALL worker.spawn('analyze_tables', '{}')";
    producer.batch_execute(may).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM worker.tasks").await, 2);
    let forbidden = [
        "CALL worker.process_tasks()",
        "INSERT INTO worker.tasks (command, parent_id) VALUES ('a', 1)",
        "UPDATE worker.tasks SET priority = 1",
        "DELETE FROM worker.tasks",
        "SELECT worker.complete_parent_if_ready(1)",
    ];
    for statement in forbidden {
        let said = refusal(&producer, statement).await;
        assert!(said.starts_with("42501"), "{statement}: {said}");
    }
}
