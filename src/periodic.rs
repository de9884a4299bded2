//! The one loop that every clock-driven part runs in.

use crate::error_text::describe;
use std::{future::Future, time::Duration};
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;

/// Work that is safe to repeat: it looks at the world and repairs one thing.
///
/// A tick takes no input, so the first tick after a crash does what any other does. It does not retry
/// either: the next tick is the retry.
pub trait Periodic: Send + 'static {
    const NAME: &'static str;
    type Error: std::error::Error + Send + Sync + 'static;

    fn tick(&mut self) -> impl Future<Output = Result<Tally, Self::Error>> + Send;
}

/// How many things a tick has changed. Zero is the usual answer.
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
    let mut failing = None;
    while stop.run_until_cancelled(time::sleep_until(next)).await.is_some() {
        let began = Instant::now();
        match task.tick().await {
            Ok(tally) => {
                if failing.take().is_some() {
                    tracing::info!(part = P::NAME, "periodic task recovered");
                }
                match tally {
                    Tally(0) => tracing::trace!(part = P::NAME, "nothing to do"),
                    Tally(count) => tracing::info!(part = P::NAME, count, "periodic task changed something"),
                }
            }
            Err(error) => {
                // The same trouble once, however long it lasts.
                let error = describe(&error);
                if failing.as_ref() != Some(&error) {
                    tracing::warn!(part = P::NAME, error, "tick failed; the next one retries");
                    failing = Some(error);
                }
            }
        }
        let wait = rhythm.wait();
        if failing.is_none() && began.elapsed() > wait {
            tracing::warn!(part = P::NAME, took = ?began.elapsed(), "a tick took longer than its period");
        }
        // After a late tick the rhythm starts again: no burst to catch up.
        next = (next + wait).max(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Result as Written, Write},
        sync::{Arc, Mutex},
    };

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> Written<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> Written<()> {
            Ok(())
        }
    }

    /// Fails with these words, one a tick; a blank is a tick that goes well. Stops after the last.
    struct Script(Vec<&'static str>, CancellationToken);

    impl Periodic for Script {
        const NAME: &'static str = "script";
        type Error = std::io::Error;

        async fn tick(&mut self) -> Result<Tally, Self::Error> {
            let word = self.0.remove(0);
            if self.0.is_empty() {
                self.1.cancel();
            }
            if word.is_empty() { Ok(Tally(0)) } else { Err(std::io::Error::other(word)) }
        }
    }

    #[test]
    fn a_random_rhythm_keeps_between_its_two_waits_and_uses_all_of_them() {
        let (least, most) = (Duration::from_secs(300), Duration::from_secs(600));
        let waits: Vec<Duration> = (0..10_000).map(|_| Rhythm::Between(least, most).wait()).collect();
        assert!(waits.iter().all(|wait| (least..=most).contains(wait)));
        // Ten equal parts of the five minutes, each with about a thousand of the waits: none is preferred.
        for part in 0..10 {
            let from = least + Duration::from_secs(30) * part;
            let count =
                waits.iter().filter(|wait| (from..from + Duration::from_secs(30)).contains(*wait)).count();
            assert!((800..=1_200).contains(&count), "{count} waits from {from:?} on");
        }
        assert!(
            Rhythm::Between(least, most).first() >= least,
            "replicas started together do not tick together"
        );
        assert_eq!(Rhythm::Between(most, least).wait(), most, "the wrong way round is not negative");
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_is_logged_once_and_then_that_it_is_over() {
        let (log, stop) = (Log::default(), CancellationToken::new());
        let sink = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || sink.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let script = Script(vec!["away", "away", "away", "", "", "away", "odd", ""], stop.clone());
        run(script, Rhythm::Every(Duration::from_secs(1)), stop).await;
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let errors: Vec<&str> =
            text.lines().filter_map(|line| line.rsplit_once("error=").map(|(_, error)| error)).collect();
        assert_eq!(errors, ["\"away\"", "\"away\"", "\"odd\""], "{text}");
        assert_eq!(text.matches("periodic task recovered").count(), 2, "{text}");
    }
}
