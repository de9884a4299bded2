//! A replica opens as many connections as the manual says, whatever it does and whatever is asked of it.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::pgbouncer::{self, SESSIONS};
use crate::suite::support::wait::{SOON, eventually, within};
use crate::suite::support::worker::{ask, ended};

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
    let count = "SELECT count(*), count(*) FILTER (WHERE application_name IN ('musterd listen', 'musterd heartbeat', 'musterd bystander'))
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
        assert_eq!(end.state.as_str(), "succeeded", "{end:?}");
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
    assert!(all <= 2 * (9 + 3 + 1), "{all} sessions of two replicas");

    let pooled = TestDb::new().await;
    let url = pgbouncer::shared().url(&pooled);
    let database =
        format!("url = {url:?}\ndirect_url = {:?}\nmax_connections = 9\nsql_connections = 3", pooled.url());
    let (all, own) = most_sessions(&pooled, &database, 2).await;
    assert_eq!(own, 2 * 3, "each replica listens, beats and stands by past the pooler");
    assert!(all <= i64::from(SESSIONS) + 2 * 3, "{all} sessions of two replicas behind a pooler");
}

/// Whatever is asked of it: who finds no connection free is told to come back.
#[tokio::test(flavor = "multi_thread")]
async fn the_connections_of_the_api_are_bounded() {
    const CONNECTIONS: usize = 3;
    const ASKING: usize = 10;
    let db = TestDb::new().await;
    let (client, user) = (db.client().await, db.client().await);
    let toml = format!(
        "[database]\nurl = {:?}\nlock_timeout = \"0s\"\nstatement_timeout = \"0s\"\n\
         [http]\nrate_limit = 0\nconnections = {CONNECTIONS}",
        db.url()
    );
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    user.batch_execute("BEGIN; LOCK TABLE musterd.batches IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let asking = || daemon.get("/v1/batches");
    let mut answers: FuturesUnordered<_> = (0..ASKING).map(|_| asking()).collect();
    for _ in 0..ASKING - CONNECTIONS {
        let (status, answer) = within(SOON, answers.next()).await.unwrap().unwrap();
        assert_eq!(status, 503, "{answer}");
    }
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'musterd api'";
    let sessions: i64 = ask(&client, sessions).await;
    assert!(sessions <= CONNECTIONS as i64, "{sessions} sessions of the API");
    user.batch_execute("COMMIT").await.unwrap();
    while let Some(answer) = within(SOON, answers.next()).await {
        answer.unwrap();
    }
}
