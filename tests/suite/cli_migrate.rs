//! `musterd migrate`, as processes: many at once, looking without writing, and what is refused.

use std::time::Duration;

use futures::future::join_all;
use tokio_postgres::Client;

use crate::suite::support::config::{TestConfig, json, stderr, stdout};
use crate::suite::support::database::TestDb;

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

const SCHEMAS: &str = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
const HISTORY: &str = "SELECT count(*) FROM musterd.schema_history";

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_at_once_leave_one_history() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "");
    let outputs = join_all((0..10).map(|_| config.musterd(&["migrate", "--json"]))).await;
    let mut steps = Vec::new();
    for output in &outputs {
        assert!(output.status.success(), "{output:?}");
        assert_eq!(stderr(output), "");
        steps.push(json(output)["applied"].as_array().unwrap().len());
    }
    steps.sort_unstable();
    assert_eq!(steps[..9], [0; 9], "one did it all, nine found it done");
    let client = db.client().await;
    assert_eq!(count(&client, HISTORY).await, i64::try_from(steps[9]).unwrap());
    let again = config.musterd(&["migrate"]).await;
    assert!(stdout(&again).starts_with("nothing to do: the database is at V"), "{again:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_writes_nothing_and_tells_before_from_after() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "");
    let client = db.client().await;
    let states = async || {
        let output = config.musterd(&["migrate", "--status", "--json"]).await;
        assert!(output.status.success(), "{output:?}");
        let answer = json(&output);
        let state = |step: &serde_json::Value| step["state"].as_str().unwrap().to_owned();
        answer.as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    let before = states().await;
    assert!(!before.is_empty() && before.iter().all(|state| state == "pending"), "{before:?}");
    let dry = config.musterd(&["migrate", "--dry-run"]).await;
    assert!(dry.status.success());
    let sql = stdout(&dry);
    assert!(sql.starts_with("-- V1 ") && sql.contains("CREATE TABLE musterd.task_records"), "{sql}");
    assert_eq!(count(&client, SCHEMAS).await, 0, "looking must not write");

    // What was printed is what is run: by hand it makes the same schema.
    let done = config.musterd(&["migrate"]).await;
    assert!(done.status.success(), "{done:?}");
    assert!(stdout(&done).contains("applied V1 "), "{done:?}");
    let after = states().await;
    assert!(after.len() == before.len() && after.iter().all(|state| state == "applied"), "{after:?}");
    let dry = config.musterd(&["migrate", "--dry-run"]).await;
    assert_eq!(stdout(&dry), "-- nothing to do\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_by_every_command_that_would_use_it() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let newer = "INSERT INTO musterd.schema_history VALUES (900, 'later', '2030-01-01T00:00:00Z', '1');
                 UPDATE musterd.schema_compat SET oldest = 900";
    db.client().await.batch_execute(newer).await.unwrap();
    for command in ["migrate", "run"] {
        let output = config.musterd(&[command]).await;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = stderr(&output);
        assert!(text.contains("database is at V900") && text.contains("deploy a newer musterd"), "{text}");
    }
    let status = config.musterd(&["migrate", "--status"]).await;
    assert!(status.status.success() && stdout(&status).contains("V900"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_without_a_schema_says_what_to_do_and_ends() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "");
    let output = config.musterd(&["run"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("run `musterd migrate`"), "{output:?}");
    assert_eq!(count(&db.client().await, SCHEMAS).await, 0, "run never migrates");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_not_there_is_an_error_of_the_work() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "[database]\nurl = \"postgres://u:canary@127.0.0.1:1/x\"");
    let begun = std::time::Instant::now();
    for args in [["migrate"].as_slice(), &["batch", "show", "1"], &["migrate", "--status"]] {
        let output = config.musterd(args).await;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = stderr(&output);
        assert!(text.contains("nothing listens there; start the server"), "{text}");
        assert!(!text.contains("canary") && text.lines().count() == 1, "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_says_that_the_database_wants_migrating() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "");
    std::fs::write(config.dir().join("rows.ndjson"), "1\n").unwrap();
    let commands: [&[&str]; 17] = [
        &["batch", "list"],
        &["batch", "show", "1"],
        &["batch", "hold", "1"],
        &["batch", "abort", "1"],
        &["task", "list"],
        &["task", "show", "1"],
        &["task", "abort", "1"],
        &["queue", "list"],
        &["queue", "pause", "default"],
        &["worker", "list"],
        &["handler", "list"],
        &["why", "batch", "1"],
        &["why", "task", "1"],
        &["why", "queue", "default"],
        &["top", "--once"],
        &["submit", "rows.ndjson", "--command", "noop"],
        &["enqueue", "noop"],
    ];
    let missing =
        "musterd: the database has not been migrated, it has no musterd schema: run `musterd migrate`\n";
    for args in commands {
        let output = config.musterd(args).await;
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(1), missing), "{args:?}");
    }
    // An older one, of which something is missing.
    assert!(config.musterd(&["migrate"]).await.status.success());
    let older = "DELETE FROM musterd.schema_history WHERE version = (SELECT max(version) FROM musterd.schema_history);
        ALTER TABLE musterd.queues RENAME TO lanes";
    db.client().await.batch_execute(older).await.unwrap();
    let output = config.musterd(&["queue", "list"]).await;
    let said = stderr(&output);
    assert!(
        said.starts_with("musterd: database is at V") && said.ends_with("run `musterd migrate`\n"),
        "{said}"
    );
}
