//! How fast the work goes, so that blocks have a fitting size.

use crate::store::blocks::Size;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Lines in the first blocks of a command that was not timed yet.
const UNTIMED: f64 = 16.0;
/// A block that takes less than this costs more to claim than to run.
const WORTH_A_BLOCK: Duration = Duration::from_millis(10);
/// How much the newest measurement counts.
const NEWEST: f64 = 0.3;
#[derive(Clone, Debug, Default)]
pub struct Pace(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    seconds_per_row: HashMap<String, f64>,
}

impl Pace {
    pub fn saw_work(&self, command: &str, rows: usize, took: Duration) {
        if rows == 0 {
            return;
        }
        let measured = took.as_secs_f64() / rows as f64;
        let mut seen = self.lock();
        match seen.seconds_per_row.get_mut(command) {
            // Between magnitudes, not between numbers: one stuck row must not turn blocks of 500 into single rows.
            Some(pace) => *pace = pace.powf(1.0 - NEWEST) * measured.max(1e-9).powf(NEWEST),
            None => {
                seen.seconds_per_row.insert(command.to_owned(), measured);
            }
        }
    }

    /// The lines of a block of `command`: as many as take `target`, at most `largest`.
    pub fn size(&self, command: &str, target: Duration, largest: u32) -> Size {
        let largest = f64::from(largest);
        let pace = self.lock().seconds_per_row.get(command).copied();
        let fit = |time: Duration| match pace {
            Some(pace) => (time.as_secs_f64() / pace.max(1e-9)).clamp(1.0, largest),
            None => UNTIMED.min(largest),
        };
        Size { most: fit(target) as i32, least: pace.map_or(1, |_| fit(WORTH_A_BLOCK) as i32) }
    }

    /// What `lines` of a command take, if one was timed.
    pub fn time_of(&self, command: &str, lines: usize) -> Option<Duration> {
        let pace = self.lock().seconds_per_row.get(command).copied()?;
        Duration::try_from_secs_f64(pace * lines as f64).ok()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(500);

    #[test]
    fn blocks_grow_for_quick_work_and_shrink_for_slow() {
        let pace = Pace::default();
        assert_eq!(pace.size("new", TARGET, 500), Size { most: 16, least: 1 });
        pace.saw_work("quick", 1000, Duration::from_millis(1));
        assert_eq!(pace.size("quick", TARGET, 500), Size { most: 500, least: 500 });
        pace.saw_work("slow", 10, Duration::from_secs(20));
        assert_eq!(pace.size("slow", TARGET, 500), Size { most: 1, least: 1 });
        pace.saw_work("middling", 100, Duration::from_millis(500));
        assert_eq!(pace.size("middling", TARGET, 500), Size { most: 100, least: 2 });
    }

    #[test]
    fn one_odd_block_does_not_turn_the_pace_over() {
        let pace = Pace::default();
        pace.saw_work("c", 100, Duration::from_millis(500));
        pace.saw_work("c", 1, Duration::from_secs(1));
        assert!(pace.size("c", TARGET, 500).most > 1);
    }
}
