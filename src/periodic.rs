//! The one loop that every clock-driven part runs in.

use std::{future::Future, time::Duration};
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;

/// Work that is safe to repeat: it looks at the world and puts one thing right.
///
/// A tick takes no input, so the first tick after a crash does what any other does. It does not retry
/// either: the next tick is the retry.
pub trait Periodic: Send + 'static {
    const NAME: &'static str;
    type Error: std::error::Error + Send + Sync + 'static;

    fn tick(&mut self) -> impl Future<Output = Result<Tally, Self::Error>> + Send;
}

/// How many things a tick put right. Nought is the usual answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally(pub u64);

/// When a loop ticks.
#[derive(Clone, Copy, Debug)]
pub enum Rhythm {
    /// Every period, the first time at once.
    Every(Duration),
    /// At random between two waits, the first time after one: replicas started together must not tick together.
    Between(Duration, Duration),
}

impl Rhythm {
    fn wait(self) -> Duration {
        match self {
            Self::Every(period) => period,
            Self::Between(least, most) => least + (most.saturating_sub(least)).mul_f64(rand::random()),
        }
    }

    fn first(self) -> Duration {
        match self {
            Self::Every(_) => Duration::ZERO,
            Self::Between(..) => self.wait(),
        }
    }
}

/// Ticks `task` until `stop`. A tick that has begun is finished.
pub async fn run<P: Periodic>(mut task: P, rhythm: Rhythm, stop: CancellationToken) {
    let mut next = Instant::now() + rhythm.first();
    while stop.run_until_cancelled(time::sleep_until(next)).await.is_some() {
        let began = Instant::now();
        match task.tick().await {
            Ok(Tally(0)) => tracing::trace!(part = P::NAME, "nothing to do"),
            Ok(Tally(count)) => tracing::info!(part = P::NAME, count, "put right"),
            Err(error) => {
                tracing::warn!(part = P::NAME, error = describe(&error), "tick failed; the next one retries");
            }
        }
        let wait = rhythm.wait();
        if began.elapsed() > wait {
            tracing::warn!(part = P::NAME, took = ?began.elapsed(), "a tick took longer than its period");
        }
        // After a late tick the rhythm starts anew: no burst to catch up.
        next = (next + wait).max(Instant::now());
    }
}

/// An error with everything that caused it, on one line.
pub fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}
