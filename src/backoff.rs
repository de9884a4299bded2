//! How long to wait before the next try: exponential, capped, with jitter.

use crate::problems::Problems;
use serde::{Deserialize, Serialize};
use std::{num::NonZeroU32, time::Duration};

/// The longest wait that a handler may ask for, in a header or in a reply; what asks for more gets this.
pub const LONGEST_ASKED: Duration = Duration::from_secs(24 * 3600);

/// The `[retry]` section: tries of rows and tasks.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Tries in all, the first included.
    pub max_attempts: NonZeroU32,
    /// The most tries in all that a submitter may ask for; what asks for more gets this.
    pub limit: NonZeroU32,
    /// The wait before the second try; it doubles with each further one.
    #[serde(with = "humantime_serde")]
    pub base: Duration,
    /// The longest wait.
    #[serde(with = "humantime_serde")]
    pub max: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_attempts: NonZeroU32::new(3).expect("three is not zero"),
            limit: NonZeroU32::new(100).expect("a hundred is not zero"),
            base: Duration::from_secs(1),
            max: Duration::from_secs(300),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(!self.base.is_zero(), "retry.base", "must be above zero, or a failing row spins");
        problems.unless(self.base <= self.max, "retry.max", "must be at least retry.base");
    }

    /// How often a row or task is tried: what its submitter asked for, within the operator's limit, else `max_attempts`.
    pub fn attempts_for(&self, asked: Option<i32>) -> i32 {
        let (own, limit) = (self.max_attempts.get(), self.limit.max(self.max_attempts).get());
        let own = i32::try_from(own).unwrap_or(i32::MAX);
        asked.map_or(own, |asked| asked.min(i32::try_from(limit).unwrap_or(i32::MAX)))
    }

    /// The wait after try number `attempt` (from 1) has failed.
    pub fn delay(&self, attempt: u32) -> Duration {
        delay(self.base, self.max, attempt)
    }
}

/// Doubles `base` for every try after the first up to `max`, then takes a random half to whole of it:
/// things that failed together must not come back together.
pub fn delay(base: Duration, max: Duration, attempt: u32) -> Duration {
    let doublings = attempt.saturating_sub(1).min(31);
    let full = base.saturating_mul(1 << doublings).min(max);
    full.mul_f64(0.5 + rand::random::<f64>() / 2.0)
}

/// How long a part waits after an error before it asks the database again, at most.
const LONGEST_FOR_DATABASE: Duration = Duration::from_secs(5);

/// The wait before the database is asked again, after so many failures in a row.
pub fn of_database(failures: u32) -> Duration {
    delay(Duration::from_millis(50), LONGEST_FOR_DATABASE, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submitter_asks_for_tries_within_the_operator_s_limit() {
        let config = Config::default();
        let tries = [None, Some(1), Some(7), Some(1_000)].map(|asked| config.attempts_for(asked));
        assert_eq!(tries, [3, 1, 7, 100]);
        let many = Config { max_attempts: NonZeroU32::new(200).unwrap(), ..config };
        assert_eq!([None, Some(1_000)].map(|asked| many.attempts_for(asked)), [200, 200]);
    }

    #[test]
    fn waits_double_up_to_the_cap_and_are_jittered_by_at_most_half() {
        let (base, max) = (Duration::from_secs(1), Duration::from_secs(300));
        for (attempt, full) in [(1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (u32::MAX, 300)] {
            for _ in 0..100 {
                let wait = delay(base, max, attempt);
                assert!(wait <= Duration::from_secs(full), "try {attempt} waits {wait:?}");
                assert!(wait >= Duration::from_secs(full) / 2, "try {attempt} waits {wait:?}");
            }
        }
    }
}
