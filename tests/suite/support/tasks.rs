//! What tests of tasks ask for again and again: a value, a state, an end, a worker in this process.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use musterd::config::{Given, load};
use musterd::daemon::Daemon;
use musterd::handler::{Config, Done, Handler, Outcome, RowCall, TaskCall, TaskOutcome};
use musterd::signal::Stop;
use musterd::store::tasks::{Task, TaskRef};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::config::TestConfig;
use super::database::TestDb;
pub(crate) use super::wait::SOON;
use super::wait::{eventually, within};

/// Short waits, so that tests are short; never so short that they decide anything.
pub(crate) const QUICK: &str = "[claim]\npoll_interval = \"50ms\"\n[retry]\nbase = \"10ms\"\nmax = \"20ms\"\n\
     [completion]\nsweep_min = \"500ms\"\nsweep_max = \"1s\"\n";

/// Every value of the rows of the last query, joined by `|`, as psql would print them.
pub(crate) async fn texts(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    let text = |message: SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|at| row.get(at).unwrap_or("")).collect::<Vec<_>>().join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(text).collect()
}

/// The only row of `sql`.
pub(crate) async fn text(client: &Client, sql: &str) -> String {
    let rows = texts(client, sql).await;
    assert_eq!(rows.len(), 1, "{sql}: {rows:?}");
    rows.into_iter().next().unwrap()
}

pub(crate) async fn number(client: &Client, sql: &str) -> i64 {
    text(client, sql).await.parse().unwrap()
}

/// Waits until `sql` says `wanted`.
pub(crate) async fn becomes(client: &Client, sql: &str, wanted: &str) {
    let mut last = String::new();
    let deadline = tokio::time::Instant::now() + SOON;
    while last != wanted {
        assert!(tokio::time::Instant::now() < deadline, "{sql} is {last:?} and not {wanted:?}");
        last = texts(client, sql).await.join(",");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The state a task ends in.
pub(crate) async fn end_of(client: &Client, id: i64) -> String {
    eventually(SOON, &format!("task {id} ends"), async || {
        let state = text(client, &format!("SELECT state FROM musterd.tasks WHERE id = {id}")).await;
        matches!(state.as_str(), "succeeded" | "failed" | "aborted").then_some(state)
    })
    .await
}

/// One field of a task.
pub(crate) async fn field(client: &Client, id: i64, field: &str) -> String {
    text(client, &format!("SELECT {field} FROM musterd.tasks WHERE id = {id}")).await
}

/// What recovery does for the tasks of a process that is gone: free them, guarded by worker and token.
pub(crate) async fn free_tasks_of(client: &Client, pid: u32) -> u64 {
    let dead = "UPDATE musterd.workers SET state = 'dead', ended_at = clock_timestamp() WHERE pid = $1";
    client.execute(dead, &[&i32::try_from(pid).unwrap()]).await.unwrap();
    number(client, "SELECT freed FROM musterd.free_claims('', NULL)").await as u64
}

/// Everybody who runs the procedure of a task now, by what they do.
pub(crate) const RUNNING_PROCEDURES: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
      AND application_name = 'musterd sql' AND state = 'active'";

/// A handler of the test's own, for rows and tasks alike.
pub(crate) struct Script<F>(pub(crate) F);

/// What a script is asked: a task's command, id and payload, or a row's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Task { id: i64, attempt: i32, payload: String },
    Row { batch: i64, line: i32 },
}

impl<F> Handler for Script<F>
where
    F: Fn(Asked) -> BoxFuture<'static, TaskOutcome> + Send + Sync + 'static,
{
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let answer = (self.0)(Asked::Row { batch: call.batch, line: call.line });
        async move {
            match answer.await {
                TaskOutcome::Done(_) => Outcome::Succeeded(Done::default()),
                other => panic!("not an answer for a row: {other:?}"),
            }
        }
        .boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        let task = call.task;
        let payload = task.payload.text().to_owned();
        (self.0)(Asked::Task { id: task.reference.id, attempt: task.attempt, payload })
    }
}

/// A daemon in this process.
pub(crate) struct Worker {
    stop: Stop,
    running: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts one with `toml` and, beside what that declares, the given commands.
    pub(crate) async fn start(
        db: &TestDb,
        toml: &str,
        commands: Vec<(&str, Arc<dyn Handler>, Config)>,
    ) -> Self {
        // As main does: two libraries of ours bring rustls, and neither may choose for the other.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let file = TestConfig::new(db, toml);
        let given = Given {
            file: Some(file.file().into()),
            flags: Vec::new(),
            env: Some(Vec::new()),
            dev: Vec::new(),
        };
        let config = load(&given).unwrap_or_else(|error| panic!("{error}")).config;
        let mut registry = config.registry().unwrap();
        for (command, handler, config) in commands {
            registry = registry.with(command, handler, config);
        }
        let daemon = Daemon::prepare(config, registry).await.unwrap();
        let stop = Stop::default();
        let until = stop.clone();
        #[expect(clippy::disallowed_methods, reason = "the handle is kept, and awaited by finish")]
        let running = tokio::spawn(async move {
            daemon.run(until).await.unwrap();
        });
        Self { stop, running: Some(running) }
    }

    /// Drains it.
    pub(crate) async fn finish(mut self) {
        self.stop.drain.cancel();
        within(SOON, self.running.take().unwrap()).await.unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.drain.cancel();
        self.stop.now.cancel();
    }
}

/// Claims a queued task, without a worker.
pub(crate) async fn claimed(client: &Client, id: i64) -> Task {
    let row = client
        .query_one(
            "SELECT t.command, t.payload, guard.claim(t.id) AS token FROM musterd.task_records t WHERE t.id = $1",
            &[&id],
        )
        .await
        .unwrap();
    Task {
        reference: TaskRef { id, token: row.get("token") },
        parent: None,
        queue: "default".into(),
        command: row.get("command"),
        payload: row.get("payload"),
        attempt: 1,
        max_attempts: None,
        crashes: 0,
        solo_crashes: 0,
        is_solo: false,
        timeout: None,
        traceparent: None,
        waited: None,
    }
}
