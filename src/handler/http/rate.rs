//! At most so many requests in a time, by all replicas together: each reserves its moment in the database.

use crate::{backoff, handler::sql::Database, periodic::describe, store::rates};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, num::NonZeroU32, str::FromStr, sync::Arc, time::Duration};

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
}

impl Turns {
    pub(super) fn new(name: &str, limit: RateLimit, database: Arc<Database>) -> Self {
        Self { name: name.to_owned(), interval: limit.interval(), database }
    }

    /// Waits for its turn. Without the database nobody knows whose turn it is: then it waits for the database.
    pub(super) async fn wait(&self) {
        let mut tries = 0;
        loop {
            match self.reserve().await {
                Ok(wait) => return tokio::time::sleep(wait).await,
                Err(error) => {
                    tries += 1;
                    if tries == 1 {
                        tracing::warn!(handler = self.name, error, "cannot ask for a turn; trying again");
                    }
                    let wait =
                        backoff::delay(Duration::from_millis(50), crate::store::LONGEST_BACKOFF, tries);
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn reserve(&self) -> Result<Duration, String> {
        let client = self.database.connection().await.map_err(|error| describe(&error))?;
        rates::reserve(&client, &self.name, self.interval).await.map_err(|error| describe(&error))
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
