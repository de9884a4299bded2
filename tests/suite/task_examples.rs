//! The examples of the manual, as they stand in docs/examples: they are run, and do what the pages say.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{becomes, end_of, number, text, texts};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples").join(name)
}

async fn with_units() -> (TestDb, tokio_postgres::Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = std::fs::read_to_string(example("statistical_units.sql")).unwrap();
    client.batch_execute(&sql).await.unwrap();
    (db, client)
}

const STATES: &str = "SELECT command || ' ' || state || ' ' || count(*) FROM musterd.tasks GROUP BY command, state ORDER BY min(id)";

#[tokio::test(flavor = "multi_thread")]
async fn the_units_are_derived_in_rounds_inside_a_transaction_that_leaves_no_trace() {
    let (_db, client) = with_units().await;
    let insert =
        "BEGIN; INSERT INTO musterd.tasks (command, payload) VALUES ('derive_statistical_unit', '{}')";
    client.batch_execute(insert).await.unwrap();
    let round = "CALL musterd.process_tasks(p_queue => 'analytics')";
    client.batch_execute(round).await.unwrap();
    let uncles = |state: &str| vec![format!("analyze_tables {state} 1"), format!("derive_reports {state} 1")];
    let parent = |state: &str, children: &str| {
        vec![
            format!("derive_statistical_unit {state} 1"),
            format!("statistical_unit_refresh_batch {children} 3"),
        ]
    };
    assert_eq!(texts(&client, STATES).await, [parent("waiting", "queued"), uncles("scheduled")].concat());
    client.batch_execute(round).await.unwrap();
    assert_eq!(texts(&client, STATES).await, [parent("succeeded", "succeeded"), uncles("queued")].concat());
    assert_eq!(number(&client, "SELECT count(*) FROM stat.statistical_unit").await, 90);
    client.batch_execute(round).await.unwrap();
    assert_eq!(
        texts(&client, STATES).await,
        [parent("succeeded", "succeeded"), uncles("succeeded")].concat()
    );
    assert_eq!(texts(&client, "SELECT units FROM stat.report").await, ["30", "30", "30"]);
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.tasks").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM stat.statistical_unit").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_units_are_derived_by_the_daemon() {
    let (db, client) = with_units().await;
    let toml = std::fs::read_to_string(example("statistical_units.toml")).unwrap();
    let _replicas = [Daemon::builder(&db, &toml).start(), Daemon::builder(&db, &toml).start()];
    let parent = number(&client, "SELECT musterd.enqueue('derive_statistical_unit', priority => 10)").await;
    assert_eq!(end_of(&client, parent).await, "succeeded");
    becomes(
        &client,
        "SELECT count(*) FROM musterd.tasks WHERE parent_id IS NULL AND state = 'succeeded'",
        "3",
    )
    .await;
    assert_eq!(texts(&client, "SELECT units FROM stat.report").await, ["30", "30", "30"]);
    let early = format!(
        "SELECT count(*) FROM musterd.tasks u, musterd.tasks p WHERE p.id = {parent} AND u.dedup_key IS NOT NULL AND u.claimed_at < p.finished_at"
    );
    assert_eq!(number(&client, &early).await, 0, "an uncle started before the scope had ended");
}

/// Where `make setup-test` puts the drivers of the examples. Without them the test is skipped, and says so; in CI a skip is a
/// failure.
fn drivers(language: &str) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/example-drivers").join(language);
    if dir.exists() {
        return Some(dir);
    }
    assert!(std::env::var_os("CI").is_none(), "no driver for {language}: make setup-test");
    println!("SKIPPED: no driver for {language}: make setup-test");
    None
}

fn run(program: &str, environment: (&str, PathBuf), file: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.env(environment.0, environment.1).arg(example(file)).args(args);
    command.output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

/// Rolled back, nothing is enqueued; committed, all of it is.
async fn produce(example: impl Fn(&[&str]) -> Output) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TABLE public.orders (id int PRIMARY KEY, customer text)").await.unwrap();
    let counts = "SELECT (SELECT count(*) FROM public.orders), (SELECT count(*) FROM musterd.tasks), (SELECT count(*) FROM musterd.rows)";
    let failed = example(&[db.url(), "fail"]);
    assert!(!failed.status.success(), "{failed:?}");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("changed its mind"), "{failed:?}");
    assert_eq!(text(&client, counts).await, "0|0|0");
    let done = example(&[db.url()]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(text(&client, counts).await, "2|3|2");
    let batch: i64 = String::from_utf8_lossy(&done.stdout).trim().parse().unwrap();
    assert_eq!(
        text(&client, &format!("SELECT command, rows, on_done FROM musterd.batches WHERE id = {batch}"))
            .await,
        "charge|2|report"
    );
    let mail = "SELECT payload ->> 'to' FROM musterd.tasks WHERE idempotency_key = 'order-2-mail'";
    assert_eq!(text(&client, mail).await, "bob@example.org");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_program_enqueues_in_its_own_transaction() {
    let Some(drivers) = drivers("python") else { return };
    produce(|args| run("python3", ("PYTHONPATH", drivers.clone()), "producer.py", args)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_program_enqueues_in_its_own_transaction() {
    let Some(drivers) = drivers("node") else { return };
    produce(|args| run("node", ("NODE_PATH", drivers.join("node_modules")), "producer.js", args)).await;
}
