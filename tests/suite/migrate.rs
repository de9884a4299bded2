//! Migrations against a real server: many at once, not twice, not backwards, and not without the right.

use std::time::Duration;

use futures::future::join_all;
use musterd::store::connect::OneShot;
use musterd::store::migrate::{self, Fit, MigrateError, MigrationState, SchemaState, WorkerSchema};

use crate::suite::connect_server::{Server, Tls};

async fn count(client: &OneShot, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

const LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
const SCHEMAS: &str = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
const HISTORY: &str = "SELECT count(*) FROM musterd.schema_history";

#[tokio::test]
async fn ten_at_once_leave_one_history() {
    let server = Server::start(Tls::Off).await;
    let watcher = server.superuser("postgres").await;

    let before = migrate::status(&watcher).await.unwrap();
    let known = before.len();
    assert!(known > 0 && before.iter().all(|step| step.state == MigrationState::Pending), "{before:?}");
    let pending = migrate::pending(&watcher).await.unwrap();
    assert!(pending.len() == known && pending.iter().all(|step| !step.sql.is_empty()), "{pending:?}");
    assert!(matches!(migrate::check(&watcher).await, Err(SchemaState::Missing)));
    assert_eq!(count(&watcher, SCHEMAS).await, 0, "looking must not write");

    let one = async || {
        let mut client = server.superuser("postgres").await;
        let report = migrate::migrate(&mut client).await.unwrap();
        client.close().await;
        report
    };
    let reports = join_all((0..10).map(|_| one())).await;
    let applied: Vec<_> = reports.iter().map(|report| report.applied.len()).filter(|n| *n > 0).collect();
    assert_eq!(applied, [known], "one did it all, nine found it done");
    assert_eq!(count(&watcher, HISTORY).await, i64::try_from(known).unwrap());
    assert_eq!(count(&watcher, LOCKS).await, 0);

    let after = migrate::status(&watcher).await.unwrap();
    let is_done =
        |step: &migrate::MigrationStatus| step.state == MigrationState::Applied && step.applied_on.is_some();
    assert!(after.iter().all(is_done), "{after:?}");
    assert_eq!(reports[0].version, after.last().unwrap().version);
    assert!(migrate::pending(&watcher).await.unwrap().is_empty());
    assert_eq!(migrate::check(&watcher).await.unwrap(), Fit::Exact);
}

#[tokio::test]
async fn a_schema_of_another_binary_is_left_alone() {
    let server = Server::start(Tls::Off).await;
    let mut client = server.superuser("postgres").await;
    let binary = migrate::migrate(&mut client).await.unwrap().version;

    let newer = "INSERT INTO musterd.schema_history VALUES (900, 'later', '2030-01-01T00:00:00Z', '1')";
    client.batch_execute(newer).await.unwrap();
    let refused = migrate::migrate(&mut client).await.unwrap_err();
    assert!(
        matches!(refused, MigrateError::NewerSchema { database: 900, binary: b } if b == binary),
        "{refused}"
    );
    assert!(refused.to_string().contains("database is at V900"), "{refused}");
    assert!(matches!(migrate::pending(&client).await, Err(MigrateError::NewerSchema { .. })));
    // One that has only grown serves us still.
    assert_eq!(migrate::check(&client).await.unwrap(), Fit::Newer { database: 900, binary });
    client.batch_execute(&format!("UPDATE musterd.schema_compat SET oldest = {binary} + 1")).await.unwrap();
    assert!(matches!(migrate::check(&client).await, Err(SchemaState::Newer { database: 900, .. })));
    client.batch_execute("DELETE FROM musterd.schema_compat").await.unwrap();
    assert!(matches!(migrate::check(&client).await, Err(SchemaState::Newer { database: 900, .. })));
    let last = migrate::status(&client).await.unwrap().pop().unwrap();
    assert_eq!((last.version, last.state), (900, MigrationState::Unknown));

    // A refusal gives back the lock and the session's settings too.
    assert_eq!(count(&client, LOCKS).await, 0);
    let path: String = client.query_one("SHOW search_path", &[]).await.unwrap().get(0);
    assert_eq!(path, r#""$user", public"#);

    client.batch_execute("DELETE FROM musterd.schema_history WHERE version = 900").await.unwrap();
    client.batch_execute("UPDATE musterd.schema_history SET checksum = '1' WHERE version = 1").await.unwrap();
    assert!(matches!(migrate::migrate(&mut client).await, Err(MigrateError::Changed { version: 1, .. })));
    assert!(matches!(migrate::check(&client).await, Err(SchemaState::Changed { version: 1, .. })));

    client.batch_execute("UPDATE musterd.schema_history SET applied_on = 'soon'").await.unwrap();
    assert!(matches!(migrate::status(&client).await, Err(MigrateError::Garbled { .. })));
}

#[tokio::test]
async fn who_waits_is_told_for_whom() {
    let server = Server::start(Tls::Off).await;
    let holder = server.target("postgres", "application_name=slow_sister").open("").await.unwrap();
    let key = i64::from_be_bytes(*b"mustermg");
    holder.query_one("SELECT pg_advisory_lock($1)", &[&key]).await.unwrap();

    let mut client = server.superuser("postgres").await;
    let error = migrate::migrate_within(&mut client, Duration::from_millis(50), WorkerSchema::Keep)
        .await
        .unwrap_err();
    assert!(matches!(error, MigrateError::Locked { .. }), "{error}");
    assert!(error.to_string().contains("slow_sister pid "), "{error}");
    assert_eq!(count(&client, SCHEMAS).await, 0);

    // The wait ends when the other one does, not at its limit.
    let waiting = migrate::migrate_within(&mut client, Duration::from_secs(60), WorkerSchema::Keep);
    let (report, ()) = tokio::join!(waiting, holder.close());
    assert!(!report.unwrap().applied.is_empty());
}

#[tokio::test]
async fn a_missing_right_is_told_as_the_grant_to_run() {
    let server = Server::start(Tls::Off).await;
    server.execute("CREATE ROLE \"small Fry\" LOGIN PASSWORD 's3cret canary'").await;
    let mut client = server.target("'small Fry'", "").open("suite").await.unwrap();
    let error = migrate::migrate(&mut client).await.unwrap_err();
    let grant = match &error {
        MigrateError::MayNotCreateSchema { grant, .. } => grant.clone(),
        other => panic!("{other}"),
    };
    assert_eq!(grant, r#"GRANT CREATE ON DATABASE postgres TO "small Fry""#);
    assert!(error.to_string().contains(&grant), "{error}");
    assert_eq!(count(&client, LOCKS).await, 0);

    server.execute(&grant).await;
    let further = migrate::migrate(&mut client).await;
    assert!(!matches!(further, Err(MigrateError::MayNotCreateSchema { .. })), "{further:?}");
    assert_eq!(count(&client, SCHEMAS).await, 1);

    // The schema is somebody else's: its owner is the one to ask.
    server.execute("CREATE DATABASE taken").await;
    server.superuser("taken").await.batch_execute("CREATE SCHEMA musterd").await.unwrap();
    let mut client = server.target("'small Fry'", "dbname=taken").open("suite").await.unwrap();
    let error = migrate::migrate(&mut client).await.unwrap_err();
    assert!(matches!(error, MigrateError::NotPermitted { .. }), "{error}");
}
