//! Who is alive: heartbeats in Redis and PostgreSQL, a lock for as long as a session stands, a lease to work by.
//!
//! PostgreSQL is the truth. Redis is a second witness: it can save a living worker from being taken for dead, never the
//! other way round.

pub mod heartbeat;
pub mod identity;
pub mod lease;
pub mod presence;
pub mod redis;
pub mod roll;
pub mod session;
pub mod tracked;

use crate::{problems::Problems, secret::Secret};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The `[liveness]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub backend: Backend,
    /// Time between two heartbeats.
    #[serde(with = "humantime_serde")]
    pub heartbeat_interval: Duration,
    /// Silence after which a worker counts as dead.
    #[serde(with = "humantime_serde")]
    pub heartbeat_ttl: Duration,
    /// Time between two looks for dead workers.
    #[serde(with = "humantime_serde")]
    pub recovery_interval: Duration,
    /// Time between two comparisons of what the database says this worker holds with what it does hold.
    #[serde(with = "humantime_serde")]
    pub reconcile_interval: Duration,
    /// After PostgreSQL's start or an outage of our own, no worker is judged for this long.
    #[serde(with = "humantime_serde")]
    pub settle: Duration,
    /// Life of the set of what a worker holds.
    #[serde(with = "humantime_serde")]
    pub rows_ttl: Duration,
    /// A row or task that killed its process this often, running alone, is failed.
    pub max_crashes: u32,
    /// `/livez` fails when a loop of the worker has stood still for this long.
    #[serde(with = "humantime_serde")]
    pub stuck_after: Duration,
}

/// Who keeps the heartbeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Redis when `redis.url` is set, else PostgreSQL alone.
    #[default]
    Auto,
    /// Redis first, PostgreSQL as the second witness.
    Redis,
    /// PostgreSQL alone.
    Postgres,
}

/// The `[redis]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedisConfig {
    /// Left out: no Redis, unless `liveness.backend` asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<Secret>,
    /// The first word of every key.
    pub key_prefix: String,
}

/// Where Redis is when `liveness.backend = "redis"` and no URL is given.
const USUAL_REDIS: &str = "redis://localhost:6379";

impl Default for Config {
    fn default() -> Self {
        Self {
            backend: Backend::default(),
            heartbeat_interval: Duration::from_secs(30),
            heartbeat_ttl: Duration::from_secs(60),
            recovery_interval: Duration::from_secs(60),
            reconcile_interval: Duration::from_secs(15),
            settle: Duration::from_secs(15),
            rows_ttl: Duration::from_secs(180),
            max_crashes: 3,
            stuck_after: Duration::from_secs(120),
        }
    }
}

impl Default for RedisConfig {
    fn default() -> Self {
        Self { url: None, key_prefix: "MUSTER".into() }
    }
}

impl Backend {
    /// Whether heartbeats go to Redis, too.
    pub fn uses_redis(self, redis: &RedisConfig) -> bool {
        match self {
            Self::Auto => redis.url.is_some(),
            Self::Redis => true,
            Self::Postgres => false,
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            !self.heartbeat_interval.is_zero() && self.heartbeat_interval * 2 <= self.heartbeat_ttl,
            "liveness.heartbeat_interval",
            "must be above zero and at most half of liveness.heartbeat_ttl, or one late beat counts as a death",
        );
        problems.unless(
            self.rows_ttl > self.heartbeat_ttl + self.recovery_interval,
            "liveness.rows_ttl",
            "must be longer than liveness.heartbeat_ttl + liveness.recovery_interval, or the record of what a \
             dead worker held is gone before recovery reads it",
        );
        problems.unless(
            !self.recovery_interval.is_zero(),
            "liveness.recovery_interval",
            "must be above zero",
        );
        problems.unless(
            !self.reconcile_interval.is_zero(),
            "liveness.reconcile_interval",
            "must be above zero",
        );
        problems.unless(
            self.stuck_after >= Duration::from_secs(1),
            "liveness.stuck_after",
            "must be at least 1s: a busy machine would look like a dead worker",
        );
        problems.unless(self.max_crashes > 0, "liveness.max_crashes", "must be at least 1");
    }
}

impl RedisConfig {
    /// Where Redis is, as given or as usual.
    pub fn url(&self) -> Secret {
        self.url.clone().unwrap_or_else(|| Secret::new(USUAL_REDIS))
    }

    pub(crate) fn check(&self, problems: &mut Problems) {
        if let Err(error) = redis::parse(&self.url()) {
            problems.error("redis.url", error.to_string());
        }
        problems.unless(
            !self.key_prefix.is_empty() && !self.key_prefix.contains(['{', '}', ' ']),
            "redis.key_prefix",
            "must be one word without braces: braces are Redis Cluster's hash tags",
        );
    }
}
