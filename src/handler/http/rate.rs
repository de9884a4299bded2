//! At most so many requests in a time, by all replicas together: each reserves its moment in the database.
//!
//! A fiber waits for a turn that comes soon. For a later one it gives back what it has: a turn that is reserved and never used would
//! be lost to all, and the wait is no failed attempt.

use crate::{
    error_text::describe,
    handler::sql::Database,
    store::rates::{self, Turn},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{
    fmt,
    num::NonZeroU32,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Until the next question when the database gave no answer.
const NO_ANSWER: Duration = Duration::from_secs(1);

/// `"100/s"`, `"30/m"`, `"500/h"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    count: NonZeroU32,
    per: Unit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Second,
    Minute,
    Hour,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be written as requests per s, m or h, such as \"100/s\"")]
pub struct RateError;

impl RateLimit {
    /// The time between two requests.
    pub fn interval(self) -> Duration {
        let unit = match self.per {
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3600,
        };
        Duration::from_secs(unit) / self.count.get()
    }
}

impl FromStr for RateLimit {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let (count, per) = text.split_once('/').ok_or(RateError)?;
        let per = match per.trim() {
            "s" => Unit::Second,
            "m" => Unit::Minute,
            "h" => Unit::Hour,
            _ => return Err(RateError),
        };
        Ok(Self { count: count.trim().parse().map_err(|_| RateError)?, per })
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = match self.per {
            Unit::Second => "s",
            Unit::Minute => "m",
            Unit::Hour => "h",
        };
        write!(f, "{}/{per}", self.count)
    }
}

impl Serialize for RateLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RateLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The turns of one handler.
#[derive(Debug)]
pub(super) struct Turns {
    name: String,
    interval: Duration,
    database: Arc<Database>,
    rests_until: Mutex<Option<Instant>>,
}

/// No turn comes soon: nothing was sent.
#[derive(Debug)]
pub(super) struct NoTurn {
    pub(super) error: String,
    pub(super) after: Duration,
}

impl Turns {
    pub(super) fn new(name: &str, limit: RateLimit, database: Arc<Database>) -> Self {
        Self { name: name.to_owned(), interval: limit.interval(), database, rests_until: Mutex::default() }
    }

    /// Waits for its turn, if that comes soon. Without the database it cannot be known whose turn it is: then nothing is sent.
    ///
    /// Of the time that a task has, most is for its request.
    pub(super) async fn wait(&self, timeout: Duration) -> Result<(), NoTurn> {
        match self.reserve(timeout / 4).await {
            Ok(Turn::Reserved(wait)) => {
                tokio::time::sleep(wait).await;
                Ok(())
            }
            Ok(Turn::TooFar(after)) => {
                let next = humantime::format_duration(Duration::from_millis(after.as_millis() as u64));
                Err(self.later(format!("rate_limit lets no request through for another {next}"), after))
            }
            Err(error) => {
                tracing::debug!(handler = self.name, error, "cannot ask for a turn");
                Err(self.later(
                    format!("rate_limit: the database cannot be asked for a turn: {error}"),
                    NO_ANSWER,
                ))
            }
        }
    }

    /// How long idle fibers leave this handler alone: those at work take all its turns.
    pub(super) fn rest(&self) -> Option<Duration> {
        let until = (*self.rests_until.lock().unwrap_or_else(PoisonError::into_inner))?;
        until.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
    }

    fn later(&self, error: String, after: Duration) -> NoTurn {
        let until = Instant::now().checked_add(after);
        let mut rests_until = self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        *rests_until = until.max(*rests_until);
        NoTurn { error, after }
    }

    async fn reserve(&self, most: Duration) -> Result<Turn, String> {
        let client = self.database.connection().await.map_err(|error| describe(&error))?;
        rates::reserve(&client, &self.name, self.interval, most).await.map_err(|error| describe(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_and_a_unit() {
        assert_eq!("100/s".parse::<RateLimit>().unwrap().interval(), Duration::from_millis(10));
        assert_eq!("30/m".parse::<RateLimit>().unwrap().interval(), Duration::from_secs(2));
        assert_eq!("2/h".parse::<RateLimit>().unwrap().to_string(), "2/h");
        for wrong in ["", "100", "0/s", "-1/s", "1/d", "many/s"] {
            assert_eq!(wrong.parse::<RateLimit>(), Err(RateError), "{wrong}");
        }
    }
}
