//! Handlers in any language: real programs, a real HTTP server that misbehaves, real functions of PostgreSQL.

mod cli;
mod examples;
mod exec;
mod exec_death;
mod exec_orphans;
mod exec_outage;
mod exec_replies;
mod exec_rights;
mod http;
mod http_limits;
mod http_waits;
pub(crate) mod server;
mod sql;

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio_postgres::Client;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::{SOON, eventually};

/// Short waits between tries, so that tests need not wait.
const QUICK: &str = "[retry]\nbase = \"10ms\"\nmax = \"20ms\"\n[claim]\npoll_interval = \"50ms\"\n";

/// A daemon with a database of its own.
struct Site {
    daemon: Daemon,
    client: Client,
    db: TestDb,
}

/// One row as it ended.
#[derive(Debug, PartialEq)]
struct Ended {
    line: i32,
    state: String,
    attempt: i32,
    result: Option<Value>,
    error: String,
}

impl Site {
    /// A daemon with these `[handlers]` that is ready.
    async fn start(handlers: &str) -> Self {
        let db = TestDb::new().await;
        let daemon = Daemon::builder(&db, &format!("{QUICK}{handlers}")).start();
        daemon.wait_ready().await;
        Self { client: db.client().await, daemon, db }
    }

    /// A batch of numbered rows, from 1.
    async fn submit(&self, command: &str, rows: i32) -> i64 {
        let rows: Vec<Value> = (1..=rows).map(|n| serde_json::json!({ "n": n })).collect();
        self.submit_rows(command, &Value::Array(rows)).await
    }

    async fn submit_rows(&self, command: &str, rows: &Value) -> i64 {
        submit_rows(&self.client, command, rows).await
    }

    /// Waits for the end of a batch; its rows by line.
    async fn ended(&self, batch: i64) -> Vec<Ended> {
        ended(&self.client, batch).await
    }

    /// Runs a batch of numbered rows to its end.
    async fn run(&self, command: &str, rows: i32) -> Vec<Ended> {
        let batch = self.submit(command, rows).await;
        self.ended(batch).await
    }

    /// Runs a task to its end: state, result, error.
    async fn task(&self, command: &str, payload: &Value) -> (String, Option<Value>, String) {
        let id: i64 = self
            .client
            .query_one("SELECT musterd.enqueue($1, $2)", &[&command, payload])
            .await
            .unwrap()
            .get(0);
        eventually(SOON, "the task ends", async || {
            let sql = "SELECT state::text, result, COALESCE(error, '') FROM musterd.tasks
                        WHERE id = $1 AND state IN ('succeeded', 'failed', 'aborted')";
            let row = self.client.query_opt(sql, &[&id]).await.unwrap()?;
            Some((row.get(0), row.get(1), row.get(2)))
        })
        .await
    }
}

async fn submit_rows(client: &Client, command: &str, rows: &Value) -> i64 {
    let sql = "SELECT musterd.submit_batch($1, $2::jsonb, max_failed => 1000000)";
    client.query_one(sql, &[&command, rows]).await.unwrap().get(0)
}

async fn ended(client: &Client, batch: i64) -> Vec<Ended> {
    eventually(SOON, "the batch ends", async || {
        let sql = "SELECT 1 FROM musterd.batches WHERE id = $1 AND summarized_at IS NOT NULL";
        client.query_opt(sql, &[&batch]).await.unwrap().map(drop)
    })
    .await;
    let sql = "SELECT line, state::text, attempt, result, COALESCE(error, '') FROM musterd.results
                WHERE batch_id = $1 ORDER BY line";
    let read = |row: &tokio_postgres::Row| Ended {
        line: row.get(0),
        state: row.get(1),
        attempt: row.get(2),
        result: row.get(3),
        error: row.get(4),
    };
    client.query(sql, &[&batch]).await.unwrap().iter().map(read).collect()
}

fn all_succeeded(rows: &[Ended], count: usize) {
    assert_eq!(rows.len(), count);
    let bad: Vec<&Ended> = rows.iter().filter(|row| row.state != "succeeded").collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// A program in a file of its own.
fn program(text: &str) -> PathBuf {
    let file = run::new_dir("program").join("program.py");
    std::fs::write(&file, text).unwrap();
    file
}

/// The examples of the manual.
fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/handlers").join(name)
}

/// A Python handler: `body` sees `n` (the row's number), `row` and `request`, and sets `reply`.
fn python(body: &str) -> PathBuf {
    let indented: String = body.lines().map(|line| format!("    {line}\n")).collect();
    program(&format!(
        "import json, os, sys, time, subprocess, signal\n\
         for text in sys.stdin:\n\
         \x20   request = json.loads(text)\n\
         \x20   row = request.get('row') or request['task']\n\
         \x20   n = (row.get('input') or row.get('payload') or {{}}).get('n')\n\
         \x20   reply = {{'line': row.get('line'), 'outcome': 'succeeded', 'result': {{'n': n}}}}\n\
         {indented}\
         \x20   sys.stdout.write(json.dumps(reply) + '\\n')\n\
         \x20   sys.stdout.flush()\n"
    ))
}

/// `[handlers.work]` of kind exec for a Python file, with more keys after it.
fn exec_config(file: &Path, more: &str) -> String {
    format!(
        "[handlers.work]\nkind = \"exec\"\nargv = [\"python3\", {:?}]\ntimeout = \"30s\"\n{more}",
        file.display().to_string()
    )
}
