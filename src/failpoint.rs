//! Crashes, errors and waits at named steps, for tests: compiled in only with the feature `failpoints`.
//!
//! `MUSTERD_FAILPOINTS="flush.committed=abort;complete.counted=sleep(200ms)"`, each optionally with `N*` in front:
//! only the N-th time. `gate(FILE)` waits until there is such a file. `error` fails the step as the end of the session would, where the
//! step has a connection.
//!
//! `MUSTERD_MUTANT=name` takes one mechanism out of the program, to see that a test notices.

mod mutants;

/// Does what the environment asks for at this step; nothing in a release. With a connection the step can also be made to fail.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::hit($name).await;
    };
    ($name:literal, $client:expr) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::hit_with($name, $client).await?;
    };
    ($name:literal, $client:expr, $failed:expr) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::hit_with($name, $client).await.map_err($failed)?;
    };
}

#[cfg(feature = "failpoints")]
pub use enabled::{hit, hit_with};
pub use mutants::{is_mutant, patched};

#[cfg(feature = "failpoints")]
mod enabled {
    use std::{
        collections::HashMap,
        path::PathBuf,
        sync::{LazyLock, Mutex},
        time::Duration,
    };
    use tokio_postgres::{Client, Error};

    #[derive(Clone, Debug)]
    enum Action {
        Abort,
        Panic,
        Error,
        Sleep(Duration),
        Gate(PathBuf),
    }

    #[derive(Debug)]
    struct Armed {
        action: Action,
        /// Counts down to the visit that acts; zero acts at every visit.
        only_visit: u32,
        visits: u32,
    }

    static ARMED: LazyLock<Mutex<HashMap<String, Armed>>> =
        LazyLock::new(|| Mutex::new(parse(&std::env::var("MUSTERD_FAILPOINTS").unwrap_or_default())));

    fn parse(text: &str) -> HashMap<String, Armed> {
        text.split(';').filter_map(|entry| entry.split_once('=')).filter_map(parse_one).collect()
    }

    fn parse_one((name, wish): (&str, &str)) -> Option<(String, Armed)> {
        let (only_visit, action) = match wish.split_once('*') {
            Some((visit, action)) => (visit.parse().ok()?, action),
            None => (0, wish),
        };
        let action = match action {
            "abort" => Action::Abort,
            "panic" => Action::Panic,
            "error" => Action::Error,
            other => match other.strip_suffix(')')?.split_once('(')? {
                ("sleep", wait) => Action::Sleep(humantime::parse_duration(wait).ok()?),
                ("gate", file) => Action::Gate(file.into()),
                _ => return None,
            },
        };
        Some((name.trim().to_owned(), Armed { action, only_visit, visits: 0 }))
    }

    fn due(name: &str) -> Option<Action> {
        let mut armed = ARMED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let point = armed.get_mut(name)?;
        point.visits += 1;
        (point.only_visit == 0 || point.only_visit == point.visits).then(|| point.action.clone())
    }

    /// What the end of its session does to a statement.
    const ERROR: &str =
        "DO $$ BEGIN RAISE EXCEPTION 'a failpoint fails on purpose' USING ERRCODE = 'admin_shutdown'; END $$";

    /// The same at a step that has a connection and can fail.
    pub async fn hit_with(name: &str, client: &Client) -> Result<(), Error> {
        match due(name) {
            Some(Action::Error) => {
                tracing::warn!(failpoint = name, "failing on purpose");
                client.batch_execute(ERROR).await
            }
            action => {
                act(name, action).await;
                Ok(())
            }
        }
    }

    pub async fn hit(name: &str) {
        act(name, due(name)).await;
    }

    async fn act(name: &str, action: Option<Action>) {
        match action {
            None => {}
            Some(Action::Error) => tracing::error!(failpoint = name, "this step cannot fail"),
            Some(Action::Abort) => {
                tracing::error!(failpoint = name, "aborting on purpose");
                std::process::abort()
            }
            Some(Action::Panic) => panic!("failpoint {name}"),
            Some(Action::Sleep(wait)) => {
                tracing::warn!(failpoint = name, ?wait, "sleeping on purpose");
                tokio::time::sleep(wait).await;
            }
            Some(Action::Gate(file)) => {
                tracing::warn!(failpoint = name, "waiting at a gate on purpose");
                while !file.exists() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }
}
