//! What tests of outputs stand on: batches that are over and not finished, both stores, a worker in the test's process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use musterd::config::{Config, Given, load};
use musterd::daemon::Daemon;
use musterd::flow::complete::Completer;
use musterd::flow::outputs::Uploader;
use musterd::handler::{self, Handler, Outcome, RowCall};
use musterd::metrics::Metrics;
use musterd::objects;
use musterd::signal::Stop;
use musterd::store::Store;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::services::{self, S3};
use crate::suite::support::wait::{SOON, eventually};

/// On a machine that has other things to do.
pub(crate) const PATIENCE: Duration = SOON;

/// `[outputs]` with a directory of its own.
pub(crate) fn file_store() -> (String, PathBuf) {
    let dir = run::new_dir("outputs");
    (format!("[outputs]\ndir = {:?}\n", dir.display().to_string()), dir)
}

/// `[outputs]` with a bucket of its own, and where the server keeps it.
pub(crate) fn s3_store() -> (String, PathBuf) {
    let bucket = services::s3().new_bucket();
    let toml = s3_toml(&services::s3().endpoint(), &bucket, S3::ACCESS_KEY, S3::SECRET_KEY);
    (toml, run::dir().join("s3").join(bucket))
}

pub(crate) fn s3_toml(endpoint: &str, bucket: &str, access: &str, secret: &str) -> String {
    format!(
        "[outputs]\nstore = \"s3\"\n[outputs.s3]\nendpoint = {endpoint:?}\nbucket = {bucket:?}\naccess_key = {access:?}\n\
         secret_key = {secret:?}\n"
    )
}

/// A configuration as a worker would load it.
pub(crate) fn config(db: &TestDb, toml: &str) -> Config {
    // As main does: two libraries of ours bring rustls, and neither may choose for the other.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let files = TestConfig::new(db, toml);
    let given = Given { file: Some(files.file().into()), env: Some(Vec::new()), ..Given::default() };
    load(&given).unwrap_or_else(|error| panic!("{error}")).config
}

/// What a worker finishes batches with.
pub(crate) fn completer(db: &TestDb, toml: &str) -> Completer {
    let config = config(db, toml);
    let store = Store::open(&config.database).unwrap();
    let objects = objects::Store::open(&config.outputs).unwrap();
    let uploader = Uploader { pool: store.uploads.clone(), objects };
    Completer { store, uploader, config: config.completion, cache: None, metrics: Metrics::default() }
}

/// A batch whose last row has just ended: every line adds `<line>:<filler>` to `out.txt`.
pub(crate) async fn over(client: &Client, rows: i32, filler: &str) -> i64 {
    let submit =
        "SELECT musterd.submit_batch('noop', ARRAY(SELECT to_jsonb(n) FROM generate_series(1, $1::int) n))";
    // One transaction: a worker that is running must not claim the lines in between.
    client.batch_execute("BEGIN").await.unwrap();
    let id: i64 = client.query_one(submit, &[&rows]).await.unwrap().get(0);
    end_lines(client, id, 1, rows, filler).await;
    client.batch_execute("COMMIT").await.unwrap();
    id
}

/// Gives the lines their results, as a flush would, and moves the cursor behind them.
pub(crate) async fn end_lines(client: &Client, id: i64, first: i32, last: i32, filler: &str) {
    let end = "WITH cursor AS (UPDATE musterd.batches SET next_line = $3 + 1 WHERE id = $1 RETURNING generation)
        INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, outputs)
        SELECT $1, min(n), gen_random_uuid(), 1, min(c.generation), 1, int4multirange(int4range(min(n), max(n) + 1)), count(*), 0,
               string_agg(jsonb_build_object('out.txt', n || ':' || $4 || E'\\n')::text, E'\\n' ORDER BY n)
          FROM cursor c, generate_series($2::int, $3::int) n GROUP BY (n - 1) / 500";
    client.execute(end, &[&id, &first, &last, &filler]).await.unwrap();
}

/// What those lines make of `out.txt`.
pub(crate) fn text(lines: impl Iterator<Item = i32>, filler: &str) -> String {
    lines.map(|line| format!("{line}:{filler}\n")).collect()
}

/// The batch's outputs, as its end says.
pub(crate) async fn outputs(client: &Client, id: i64) -> serde_json::Value {
    let sql = "SELECT COALESCE(outputs, 'null') FROM musterd.batches WHERE id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

pub(crate) async fn state(client: &Client, id: i64) -> String {
    let sql = "SELECT state::text FROM musterd.tasks WHERE id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

pub(crate) async fn ended(client: &Client, id: i64) -> String {
    eventually(PATIENCE, "the batch has ended", async || {
        let state = state(client, id).await;
        ["succeeded", "failed", "aborted"].contains(&state.as_str()).then_some(state)
    })
    .await
}

/// Where the files of one end of a batch lie: `end` is its generation and its number of rows.
pub(crate) async fn folder(client: &Client, id: i64, end: &str) -> String {
    let sql = "SELECT uid FROM musterd.batches WHERE id = $1";
    let uid = client.query_one(sql, &[&id]).await.unwrap().get(0);
    format!("batches/{}/{end}", handler::batch_key(id, uid))
}

/// Everything below a directory, with slashes, in order.
pub(crate) fn files_below(dir: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path => found.push(path.strip_prefix(dir).unwrap().display().to_string()),
            }
        }
    }
    // What the S3 server keeps for itself.
    found.retain(|name| !name.contains(".metadata.json") && !name.contains(".internal.json"));
    found.sort();
    found
}

/// A worker in the test's process, with one handler of the test's own.
pub(crate) struct Worker {
    pub(crate) stop: Stop,
    running: JoinHandle<()>,
}

impl Worker {
    pub(crate) async fn start(
        db: &TestDb,
        toml: &str,
        command: &str,
        answer: impl Fn(&RowCall<'_>) -> BoxFuture<'static, Outcome> + Send + Sync + 'static,
    ) -> Self {
        let config = config(db, toml);
        let registry = config.registry().unwrap();
        let registry = registry.with(command, Arc::new(Answering(answer)), handler::Config::default());
        let daemon = Daemon::prepare(config, registry).await.unwrap();
        let stop = Stop::default();
        let told = stop.clone();
        #[expect(clippy::disallowed_methods, reason = "the handle is awaited by stop, and aborted on drop")]
        let running = tokio::spawn(async move {
            assert!(daemon.run(told).await.unwrap().is_clean());
        });
        Self { stop, running }
    }

    pub(crate) async fn stop(mut self) {
        self.stop.drain.cancel();
        (&mut self.running).await.unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.running.abort();
    }
}

struct Answering<F>(F);

impl<F> Handler for Answering<F>
where
    F: Fn(&RowCall<'_>) -> BoxFuture<'static, Outcome> + Send + Sync + 'static,
{
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        (self.0)(&call)
    }
}
