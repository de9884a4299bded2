//! Scripted schedules: statements of two or three sessions in an order that the test dictates, races without luck.
//!
//! A statement that should wait is started with [`Schedule::blocks`], which returns when the *server* says that it
//! waits for a lock, and is finished with [`Schedule::resumes`] after another session has let go.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::{Client, Error, SimpleQueryMessage};

use super::database::TestDb;
use super::wait::{SOON, eventually};

/// How long a statement may take that nothing blocks, and how long one may take to be seen waiting.
const LIMIT: Duration = SOON;

/// What a statement did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The rows, every value as text, null as none; and how many rows the last statement touched.
    Done { rows: Vec<Vec<Option<String>>>, touched: u64 },
    /// The SQLSTATE it failed with.
    Failed(String),
}

impl Outcome {
    /// The rows with their values joined by `|`, as psql would print them; fails if the statement did.
    #[track_caller]
    pub(crate) fn rows(&self) -> Vec<String> {
        let Self::Done { rows, .. } = self else { panic!("the statement failed: {self:?}") };
        let text = |row: &Vec<Option<String>>| {
            row.iter().map(|value| value.as_deref().unwrap_or("")).collect::<Vec<_>>().join("|")
        };
        rows.iter().map(text).collect()
    }

    /// How many rows were touched; fails if the statement did.
    #[track_caller]
    pub(crate) fn touched(&self) -> u64 {
        let Self::Done { touched, .. } = self else { panic!("the statement failed: {self:?}") };
        *touched
    }

    /// The SQLSTATE it failed with; fails if it did not.
    #[track_caller]
    pub(crate) fn sqlstate(&self) -> &str {
        let Self::Failed(state) = self else { panic!("the statement did not fail: {self:?}") };
        state
    }
}

struct Session {
    client: Arc<Client>,
    backend: i32,
    /// The statement that was seen waiting.
    blocked: Option<JoinHandle<Outcome>>,
}

/// Named sessions on one database, and an observer.
pub(crate) struct Schedule {
    sessions: HashMap<&'static str, Session>,
    observer: Client,
}

impl Schedule {
    /// Opens a session for each name.
    pub(crate) async fn new(db: &TestDb, names: &[&'static str]) -> Self {
        let mut sessions = HashMap::new();
        for name in names {
            let client = db.client().await;
            let backend = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
            sessions.insert(*name, Session { client: Arc::new(client), backend, blocked: None });
        }
        Self { sessions, observer: db.client().await }
    }

    /// Runs `sql` in session `name`; nothing may block it.
    pub(crate) async fn run(&mut self, name: &str, sql: &str) -> Outcome {
        let session = self.session(name);
        let statement = start(session, sql);
        self.finish(name, sql, statement).await
    }

    /// Starts `sql` in session `name` and returns when it waits for a lock that another session holds.
    pub(crate) async fn blocks(&mut self, name: &str, sql: &str) {
        let session = self.session(name);
        let (backend, statement) = (session.backend, start(session, sql));
        eventually(LIMIT, &format!("{name} is blocked: {sql}"), async || {
            assert!(!statement.is_finished(), "{name} was not blocked: {sql}");
            (!self.blockers(backend).await.is_empty()).then_some(())
        })
        .await;
        self.session(name).blocked = Some(statement);
    }

    /// Whether session `name`'s started statement still waits for a lock.
    pub(crate) async fn is_blocked(&mut self, name: &str) -> bool {
        let session = self.session(name);
        let running = session.blocked.as_ref().is_some_and(|statement| !statement.is_finished());
        let backend = session.backend;
        running && !self.blockers(backend).await.is_empty()
    }

    /// Waits for the statement that session `name` was blocked in.
    pub(crate) async fn resumes(&mut self, name: &str) -> Outcome {
        let blocked = self.session(name).blocked.take();
        let statement = blocked.unwrap_or_else(|| panic!("{name} was not blocked"));
        self.finish(name, "the blocked statement", statement).await
    }

    fn session(&mut self, name: &str) -> &mut Session {
        self.sessions.get_mut(name).unwrap_or_else(|| panic!("no session {name}"))
    }

    async fn finish(&mut self, name: &str, sql: &str, statement: JoinHandle<Outcome>) -> Outcome {
        match tokio::time::timeout(LIMIT, statement).await {
            Ok(outcome) => outcome.unwrap(),
            Err(_) => {
                let backend = self.session(name).backend;
                panic!("{name} does not return, blocked by {:?}: {sql}", self.blockers(backend).await)
            }
        }
    }

    async fn blockers(&self, backend: i32) -> Vec<i32> {
        self.observer.query_one("SELECT pg_blocking_pids($1)", &[&backend]).await.unwrap().get(0)
    }
}

fn start(session: &Session, sql: &str) -> JoinHandle<Outcome> {
    assert!(session.blocked.is_none(), "the session is blocked and cannot run: {sql}");
    let (client, sql) = (Arc::clone(&session.client), sql.to_owned());
    #[expect(clippy::disallowed_methods, reason = "every handle is awaited or kept in its session")]
    let statement = tokio::spawn(async move { outcome(client.simple_query(&sql).await) });
    statement
}

fn outcome(answer: Result<Vec<SimpleQueryMessage>, Error>) -> Outcome {
    let messages = match answer {
        Ok(messages) => messages,
        Err(error) => {
            let state = error.code().map(|state| state.code().to_owned());
            return Outcome::Failed(state.unwrap_or_else(|| panic!("the connection failed: {error:?}")));
        }
    };
    let (mut rows, mut touched) = (Vec::new(), 0);
    for message in messages {
        match message {
            SimpleQueryMessage::Row(row) => {
                rows.push((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect());
            }
            SimpleQueryMessage::CommandComplete(count) => touched = count,
            _ => {}
        }
    }
    Outcome::Done { rows, touched }
}
