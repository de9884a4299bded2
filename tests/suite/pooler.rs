//! A transaction pooler is found out and told of, and what cannot go through it is refused.

use std::time::Duration;

use rustix::process::Signal;

use crate::suite::support::config::{TestConfig, json, stderr};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::pgbouncer::{self, PgBouncer, SESSIONS};
use crate::suite::support::sql::value;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{ask, ended};

const SOON: Duration = Duration::from_secs(60);

/// What `doctor` says of the pooler: verdict and finding.
async fn doctor(db: &TestDb, database: &str) -> (String, String) {
    let config = TestConfig::new(db, &format!("[database]\n{database}"));
    let answer = json(&config.musterd(&["doctor", "--json"]).await);
    let checks = answer["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "pooler").unwrap_or_else(|| panic!("{answer}"));
    (check["verdict"].as_str().unwrap().into(), check["found"].as_str().unwrap().into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_is_found_out_and_said_by_log_and_doctor() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::new().await;
    let eager = PgBouncer::start("");
    for pooler in [&eager, pgbouncer::shared()] {
        let url = format!("url = {:?}", pooler.url(&db));
        let daemon = Daemon::builder(&db, &format!("[database]\n{url}")).start();
        let told =
            |line: &str| line.contains("leads to a transaction pooler and database.direct_url is not set");
        daemon.wait_for_log(SOON, told).await;
        daemon.wait_ready().await;
        let (verdict, found) = doctor(&db, &url).await;
        assert_eq!(
            (verdict.as_str(), found.as_str()),
            ("warn", "database.url leads to a transaction pooler")
        );

        let both = format!("{url}\ndirect_url = {:?}", db.url());
        let other = Daemon::builder(&db, &format!("[database]\n{both}")).start();
        other.wait_for_log(SOON, |line| line.contains("go past it by database.direct_url")).await;
        assert_eq!(doctor(&db, &both).await.0, "pass");

        // Past the pooler through the pooler.
        let twice = format!("{url}\ndirect_{url}");
        let (verdict, found) = doctor(&db, &twice).await;
        assert_eq!(verdict, "fail", "{found}");
        let refused = TestConfig::new(&db, &format!("[database]\n{twice}")).musterd(&["run"]).await;
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            stderr(&refused).contains("database.direct_url leads to a transaction pooler, too"),
            "{refused:?}"
        );
    }
    // The server itself, told and not told.
    for database in [format!("url = {:?}", db.url()), format!("url = {:?}\npooler = \"none\"", db.url())] {
        let (verdict, found) = doctor(&db, &database).await;
        assert_eq!((verdict.as_str(), found.as_str()), ("pass", "none: database.url is a direct connection"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_does_not_go_through_a_pooler() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::empty().await;
    let url = pgbouncer::shared().url(&db);
    let pooled = TestConfig::new(&db, &format!("[database]\nurl = {url:?}"));
    let refused = pooled.musterd(&["migrate"]).await;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(stderr(&refused).contains("set database.direct_url"), "{refused:?}");
    let count = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
    let client = db.client().await;
    assert_eq!(value(&client, count).await, "0");
    let past = TestConfig::new(&db, &format!("[database]\nurl = {url:?}\ndirect_url = {:?}", db.url()));
    let done = past.musterd(&["migrate"]).await;
    assert!(done.status.success(), "{done:?}");
    assert_eq!(value(&client, count).await, "1");
}

/// Everything that opens connections, at once: rows, outputs, sql handlers, retries, families.
const BUSY: &str = r#"
[queues.default]
fibers = 16
[retry]
base = "10ms"
max = "20ms"
[handlers.flaky]
kind = "builtin"
builtin = "fail"
rate = 0.2
[handlers.plan]
kind = "sql"
procedure = "app.plan"
[handlers.twice]
kind = "sql"
function = "app.twice"
block_size = 20
"#;

const ROUTINES: &str = "
CREATE SCHEMA app;
CREATE PROCEDURE app.plan(task bigint, payload jsonb) LANGUAGE sql AS $$
    SELECT musterd.spawn('echo', '{}', task) FROM generate_series(1, 3) $$;
CREATE FUNCTION app.twice(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE sql AS $$
    SELECT r.line, 'succeeded', to_jsonb(r.input * 2), NULL::text
      FROM jsonb_to_recordset(rows) AS r (line int, input int) $$;";

/// The most sessions that `replicas` had at a time while they worked through everything.
async fn most_sessions(db: &TestDb, database: &str, replicas: usize) -> (i64, i64) {
    let client = db.client().await;
    client.batch_execute(ROUTINES).await.unwrap();
    let toml = format!("{BUSY}\n[database]\n{database}");
    let daemons: Vec<Daemon> =
        (0..replicas).map(|_| Daemon::builder(db, &toml).log("warn").start()).collect();
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    let mut batches = Vec::new();
    for round in 0..12 {
        let command = ["echo", "flaky", "twice"][round % 3];
        let sql = "SELECT musterd.submit_batch($1, ARRAY (SELECT to_jsonb(g) FROM generate_series(1, 400) g), max_failed => 400)";
        batches.push(client.query_one(sql, &[&command]).await.unwrap().get::<_, i64>(0));
        client.execute("SELECT musterd.enqueue('plan') FROM generate_series(1, 5)", &[]).await.unwrap();
    }
    let count = "SELECT count(*), count(*) FILTER (WHERE application_name IN ('musterd listen', 'musterd heartbeat'))
                   FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
                    AND pid <> pg_backend_pid()";
    let mut most = (0, 0);
    eventually(SOON * 2, "everything ends", async || {
        let row = client.query_one(count, &[]).await.unwrap();
        most = (most.0.max(row.get(0)), most.1.max(row.get(1)));
        let open = "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed')";
        (ask::<i64>(&client, open).await == 0).then_some(())
    })
    .await;
    for batch in batches {
        let end = ended(&client, batch).await;
        assert_eq!(end.state, "succeeded", "{end:?}");
    }
    for daemon in &daemons {
        daemon.signal(Signal::TERM);
    }
    for daemon in &daemons {
        assert!(daemon.wait_exit(SOON).await.success());
    }
    most
}

/// The figures of docs/deployment.md.
#[tokio::test(flavor = "multi_thread")]
async fn the_connections_of_a_replica_are_bounded_with_a_pooler_and_without() {
    if !has("pgbouncer") {
        return;
    }
    let direct = TestDb::new().await;
    let (all, _) = most_sessions(&direct, "max_connections = 9\nsql_connections = 3", 2).await;
    assert!(all <= 2 * (9 + 3), "{all} sessions of two replicas");

    let pooled = TestDb::new().await;
    let url = pgbouncer::shared().url(&pooled);
    let database =
        format!("url = {url:?}\ndirect_url = {:?}\nmax_connections = 9\nsql_connections = 3", pooled.url());
    let (all, own) = most_sessions(&pooled, &database, 2).await;
    assert_eq!(own, 2 * 2, "each replica listens and beats past the pooler");
    assert!(all <= i64::from(SESSIONS) + 2 * 2, "{all} sessions of two replicas behind a pooler");
}
