//! Rows and tasks from end to end on the oldest and the newest PostgreSQL that the tests know.
//!
//! A cross-section, by the command line and the functions of the SQL API alone; `make test-versions` runs every suite on every
//! version.

use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::suite::dev::{Dev, Home};
use crate::suite::support::config::{self, stderr};
use crate::suite::support::database::connect;
use crate::suite::support::manifests::{has, root};
use crate::suite::support::services::free_port;
use crate::suite::support::tasks::{QUICK, becomes, number, text};

const HANDLERS: &str = r#"
[handlers.check]
kind = "sql"
function = "app.check"
block_size = 50
[handlers.copy]
kind = "builtin"
builtin = "echo"
output = "copy.txt"
[handlers.plan]
kind = "sql"
procedure = "app.plan"
[handlers.part]
kind = "sql"
procedure = "app.part"
"#;

/// `check` fails every tenth row until the table `repaired` has one, and asks for a second try of every third. The second part
/// of a plan fails in its first try; a sequence remembers that try, because a rollback leaves it as it is.
const ROUTINES: &str = "
CREATE SCHEMA app;
CREATE TABLE app.effects (batch bigint, line int, PRIMARY KEY (batch, line));
CREATE TABLE app.repaired (what text);
CREATE FUNCTION app.check(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE sql AS $$
    WITH given AS MATERIALIZED (
        SELECT r.line, r.input,
               CASE WHEN r.line % 10 = 0 AND NOT EXISTS (SELECT FROM app.repaired) THEN 'failed'
                    WHEN r.line % 3 = 0 AND r.attempt = 1 THEN 'retry'
                    ELSE 'succeeded' END AS outcome
          FROM jsonb_to_recordset(rows) AS r (line int, input jsonb, attempt int)),
    effects AS (INSERT INTO app.effects SELECT batch, g.line FROM given g WHERE g.outcome = 'succeeded')
    SELECT g.line, g.outcome, g.input -> 'n', CASE WHEN g.outcome <> 'succeeded' THEN 'refused ' || g.line END
      FROM given g $$;
CREATE SEQUENCE app.tries;
CREATE PROCEDURE app.part(task bigint, payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    IF payload ->> 'part' = '2' AND nextval('app.tries') = 1 THEN
        RAISE EXCEPTION 'not in the first try';
    END IF;
END $$;
CREATE PROCEDURE app.plan(task bigint, payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM musterd.spawn('part', jsonb_build_object('part', n), task) FROM generate_series(1, 4) n;
    PERFORM musterd.submit_batch('noop', '[1, 2, 3]'::jsonb, parent_id => task);
    PERFORM musterd.enqueue_after('echo', '\"after the plan\"', ARRAY[task], dedup_key => 'report');
END $$;";

const ROWS: u64 = 300;

/// A private server of one version with a worker on it, as `musterd dev` starts them.
struct Site {
    major: u32,
    home: Home,
    dev: Dev,
    url: String,
    client: Client,
}

impl Site {
    /// None where that version is not installed, which in CI is a failure.
    async fn start(major: u32) -> Option<Self> {
        if !has(&format!("postgres-{major}")) {
            return None;
        }
        let home = Home::new();
        let listen = format!("[http]\nlisten = \"127.0.0.1:{}\"\n", free_port());
        std::fs::write(home.0.join("musterd.toml"), format!("{QUICK}{listen}{HANDLERS}")).unwrap();
        let rows: String = (1..=ROWS).map(|n| format!("{{\"n\": {n}}}\n")).collect();
        std::fs::write(home.0.join("rows.ndjson"), rows).unwrap();
        let programs: PathBuf = root().join(format!("target/postgres-versions/{major}/native/bin"));
        let dev = home.start_with(&["--ephemeral", "--config", "musterd.toml"], |command| {
            command.env("MUSTERD_PG_BIN", programs);
        });
        let url = dev.url().await;
        let (client, _connection) = connect(&url).await;
        client.batch_execute(ROUTINES).await.unwrap();
        Some(Self { major, home, dev, url, client })
    }

    /// What a command that succeeds prints with `--json`.
    async fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let output = self.home.musterd(&args).await;
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        config::json(&output)
    }

    async fn doctor(&self) {
        let version = number(&self.client, "SELECT current_setting('server_version_num')::int / 10000").await;
        assert_eq!(version, i64::from(self.major));
        // A command with a configuration does not look for a running dev.
        let database = format!("database.url={}", self.url);
        let with = ["--config", "musterd.toml", "--set", &database, "--set", "liveness.backend=postgres"];
        let found = self.json(&[&["doctor", "--strict"], &with[..]].concat()).await;
        assert_eq!(found["verdict"], "pass", "{found}");
        let server = found["checks"].as_array().unwrap().iter().find(|check| check["name"] == "PostgreSQL");
        assert!(
            server.unwrap()["found"].as_str().unwrap().starts_with(&format!("{}.", self.major)),
            "{found}"
        );
        assert!(self.json(&["migrate", "--status"]).await.as_array().is_some_and(|steps| !steps.is_empty()));
    }

    /// An `sql` handler over blocks: rows that succeed at once, in their second try, and not at all. Gives the batch's id.
    async fn rows(&self) -> String {
        let submit = ["submit", "rows.ndjson", "--command", "check", "--max-failed", "10%", "--wait"];
        let end = self.json(&submit).await;
        assert_eq!(counts(&end), json!(["succeeded", 1, 300, 270, 30, 0]));
        let id = end["id"].to_string();
        let page = self.json(&["batch", "rows", &id, "--from", "9", "--limit", "3"]).await;
        let seen: Vec<Value> = page["rows"].as_array().unwrap().iter().map(brief).collect();
        let expected = [
            json!([9, "succeeded", 2, null, { "n": 9 }, 9]),
            json!([10, "failed", 1, "refused 10", { "n": 10 }, 10]),
            json!([11, "succeeded", 1, null, { "n": 11 }, 11]),
        ];
        assert_eq!(seen, expected);
        assert_eq!(page["next_from"], 12);
        let failed = self.json(&["batch", "rows", &id, "--failed"]).await;
        assert_eq!(failed["rows"].as_array().unwrap().len(), 30);
        self.effects_are(&id, 270).await;
        id
    }

    async fn effects_are(&self, batch: &str, wanted: i64) {
        let effects = format!("SELECT count(*) FROM app.effects WHERE batch = {batch}");
        assert_eq!(number(&self.client, &effects).await, wanted);
    }

    /// The failed rows as a file, which is submitted again with a command that writes an output file.
    async fn export_and_outputs(&self, batch: &str) {
        let written = self.json(&["batch", "export", batch, "--failed", "-o", "failed.ndjson"]).await;
        assert_eq!(written["rows"], 30);
        let copy = ["submit", "failed.ndjson", "--exported", "--command", "copy", "--wait"];
        let end = self.json(&copy).await;
        assert_eq!(counts(&end), json!(["succeeded", 1, 30, 30, 0, 0]));
        let id = end["id"].to_string();
        let listed = self.json(&["batch", "outputs", &id]).await;
        assert_eq!((&listed["file_count"], &listed["files"][0]["rows"]), (&json!(1), &json!(30)));
        let download = self.home.musterd(&["batch", "outputs", &id, "--download", "copies"]).await;
        assert!(download.status.success(), "{}", stderr(&download));
        let lines: String = (1..=ROWS / 10).map(|n| format!("{{\"n\": {}}}\n", n * 10)).collect();
        assert_eq!(std::fs::read_to_string(self.home.0.join("copies/copy.txt")).unwrap(), lines);
    }

    /// What made the rows fail is repaired: they run again in the same batch, and the others do not.
    async fn redrive(&self, batch: &str) {
        self.client.batch_execute("INSERT INTO app.repaired VALUES ('it')").await.unwrap();
        assert_eq!(self.json(&["batch", "redrive", batch]).await["state"], "running");
        let watched = self.home.musterd(&["batch", "watch", batch]).await;
        assert!(watched.status.success(), "{}", stderr(&watched));
        let end = self.json(&["batch", "show", batch]).await;
        assert_eq!(counts(&end), json!(["succeeded", 2, 300, 300, 0, 0]));
        self.effects_are(batch, 300).await;
    }

    /// A parent with four children and a batch, one child tried twice, and a task that waits for all of them.
    async fn families(&self) {
        let parent = self.json(&["enqueue", "plan", "--wait"]).await;
        assert_eq!((&parent["state"], &parent["children"]), (&json!("succeeded"), &json!(5)));
        let parts = self.json(&["task", "list", "--parent", &parent["id"].to_string()]).await;
        let mut seen: Vec<Value> = parts.as_array().unwrap().iter().map(part).collect();
        seen.sort_by_key(|part| part[0].as_i64());
        let part = |part: u32, attempt: u32| json!([part, "succeeded", attempt]);
        assert_eq!(seen, [part(1, 1), part(2, 2), part(3, 1), part(4, 1)]);
        let batches = self.json(&["batch", "list", "--command", "noop"]).await;
        let batch = &batches["batches"][0];
        assert_eq!(batch["parent_id"], parent["id"]);
        assert_eq!(counts(batch), json!(["succeeded", 1, 3, 3, 0, 0]));
        let after = "SELECT state, result FROM musterd.tasks WHERE command = 'echo'";
        becomes(&self.client, after, "succeeded|\"after the plan\"").await;
    }

    /// The same family by `process_tasks`, in a transaction and in a queue that no worker has; the batch below it needs one.
    async fn in_sql(&self) {
        let sql = "BEGIN; SELECT musterd.enqueue('plan', queue => 'offline');";
        self.client.batch_execute(sql).await.unwrap();
        let state = "SELECT state FROM musterd.tasks WHERE command = 'plan' AND queue = 'offline'";
        let ended = "SELECT count(*) FROM musterd.tasks WHERE command = 'part' AND queue = 'offline' AND state = 'succeeded'";
        self.client.batch_execute("CALL musterd.process_tasks(p_queue => 'offline')").await.unwrap();
        assert_eq!(text(&self.client, state).await, "waiting");
        self.client.batch_execute("CALL musterd.process_tasks(p_queue => 'offline')").await.unwrap();
        assert_eq!(number(&self.client, ended).await, 4);
        self.client.batch_execute("ROLLBACK").await.unwrap();
    }

    async fn walk(self) {
        self.doctor().await;
        let batch = self.rows().await;
        self.export_and_outputs(&batch).await;
        self.redrive(&batch).await;
        self.families().await;
        self.in_sql().await;
        self.dev.process.signal(Signal::TERM);
        self.dev.ends_well().await;
    }
}

/// State, generation, rows, succeeded, failed and aborted of a batch.
fn counts(batch: &Value) -> Value {
    ["state", "generation", "rows", "succeeded", "failed", "aborted"].map(|key| batch[key].clone()).into()
}

fn brief(row: &Value) -> Value {
    ["line", "state", "attempt", "error", "input", "result"].map(|key| row[key].clone()).into()
}

fn part(task: &Value) -> Value {
    json!([task["payload"]["part"], task["state"], task["attempt"]])
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_and_tasks_work_on_the_oldest_postgresql() {
    if let Some(site) = Site::start(14).await {
        site.walk().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_and_tasks_work_on_the_newest_postgresql() {
    if let Some(site) = Site::start(18).await {
        site.walk().await;
    }
}
