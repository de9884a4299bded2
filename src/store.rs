//! PostgreSQL: the one door to the database, and how the door is configured.

pub mod batches;
pub mod blocks;
pub mod connect;
pub mod depths;
pub mod errors;
pub mod events;
pub mod export;
pub mod facts;
pub mod fault;
pub mod flush;
pub mod health;
pub mod listen;
pub mod listing;
pub mod migrate;
mod moment;
pub mod outputs;
pub mod page;
pub mod pages;
pub mod pooler;
mod pools;
pub mod procedures;
pub mod query;
pub mod queues;
pub mod rates;
pub mod reasons;
pub mod recovery;
pub mod retention;
pub mod steering;
pub mod submissions;
pub mod tasks;
mod trip;
pub mod workers;

pub use pools::{ApiPools, LEAST_CONNECTIONS, OpenError, Store, UPLOADS};

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::problems::Problems;
use crate::secret::Secret;
use connect::{ParseError, Plans, SessionSettings, Target};

/// The `[database]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where PostgreSQL is: `postgres://user:password@host:port/database?sslmode=…`, or libpq's `key=value` form.
    pub url: Secret,
    /// Past a pooler: LISTEN, the session lock and migrations need a connection that stays theirs.
    pub direct_url: Option<Secret>,
    /// Whether `url` leads to a pooler in transaction mode.
    pub pooler: Pooler,
    /// All connections of one replica together.
    pub max_connections: NonZeroU32,
    /// Connections for `sql` handlers, beside `max_connections`; opened only when there are such handlers.
    pub sql_connections: NonZeroU32,
    /// A statement of ours that runs longer is cancelled by the server; `0s` for no limit.
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Duration,
    /// A statement of ours that waits longer for one lock is cancelled by the server; `0s` for no limit.
    #[serde(with = "humantime_serde")]
    pub lock_timeout: Duration,
    /// A transaction of ours left open and idle for longer is ended by the server; `0s` for no limit.
    #[serde(with = "humantime_serde")]
    pub idle_in_transaction_session_timeout: Duration,
}

/// Whether session settings reach the session: behind a transaction pooler they would reach another client's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooler {
    /// A transaction pooler if `direct_url` is given; otherwise `run` finds out.
    #[default]
    Auto,
    /// `url` leads to PostgreSQL itself, or to a pooler in session mode.
    None,
    /// `url` leads to PgBouncer or the like in transaction mode.
    Transaction,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            url: Secret::from("postgres://localhost/musterd"),
            direct_url: None,
            pooler: Pooler::Auto,
            max_connections: NonZeroU32::new(10).unwrap_or(NonZeroU32::MIN),
            sql_connections: NonZeroU32::new(8).unwrap_or(NonZeroU32::MIN),
            statement_timeout: Duration::from_secs(60),
            lock_timeout: Duration::from_secs(10),
            idle_in_transaction_session_timeout: Duration::from_secs(60),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        if let Err(error) = self.target() {
            problems.error("database.url", error.to_string());
        }
        if self.direct_url.is_some()
            && let Err(error) = self.direct_target()
        {
            problems.error("database.direct_url", error.to_string());
        }
        problems.unless(
            !self.is_pooled() || self.target().is_ok_and(|target| target.is_unnamed()),
            "database.url",
            "leads to a transaction pooler by a Unix socket: name its host and port",
        );
        problems.unless(
            self.max_connections.get() >= LEAST_CONNECTIONS,
            "database.max_connections",
            format!(
                "must be at least {LEAST_CONNECTIONS}: claims, flushes, LISTEN and the heartbeat have one each, \
                 uploads two, and the fibers need two to read rows and finish batches with"
            ),
        );
    }

    /// Where the pools connect.
    pub fn target(&self) -> Result<Target, ParseError> {
        let target = Target::of(&self.url)?;
        Ok(if self.is_pooled() { target.unnamed() } else { target })
    }

    /// Where LISTEN, session locks and migrations connect: `direct_url`, else `url`.
    pub fn direct_target(&self) -> Result<Target, ParseError> {
        match &self.direct_url {
            Some(url) => Target::of(url),
            None => self.target(),
        }
    }

    /// True when there is a session that stays ours: `url` itself, or `direct_url` past the pooler.
    pub fn has_session(&self) -> bool {
        !self.is_pooled() || self.direct_url.is_some()
    }

    /// True when `url` leads to a transaction pooler.
    pub fn is_pooled(&self) -> bool {
        match self.pooler {
            Pooler::Auto => self.direct_url.is_some(),
            Pooler::None => false,
            Pooler::Transaction => true,
        }
    }

    /// What the sessions of our own pool are pinned to; nothing behind a transaction pooler.
    pub fn session(&self) -> Option<SessionSettings> {
        (!self.is_pooled()).then_some(SessionSettings {
            statement_timeout: self.statement_timeout,
            lock_timeout: self.lock_timeout,
            idle_in_transaction_session_timeout: self.idle_in_transaction_session_timeout,
            plans: Plans::Usual,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_documented_ones() {
        let config: Config = toml::from_str("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.url.expose(), "postgres://localhost/musterd");
        assert_eq!(config.max_connections.get(), 10);
    }

    #[test]
    fn unknown_keys_and_no_connections_are_refused() {
        assert!(toml::from_str::<Config>("max_conections = 3").is_err());
        assert!(toml::from_str::<Config>("max_connections = 0").is_err());
    }

    #[test]
    fn a_direct_url_means_a_pooler_unless_configured_otherwise() {
        let pooled: Config = toml::from_str(r#"direct_url = "host=db""#).unwrap();
        assert!(pooled.is_pooled());
        assert_eq!(pooled.session(), None);
        assert!(pooled.has_session() && !pooled.direct_target().unwrap().is_unnamed());
        let polling: Config = toml::from_str("url = 'host=pooler'\npooler = 'transaction'").unwrap();
        assert!(!polling.has_session() && polling.direct_target().unwrap().is_unnamed());
        let explicit: Config = toml::from_str("direct_url = 'host=db'\npooler = 'none'").unwrap();
        assert!(explicit.session().is_some());
        assert!(!Config::default().is_pooled());
    }

    #[test]
    fn a_shown_config_holds_no_password() {
        let config = Config { url: "postgres://u:canary@h/d".into(), ..Config::default() };
        let shown = format!("{config:?} {}", toml::to_string(&config).unwrap());
        assert!(!shown.contains("canary"), "{shown}");
        assert!(shown.contains(r#"statement_timeout = "1m""#), "{shown}");
    }
}
