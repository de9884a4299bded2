//! A worker in the test's own process, with handlers of the test's own: every call is seen, and held or failed at will.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use musterd::config::{Given, load};
use musterd::daemon::{Daemon, DaemonError};
use musterd::handler::{Config, Done, Handler, Outcome, Registry, RowCall};
use musterd::json::Json;
use musterd::signal::Stop;
use musterd::store::batches::{self, Progress};
use musterd::supervisor::Ended;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use super::config::TestConfig;
use super::daemon::{http_get, metric};
use super::database::TestDb;
use super::wait::{SOON, eventually, within};

/// How long anything may take that nothing holds up, on a machine that has other things to do.
pub(crate) const PATIENCE: Duration = SOON;

/// What a handler was called with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) batch: i64,
    pub(crate) line: i32,
    pub(crate) attempt: i32,
    pub(crate) input: String,
}

type Answer = Box<dyn Fn(Call) -> BoxFuture<'static, Outcome> + Send + Sync>;

/// A handler that answers as the test says and remembers its calls.
pub(crate) struct Script {
    answer: Answer,
    calls: Mutex<Vec<Call>>,
}

impl Script {
    pub(crate) fn new<F>(answer: impl Fn(Call) -> F + Send + Sync + 'static) -> Arc<Self>
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        Arc::new(Self { answer: Box::new(move |call| Box::pin(answer(call))), calls: Mutex::default() })
    }

    /// Succeeds at once.
    pub(crate) fn succeeding() -> Arc<Self> {
        Self::new(|_| async { succeeded() })
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// How often each line was run.
    pub(crate) fn runs(&self) -> BTreeMap<(i64, i32), usize> {
        let mut runs = BTreeMap::new();
        for call in self.calls.lock().unwrap().iter() {
            *runs.entry((call.batch, call.line)).or_default() += 1;
        }
        runs
    }
}

impl Handler for Script {
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let RowCall { batch, line, attempt, .. } = call;
        let call = Call { batch, line, attempt, input: call.input.to_owned() };
        self.calls.lock().unwrap().push(call.clone());
        (self.answer)(call)
    }
}

pub(crate) fn succeeded() -> Outcome {
    Outcome::Succeeded(Done::default())
}

pub(crate) fn succeeded_with(result: &str) -> Outcome {
    Outcome::Succeeded(Done { result: Some(Json::from_text(result)), ..Done::default() })
}

pub(crate) fn retry(error: &str) -> Outcome {
    Outcome::Retry { error: error.into(), after: None }
}

/// Quick retries, claims and sweeps: a test waits for the event, not for the clock.
pub(crate) const QUICK: &str = r#"
[claim]
poll_interval = "50ms"
[retry]
base = "10ms"
max = "50ms"
[completion]
sweep_min = "200ms"
sweep_max = "300ms"
"#;

/// A running worker; stopped by `stop`, or cut off when dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) stop: Stop,
    running: JoinHandle<Result<Ended, DaemonError>>,
    http_port: u16,
}

impl Worker {
    /// With [`QUICK`] beside `toml`, which may not name the same sections.
    pub(crate) async fn start(db: &TestDb, toml: &str, handlers: &[(&str, Arc<Script>)]) -> Self {
        Self::start_exactly(db, &format!("{QUICK}\n{toml}"), handlers).await
    }

    pub(crate) async fn start_exactly(db: &TestDb, toml: &str, handlers: &[(&str, Arc<Script>)]) -> Self {
        let files = TestConfig::new(db, toml);
        let given = Given { file: Some(files.file().into()), env: Some(Vec::new()), ..Given::default() };
        let loaded = load(&given).unwrap_or_else(|error| panic!("{error}"));
        let with = |registry: Registry, (command, script): &(&str, Arc<Script>)| {
            registry.with(command, Arc::clone(script) as Arc<dyn Handler>, Config::default())
        };
        let registry = handlers.iter().fold(Registry::default(), with);
        let daemon = Daemon::prepare(loaded.config, registry).await.unwrap();
        let stop = Stop::default();
        #[expect(clippy::disallowed_methods, reason = "the handle is kept, and aborted on drop")]
        let running = tokio::spawn(daemon.run(stop.clone()));
        Self { stop, running, http_port: files.http_port() }
    }

    /// Drains it and waits for its end.
    pub(crate) async fn stop(mut self) -> Ended {
        self.stop.drain.cancel();
        within(PATIENCE, &mut self.running).await.unwrap().unwrap()
    }

    /// Ends it as a crash would: nothing is given back, nothing is said.
    pub(crate) async fn crash(mut self) {
        self.running.abort();
        let _ = (&mut self.running).await;
    }

    pub(crate) async fn is_ready(&self) -> bool {
        http_get(self.http_port, "/readyz").await.is_ok_and(|(status, _)| status == 200)
    }

    /// The value of a metric without labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        metric(self.http_port, name).await
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// A batch of `rows` rows `1, 2, 3 …`, with further arguments of `submit_batch` such as `max_failed => 3`.
pub(crate) async fn submit(client: &Client, command: &str, rows: i32, options: &str) -> i64 {
    let comma = if options.is_empty() { "" } else { ", " };
    let sql = format!(
        "SELECT musterd.submit_batch($1, ARRAY(SELECT to_jsonb(g) FROM generate_series(1, $2) g){comma}{options})"
    );
    client.query_one(&sql, &[&command, &rows]).await.unwrap().get(0)
}

/// A batch as `batch_progress` has it.
pub(crate) async fn progress(client: &Client, batch: i64) -> Progress {
    batches::progress(client, batch).await.unwrap().unwrap()
}

/// Waits for the end of a batch.
pub(crate) async fn ended(client: &Client, batch: i64) -> Progress {
    eventually(PATIENCE, &format!("batch {batch} ends"), async || {
        let progress = progress(client, batch).await;
        progress.is_over().then_some(progress)
    })
    .await
}

/// State, succeeded, failed and aborted rows of a batch that ended.
pub(crate) async fn end_of(client: &Client, batch: i64) -> (String, i32, i32, i32) {
    let end = ended(client, batch).await;
    (end.state.to_string(), end.succeeded, end.failed, end.aborted)
}

/// One value.
pub(crate) async fn ask<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

/// What a dead worker held becomes free, as its recovery would have it.
pub(crate) async fn free_all_blocks(client: &Client) -> u64 {
    // Of one that is empty only the close is missing.
    let empty = "DELETE FROM musterd.blocks WHERE worker IS NOT NULL AND isempty(lines)";
    client.execute(empty, &[]).await.unwrap();
    let sql = "UPDATE musterd.blocks SET worker = NULL, token = NULL, claimed_at = NULL, available_at = now()
                WHERE worker IS NOT NULL";
    client.execute(sql, &[]).await.unwrap()
}

/// Every batch has ended, once, and its counts are those of its results; nothing is left in any queue.
pub(crate) async fn assert_accounts_balance(client: &Client) {
    let wrong = "SELECT count(*) FROM musterd.batches b
        CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE r.state = 'succeeded') AS ok,
                                   count(*) FILTER (WHERE r.state = 'failed') AS bad
                              FROM musterd.results r WHERE r.batch_id = b.id) r
        CROSS JOIN LATERAL (SELECT coalesce(sum(o.succeeded), 0) AS ok,
                                   coalesce(sum(o.failed) FILTER (WHERE o.generation = b.generation), 0) AS bad
                              FROM musterd.outcomes o WHERE o.batch_id = b.id) t
        CROSS JOIN LATERAL musterd.audit(b.id) a
        WHERE b.summarized_at IS NULL OR (b.succeeded, b.failed) IS DISTINCT FROM (r.ok, r.bad)
           OR (r.ok, r.bad) IS DISTINCT FROM (t.ok, t.bad)
           OR (a.succeeded, a.failed, a.doubled, a.outside) IS DISTINCT FROM (r.ok::int, r.bad::int, 0::bigint, 0::bigint)
           OR musterd.count_lines(a.missing) <> b.aborted
           OR b.aborted <> b.rows - r.ok - r.bad
           OR b.rows <> (SELECT count(*) FROM musterd.rows i WHERE i.batch_id = b.id)";
    assert_eq!(ask::<i64>(client, wrong).await, 0, "batches whose counts are not a recount");
    assert_eq!(ask::<i64>(client, "SELECT count(*) FROM musterd.blocks").await, 0, "blocks left");
}
