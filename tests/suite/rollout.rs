//! A rolling upgrade: old and new replicas side by side, the schema growing under them, and nothing lost or run twice.

use std::time::{Duration, Instant};

use musterd::store::migrate;
use rustix::process::Signal;

use crate::suite::support::config::{TestConfig, json, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::work::{End, Ledger};
use crate::suite::support::worker::{ask, submit};

const SOON: Duration = Duration::from_secs(60);

const LOAD: &str = "[handlers.sleep]\nduration = \"5ms\"\n[queues.default]\nfibers = 4\nblock_size = 50";

/// How many replicas there are, and how many rows come before the first of them goes and with each that does.
struct Rollout {
    replicas: usize,
    rows: i32,
}

/// What was measured: rows a second before the first replica was stopped, and while they were replaced.
struct Pace {
    before: f64,
    during: f64,
}

impl Rollout {
    async fn run(&self) -> Pace {
        let db = TestDb::new().await;
        let ledger = Ledger::open(&db).await;
        let start = || Daemon::builder(&db, LOAD).log("info").start();
        let mut old: Vec<Daemon> = (0..self.replicas).map(|_| start()).collect();
        for daemon in &old {
            daemon.wait_ready().await;
        }
        let mut batches = vec![ledger.submit("sleep", self.rows).await];
        ledger.number("SELECT count(musterd.enqueue('sleep')) FROM generate_series(1, 200)").await;
        ledger.has_results(batches[0], 1, SOON).await;
        let begun = Instant::now();
        ledger.has_results(batches[0], i64::from(self.rows) / 2, SOON * 5).await;
        let before = f64::from(self.rows) / 2.0 / begun.elapsed().as_secs_f64();

        // As a Deployment does it: the next one is ready before the last one is told to go, in the middle of its work.
        let mut new = Vec::new();
        let (done, begun) = (self.done(&ledger).await, Instant::now());
        while let Some(oldest) = old.pop() {
            let next = start();
            next.wait_ready().await;
            new.push(next);
            batches.push(ledger.submit("sleep", self.rows).await);
            ledger.has_results(batches[batches.len() - 1], 1, SOON).await;
            oldest.signal(Signal::TERM);
            assert!(oldest.wait_exit(SOON).await.success(), "a replica left something behind");
        }
        let during = (self.done(&ledger).await - done) as f64 / begun.elapsed().as_secs_f64();
        for batch in batches {
            assert_eq!(ledger.end_of(batch, SOON * 10).await, End::succeeded(self.rows));
        }
        self.nothing_happened(&ledger).await;
        Pace { before, during }
    }

    async fn done(&self, ledger: &Ledger) -> i64 {
        ledger.number("SELECT count(*) FROM musterd.results").await
    }

    async fn nothing_happened(&self, ledger: &Ledger) {
        eventually(SOON, "every task ends", async || {
            let open =
                "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed', 'aborted')";
            (ledger.number(open).await == 0).then_some(())
        })
        .await;
        let again = "SELECT count(*) FROM musterd.results WHERE attempt <> 1 OR state <> 'succeeded'";
        assert_eq!(ledger.number(again).await, 0, "rows tried again");
        let tasks =
            "SELECT count(*) FROM musterd.tasks WHERE attempt <> 1 OR crashes <> 0 OR state <> 'succeeded'";
        assert_eq!(ledger.number(tasks).await, 0, "tasks tried again");
        assert_eq!((ledger.dead().await, ledger.deadlocks().await), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_under_load_loses_no_row_and_runs_none_again() {
    Rollout { replicas: 4, rows: 1_500 }.run().await;
}

/// `make test-rollout`: the same, larger, with its pace. Not among the tests: a busy machine has a pace of its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; make test-rollout runs it"]
async fn a_rollout_keeps_more_than_half_of_the_pace() {
    let pace = Rollout { replicas: 4, rows: 15_000 }.run().await;
    let share = pace.during / pace.before;
    println!("{:.0} rows/s before, {:.0} rows/s during the rollout: {:.2}", pace.before, pace.during, share);
    assert!(share > 0.5, "{share}");
}

/// Brings the schema to what the next release might have.
async fn grow(db: &TestDb) -> i32 {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = refinery::load_sql_migrations(root.join("migrations")).unwrap();
    all.extend(refinery::load_sql_migrations(root.join("tests/fixtures/next")).unwrap());
    let mut runner = refinery::Runner::new(&all);
    runner.set_migration_table_name("musterd.schema_history");
    // It takes the tables from under running statements: PostgreSQL may end one of a circle, and that may be ours. A
    // migration is one transaction, and is then run again.
    for _ in 0..30 {
        let mut client = db.client().await;
        match runner.run_async(&mut client).await {
            Ok(report) => {
                assert_eq!(report.applied_migrations().len(), 1, "{report:?}");
                return report.applied_migrations()[0].version();
            }
            Err(error) => println!("once more: {error:?}"),
        }
    }
    panic!("the schema does not grow");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_knows_only_the_older_schema_works_on_while_it_grows() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let toml = format!(
        "{LOAD}\n[handlers.part]\nkind = \"sql\"\nprocedure = \"app.part\"\n[completion]\nsweep_min = \"1s\"\nsweep_max = \"2s\"\n\
         [liveness]\nbackend = \"postgres\"\nreconcile_interval = \"500ms\""
    );
    let procedure = "CREATE SCHEMA app; CREATE PROCEDURE app.part(bigint, jsonb) LANGUAGE sql AS 'SELECT 1'";
    ledger.client.batch_execute(procedure).await.unwrap();
    let older = [0, 1].map(|_| Daemon::builder(&db, &toml).log("info").start());
    for daemon in &older {
        daemon.wait_ready().await;
    }
    // Everything has been asked for once: whatever a statement remembers of the tables, it remembers it now.
    let first = ledger.submit("sleep", 200).await;
    ledger.number("SELECT musterd.enqueue('part')").await;
    ledger.end_of(first, SOON).await;
    let batch = ledger.submit("sleep", 4_000).await;
    ledger.has_results(batch, 200, SOON).await;
    let version = grow(&db).await;
    let seen = ledger.number(&format!("SELECT count(*) FROM musterd.results WHERE batch_id = {batch}")).await;
    ledger.has_results(batch, (seen + 500).min(4_000), SOON).await;

    // One that starts now says what it found, and works.
    let later = Daemon::builder(&db, &toml).log("info").start();
    let told = |line: &str| line.contains("the schema is newer than this binary and still serves it");
    let line = later.wait_for_log(SOON, told).await;
    assert!(line.contains(&format!("\"database\":{version}")), "{line}");
    later.wait_ready().await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(4_000));

    // Tasks, families, a second try, an abort, an empty batch, failed rows once more: on the grown schema, by the older binaries.
    let parent = ledger.number("SELECT musterd.enqueue('part')").await;
    ledger.number(&format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{parent}::bigint])")).await;
    let failing = submit(&ledger.client, "fail", 3, "max_failed => 3").await;
    let empty = submit(&ledger.client, "noop", 0, "on_done => 'noop'").await;
    for id in [failing, empty] {
        assert_eq!(ledger.end_of(id, SOON).await.state, "succeeded");
    }
    assert_eq!(
        ask::<String>(&ledger.client, &format!("SELECT state FROM musterd.redrive({failing})")).await,
        "running"
    );
    assert_eq!(ledger.end_of(failing, SOON).await.failed, 3);
    eventually(SOON, "every task ends", async || {
        let open = "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed', 'aborted')";
        (ledger.number(open).await == 0).then_some(())
    })
    .await;
    let tried = "SELECT count(*) FROM musterd.results r JOIN musterd.batches b ON b.id = r.batch_id
                  WHERE r.attempt <> 1 AND b.command <> 'fail'";
    assert_eq!(ledger.number(tried).await, 0);
    assert_eq!(
        (ledger.claimed_again().await, ledger.dead().await),
        (3, 0),
        "those that fail, and nobody died"
    );
    for daemon in older.iter().chain([&later]) {
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(SOON).await.success());
        assert!(
            !daemon.log().iter().any(|line| line.contains("cached plan")),
            "a statement outlived its tables"
        );
    }
    contracted(&db, version).await;
}

/// When the schema has taken away what the older binaries use, they say so and do not start.
async fn contracted(db: &TestDb, version: i32) {
    let client = db.client().await;
    client.batch_execute(&format!("UPDATE musterd.schema_compat SET oldest = {version}")).await.unwrap();
    assert!(migrate::check(&client).await.is_err());
    let refused = TestConfig::new(db, "").musterd(&["run"]).await;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_waits_for_the_migration_and_changes_nothing_itself() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "");
    let hasty = config.musterd(&["migrate", "--wait", "0s"]).await;
    assert_eq!(hasty.status.code(), Some(1), "{hasty:?}");
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
    assert_eq!(ask::<i64>(&db.client().await, schemas).await, 0, "waiting must not write");
    let waiting = config.musterd(&["migrate", "--wait", "10m"]);
    let migrating = config.musterd(&["migrate"]);
    let (waited, migrated) = tokio::join!(waiting, migrating);
    assert!(migrated.status.success() && waited.status.success(), "{migrated:?} {waited:?}");
    assert!(stdout(&waited).starts_with("the database is at V"), "{waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_with_other_handlers_claim_what_they_can_and_the_rest_waits_for_whoever_can() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let ledger = Ledger::open(&db).await;
    let handler = |name: &str| format!("[handlers.{name}]\nkind = \"builtin\"\nbuiltin = \"echo\"\n");
    let old = Daemon::builder(&db, &handler("resize")).start();
    let new = Daemon::builder(&db, &format!("{}{}", handler("resize"), handler("crop"))).start();
    for daemon in [&old, &new] {
        daemon.wait_ready().await;
    }
    let mut batches = Vec::new();
    for command in ["resize", "crop"] {
        batches.push((command, submit(&client, command, 500, "").await));
        let enqueue = format!("SELECT count(musterd.enqueue('{command}')) FROM generate_series(1, 50)");
        assert_eq!(ask::<i64>(&client, &enqueue).await, 50);
    }
    let stranger = submit(&client, "sharpen", 10, "").await;
    let task: i64 = ask(&client, "SELECT musterd.enqueue('sharpen')").await;
    for (_, batch) in &batches {
        assert_eq!(ledger.end_of(*batch, SOON).await, End::succeeded(500));
    }
    eventually(SOON, "the tasks somebody can run end", async || {
        let open = "SELECT count(*) FROM musterd.tasks WHERE state <> 'succeeded' AND command <> 'sharpen'";
        (ledger.number(open).await == 0).then_some(())
    })
    .await;
    // What nobody handles waits, unharmed, and the reason is given.
    for args in [["why", "batch", &stranger.to_string()], ["why", "task", &task.to_string()]] {
        let answer = json(&old.config().musterd(&[args[0], args[1], args[2], "--json"]).await).to_string();
        assert!(answer.contains("no_handler"), "{answer}");
    }
    let strange = "SELECT count(*) FROM public.claims c JOIN musterd.batches b ON b.id = c.batch
                     JOIN musterd.workers w ON w.id = c.worker WHERE b.command <> ALL (w.commands)";
    assert_eq!(ledger.number(strange).await, 0, "rows were claimed by who cannot run them");
    let touched = "SELECT (SELECT count(*) FROM musterd.results WHERE state <> 'succeeded')
                        + (SELECT count(*) FROM musterd.tasks WHERE attempt <> 1)";
    assert_eq!(ledger.number(touched).await, 0);
    // A replica that can run it comes, and it runs.
    let newest = Daemon::builder(&db, &handler("sharpen")).start();
    newest.wait_ready().await;
    assert_eq!(ledger.end_of(stranger, SOON).await, End::succeeded(10));
    let crops = format!(
        "SELECT count(*) FROM musterd.workers WHERE 'crop' = ANY (commands) AND pid <> {}",
        new.pid()
    );
    assert_eq!(ledger.number(&crops).await, 0);
}
