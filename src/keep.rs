//! How long something stays after its end: a time, or for ever.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr, time::Duration};

/// The longest time that can be written; what is meant to stay longer is `never` deleted.
pub const LONGEST: Duration = Duration::from_secs(1_000 * YEAR);
const YEAR: u64 = 31_557_600;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keep {
    For(Duration),
    /// It never goes.
    Never,
}

impl Keep {
    pub const fn days(days: u64) -> Self {
        Self::For(Duration::from_secs(days * 86_400))
    }

    pub const fn years(years: u64) -> Self {
        Self::For(Duration::from_secs(years * YEAR))
    }

    /// As the database has it: ten thousand years are as good as never, and need no case of their own.
    pub fn as_secs_f64(self) -> f64 {
        match self {
            Self::For(time) => time.as_secs_f64(),
            Self::Never => (10_000 * YEAR) as f64,
        }
    }
}

/// A time that data can be kept for.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() && time <= LONGEST => Ok(time),
        _ => Err("must be a time above zero and of at most 1000 years, such as 30d".into()),
    }
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(Self::Never),
            time => parse_time(time).map(Self::For),
        }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::For(time) => humantime::format_duration(*time).fmt(f),
            Self::Never => f.write_str("never"),
        }
    }
}

impl Serialize for Keep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Keep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Keep;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time or never")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Keep, E> {
                text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_never_are_read_and_written_the_same_way() {
        for (text, keep) in [("30days", Keep::days(30)), ("1year", Keep::years(1)), ("never", Keep::Never)] {
            assert_eq!(text.parse(), Ok(keep));
            assert_eq!(keep.to_string(), text);
        }
        assert_eq!("30d".parse(), Ok(Keep::days(30)));
        assert!(Keep::years(1_000) < Keep::Never && Keep::Never.as_secs_f64() > LONGEST.as_secs_f64());
        for wrong in ["", "0s", "-1d", "soon", "1001y", "Never"] {
            assert!(wrong.parse::<Keep>().is_err(), "{wrong}");
        }
    }
}
