//! Choices that a seed repeats.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[derive(Debug)]
pub(crate) struct Dice(StdRng);

impl Dice {
    /// Each user of a seed has choices of its own: one more choice of one changes none of another.
    pub(crate) fn new(seed: u64, user: &str) -> Self {
        let salt = user.bytes().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(StdRng::seed_from_u64(seed ^ salt))
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0.random()
    }

    /// From `least` to `most`, both included.
    pub(crate) fn between(&mut self, least: i64, most: i64) -> i64 {
        self.0.random_range(least..=most)
    }

    pub(crate) fn chance(&mut self, share: f64) -> bool {
        self.0.random_bool(share)
    }

    pub(crate) fn seconds(&mut self, least: f64, most: f64) -> Duration {
        Duration::from_secs_f64(self.0.random_range(least..most))
    }

    /// The time to the next of things that come at random, `mean` apart.
    pub(crate) fn gap(&mut self, mean: f64) -> Duration {
        let share: f64 = self.0.random_range(f64::EPSILON..1.0);
        Duration::from_secs_f64((-share.ln() * mean).min(mean * 5.0))
    }

    /// One of these, by weight.
    pub(crate) fn weighted<T: Copy>(&mut self, choices: &[(u32, T)]) -> T {
        let sum: u32 = choices.iter().map(|(weight, _)| weight).sum();
        let mut at = self.0.random_range(0..sum);
        for (weight, choice) in choices {
            if at < *weight {
                return *choice;
            }
            at -= weight;
        }
        choices[0].1
    }
}
