//! Two replicas behind PgBouncer in transaction mode do everything they do without it, with a way past it and without.
//!
//! A cross-section; `make test-pooler` runs all suites of batches and tasks that way.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::suite::support::audit;
use crate::suite::support::config::json;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::pgbouncer;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{PATIENCE, ask, assert_accounts_balance, ended, submit};

const SOON: Duration = Duration::from_secs(60);

const SETTINGS: &str = r#"
[claim]
poll_interval = "100ms"
[completion]
sweep_min = "1s"
sweep_max = "2s"
[retry]
base = "10ms"
max = "50ms"
[queues.default]
fibers = 4
[liveness]
backend = "postgres"
heartbeat_interval = "500ms"
heartbeat_ttl = "8s"
recovery_interval = "300ms"
settle = "1s"
rows_ttl = "2m"
[handlers.flaky]
kind = "builtin"
builtin = "fail"
rate = 0.3
[handlers.forever]
kind = "builtin"
builtin = "sleep"
duration = "1h"
timeout = "2h"
[handlers.slow]
kind = "builtin"
builtin = "sleep"
duration = "30ms"
[handlers.plan]
kind = "sql"
procedure = "app.plan"
[handlers.part]
kind = "sql"
procedure = "app.part"
[handlers.endless]
kind = "sql"
procedure = "app.endless"
[handlers.twice]
kind = "sql"
function = "app.twice"
[handlers.pipe]
kind = "exec"
argv = ["python3", "-c", """
import json, sys
for request in map(json.loads, sys.stdin):
    line = request["row"]["line"]
    print(json.dumps({"line": line, "outcome": "succeeded", "outputs": {"lines.txt": f"{line}\\n"}}), flush=True)
"""]
"#;

const ROUTINES: &str = "
CREATE SCHEMA app;
CREATE TABLE app.effects (task bigint PRIMARY KEY);
CREATE TABLE app.lines (batch bigint, line int, PRIMARY KEY (batch, line));
CREATE PROCEDURE app.part(task bigint, payload jsonb) LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (task) $$;
CREATE PROCEDURE app.plan(task bigint, payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.effects VALUES (task);
    PERFORM musterd.spawn('part', '{}', task) FROM generate_series(1, 4);
END $$;
CREATE PROCEDURE app.endless(task bigint, payload jsonb) LANGUAGE sql AS $$ SELECT pg_sleep(3600) $$;
CREATE FUNCTION app.twice(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE sql AS $$
    WITH given AS MATERIALIZED (SELECT * FROM jsonb_to_recordset(rows) AS r (line int, input int)),
    kept AS (INSERT INTO app.lines SELECT batch, g.line FROM given g)
    SELECT g.line, 'succeeded', to_jsonb(g.input * 2), NULL::text FROM given g $$;";

struct Site {
    db: TestDb,
    client: tokio_postgres::Client,
    replicas: [Daemon; 2],
}

impl Site {
    async fn start(past: bool) -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        audit::install(&client).await;
        client.batch_execute(ROUTINES).await.unwrap();
        let url = pgbouncer::shared().url(&db);
        let more = if past { format!("direct_url = {:?}", db.url()) } else { String::new() };
        let toml = format!("{SETTINGS}\n[database]\nurl = {url:?}\n{more}");
        let replicas = [0, 1].map(|_| Daemon::builder(&db, &toml).start());
        for replica in &replicas {
            replica.wait_ready().await;
        }
        Self { db, client, replicas }
    }

    async fn json(&self, args: &[&str]) -> Value {
        let output = self.replicas[0].config().musterd(args).await;
        assert!(!output.stdout.is_empty(), "{output:?}");
        json(&output)
    }

    /// A file of rows, as a producer has it.
    fn rows(&self, count: usize) -> PathBuf {
        let file = self.replicas[0].config().dir().join("rows.ndjson");
        let lines: String = (1..=count).map(|n| format!("{{\"n\": {n}}}\n")).collect();
        std::fs::write(&file, lines).unwrap();
        file
    }

    /// Rows of the file by COPY, appended to, watched to the end and exported, all by the command line.
    async fn by_command_line(&self) {
        let file = self.rows(3_000);
        let file = file.to_str().unwrap();
        let held = self.json(&["submit", file, "--command", "echo", "--hold", "--json"]).await;
        let id = held["id"].to_string();
        let appended = self.json(&["batch", "append", &id, file, "--json"]).await;
        assert_eq!(appended["rows"], 6_000, "{appended}");
        self.json(&["batch", "release", &id, "--json"]).await;
        let end = ended(&self.client, id.parse().unwrap()).await;
        assert_eq!((end.state.as_str(), end.succeeded), ("succeeded", 6_000));
        let why = self.json(&["why", "batch", &id, "--json"]).await;
        assert!(why.is_object() || why.is_array(), "{why}");
        let page = self.json(&["batch", "rows", &id, "--json"]).await;
        assert!(page.to_string().contains("succeeded"), "{page}");
    }

    async fn by_handlers(&self) {
        let client = &self.client;
        let flaky = submit(client, "flaky", 500, "max_failed => 500, on_done => 'part'").await;
        let twice = submit(client, "twice", 1_000, "").await;
        let pipe = submit(client, "pipe", 300, "").await;
        let plans = "SELECT count(musterd.enqueue('plan')) FROM generate_series(1, 30)";
        client.execute(plans, &[]).await.unwrap();
        for batch in [flaky, twice, pipe] {
            let end = ended(client, batch).await;
            assert_eq!((end.state.as_str(), end.queued + end.running), ("succeeded", 0), "{end:?}");
        }
        eventually(PATIENCE, "every family ends", async || {
            let open =
                "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed', 'aborted')";
            (ask::<i64>(client, open).await == 0).then_some(())
        })
        .await;
        let files = format!("SELECT outputs::text LIKE '%lines.txt%' FROM musterd.batches WHERE id = {pipe}");
        assert!(ask::<bool>(client, &files).await, "the upload read its batch through the pooler");
        // Once each: thirty families of five, and the task at the end of the flaky batch.
        assert_eq!(ask::<i64>(client, "SELECT count(*) FROM app.effects").await, 30 * 5 + 1);
        assert_eq!(ask::<i64>(client, "SELECT count(*) FROM app.lines").await, 1_000);
        let wrong = "SELECT count(*) FROM musterd.batches b CROSS JOIN LATERAL musterd.batch_rows(b.id) r
                      WHERE b.command = 'twice' AND r.result::text::int IS DISTINCT FROM 2 * r.input::text::int";
        assert_eq!(ask::<i64>(client, wrong).await, 0);
    }

    async fn abort(&self) {
        let batch = submit(&self.client, "forever", 50, "").await;
        eventually(PATIENCE, "it runs", async || {
            let running = format!(
                "SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL AND batch_id = {batch}"
            );
            (ask::<i64>(&self.client, &running).await > 0).then_some(())
        })
        .await;
        self.json(&["batch", "abort", &batch.to_string(), "--json"]).await;
        let end = ended(&self.client, batch).await;
        assert_eq!((end.state.as_str(), end.aborted), ("aborted", 50));
    }

    /// The server stops what nobody waits for any more: the request for it takes the way through the pooler.
    async fn abort_in_the_server(&self) {
        let asleep = async |wanted: i64, what: &str| {
            eventually(PATIENCE, what, async || {
                let sleeping = "SELECT count(*) FROM pg_stat_activity
                                 WHERE datname = current_database() AND state = 'active' AND wait_event = 'PgSleep'";
                (ask::<i64>(&self.client, sleeping).await == wanted).then_some(())
            })
            .await;
        };
        let task: i64 = ask(&self.client, "SELECT musterd.enqueue('endless')").await;
        asleep(1, "the procedure runs").await;
        self.json(&["task", "abort", &task.to_string(), "--json"]).await;
        asleep(0, "the procedure is stopped").await;
    }

    /// One replica dies in the middle; the other finishes, and what was written is not run again.
    async fn death(&self) {
        let batch = submit(&self.client, "slow", 600, "").await;
        let pid = i32::try_from(self.replicas[0].pid()).unwrap();
        eventually(PATIENCE, "both have begun", async || {
            let held = "SELECT count(DISTINCT worker) FROM musterd.blocks WHERE worker IS NOT NULL";
            (ask::<i64>(&self.client, held).await == 2).then_some(())
        })
        .await;
        self.replicas[0].signal(Signal::KILL);
        let end = ended(&self.client, batch).await;
        assert_eq!((end.state.as_str(), end.succeeded), ("succeeded", 600));
        let dead = "SELECT state FROM musterd.workers WHERE pid = $1";
        assert_eq!(self.client.query_one(dead, &[&pid]).await.unwrap().get::<_, String>(0), "dead");
        self.replicas[1].signal(Signal::TERM);
        assert!(self.replicas[1].wait_exit(SOON).await.success());
    }

    async fn accounts(&self) {
        assert_accounts_balance(&self.client).await;
        assert_eq!(audit::violations(&self.client).await, Vec::<String>::new());
        let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        assert_eq!(ask::<i64>(&self.client, deadlocks).await, 0);
        for line in self.replicas.iter().flat_map(Daemon::log) {
            assert!(!line.contains("prepared statement"), "{line}");
        }
        assert!(!self.db.name().is_empty());
    }

    async fn walk(self) {
        self.by_command_line().await;
        self.by_handlers().await;
        self.abort().await;
        self.abort_in_the_server().await;
        self.death().await;
        self.accounts().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_work_through_a_pooler_with_a_way_past_it() {
    if has("pgbouncer") {
        Site::start(true).await.walk().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_work_through_a_pooler_by_polling() {
    if has("pgbouncer") {
        Site::start(false).await.walk().await;
    }
}
