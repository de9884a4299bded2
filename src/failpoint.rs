//! Crashes, errors and waits at named steps, for tests: compiled in only with the feature `failpoints`.
//!
//! `MUSTERD_FAILPOINTS="flush.committed=abort;complete.counted=sleep(200ms)"`, each optionally with `N*` in front:
//! only the N-th time. `gate(FILE)` waits until there is such a file.

/// Does what the environment asks for at this step; nothing in a release.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::hit($name).await;
    };
}

#[cfg(feature = "failpoints")]
pub use enabled::hit;

#[cfg(feature = "failpoints")]
mod enabled {
    use std::{
        collections::HashMap,
        path::PathBuf,
        sync::{LazyLock, Mutex},
        time::Duration,
    };

    #[derive(Clone, Debug)]
    enum Action {
        Abort,
        Panic,
        Sleep(Duration),
        Gate(PathBuf),
    }

    #[derive(Debug)]
    struct Armed {
        action: Action,
        /// Counts down to the visit that acts; nought acts at every visit.
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

    pub async fn hit(name: &str) {
        match due(name) {
            None => {}
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
