//! Handlers for demos, tests and benchmarks: noop, sleep, echo, fail.

use super::{
    BlockCall, Config, Done, Handler, Intake, Outcome, OutcomeSink, RowCall, TaskCall, TaskDone, TaskOutcome,
};
use crate::{json::Json, store::pages::InputRow};
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize};
use std::{num::NonZeroUsize, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Which {
    /// Succeeds at once.
    Noop,
    /// Waits, then succeeds.
    Sleep,
    /// The result is the input.
    Echo,
    /// Fails a share of the rows.
    Fail,
}

impl Which {
    pub(super) fn named(name: &str) -> Option<Self> {
        match name {
            "noop" => Some(Self::Noop),
            "sleep" => Some(Self::Sleep),
            "echo" => Some(Self::Echo),
            "fail" => Some(Self::Fail),
            _ => None,
        }
    }
}

/// The ways in which `fail` fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Failure {
    /// An error: a failed try, with further ones up to `retry.max_attempts`.
    #[default]
    Error,
    /// An outcome `failed`: no further try.
    Final,
    /// A panic inside the handler.
    Panic,
    /// The whole process dies.
    Abort,
    /// A success whose result PostgreSQL cannot store.
    Unstorable,
}

#[derive(Debug)]
pub struct Builtin {
    which: Which,
    duration: Duration,
    rate: f64,
    failure: Failure,
    retry_after: Option<Duration>,
    output: Option<String>,
}

impl Builtin {
    pub(super) fn new(name: &str, config: &Config) -> Self {
        let which = config.builtin.or(Which::named(name)).unwrap_or(Which::Noop);
        let usual = if which == Which::Sleep { Duration::from_secs(1) } else { Duration::ZERO };
        Self {
            which,
            duration: config.duration.unwrap_or(usual),
            rate: config.rate.unwrap_or(1.0),
            failure: config.failure.unwrap_or_default(),
            retry_after: config.retry_after,
            output: config.output.clone(),
        }
    }

    /// What becomes of `input`, the `number`-th thing of `group`.
    fn answer(&self, group: i64, number: i64, input: &str) -> Outcome {
        let result = match self.which {
            Which::Fail if chosen(group, number, self.rate) => return self.fail(),
            Which::Echo => Some(Json::from_text(input)),
            Which::Noop | Which::Sleep | Which::Fail => None,
        };
        let line = |name: &String| (name.clone(), format!("{input}\n"));
        Outcome::Succeeded(Done {
            result,
            outputs: self.output.iter().map(line).collect(),
            ..Done::default()
        })
    }

    async fn wait(&self) {
        if !self.duration.is_zero() {
            tokio::time::sleep(self.duration).await;
        }
    }

    fn fail(&self) -> Outcome {
        let error = "the builtin handler `fail` was asked to fail".to_owned();
        match self.failure {
            Failure::Error => Outcome::Retry { error: error.into(), after: self.retry_after },
            Failure::Final => Outcome::Failed(error.into()),
            Failure::Panic => panic!("{error}"),
            Failure::Abort => std::process::abort(),
            Failure::Unstorable => {
                Outcome::Succeeded(Done { result: Some(Json::from_text(r#""\u0000""#)), ..Done::default() })
            }
        }
    }
}

/// Rows that are answered in one go.
const AT_ONCE: usize = 500;

impl Handler for Builtin {
    fn may_block(&self) -> bool {
        false
    }

    /// What neither waits nor fails needs no turn for each row.
    fn intake(&self) -> Intake {
        match (self.which, NonZeroUsize::new(AT_ONCE)) {
            (Which::Noop | Which::Echo, Some(rows)) if self.duration.is_zero() => Intake::Ahead(rows),
            _ => Intake::OneByOne,
        }
    }

    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        if self.which == Which::Noop && self.output.is_none() && self.duration.is_zero() {
            sink.succeeded(rows);
            return futures::future::ready(()).boxed();
        }
        super::block::one_by_one(self, call, rows, sink)
    }

    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        async move {
            self.wait().await;
            self.answer(call.batch, i64::from(call.line), call.input)
        }
        .boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        async move {
            self.wait().await;
            match self.answer(0, call.task.reference.id, call.task.payload.text()) {
                Outcome::Succeeded(done) => {
                    TaskOutcome::Done(TaskDone { result: done.result, ..TaskDone::default() })
                }
                Outcome::Failed(error) => TaskOutcome::Failed(error),
                Outcome::Retry { error, after } => TaskOutcome::Retry { error, after },
            }
        }
        .boxed()
    }
}

/// Whether this one is among the share that fails: the same ones at every try and in every process.
fn chosen(group: i64, number: i64, rate: f64) -> bool {
    place(group, number) < rate || rate >= 1.0
}

/// Where one stands between 0 and 1: neighbours anywhere, so that a few of them are as mixed as many.
pub fn place(group: i64, number: i64) -> f64 {
    let mut mixed = (group as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (number as u64);
    for factor in [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53] {
        mixed = (mixed ^ (mixed >> 33)).wrapping_mul(factor);
    }
    (mixed ^ (mixed >> 33)) as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_spread_over_neighbours() {
        for batch in 1..=50 {
            let half = (1..=100).filter(|line| chosen(batch, *line, 0.5)).count();
            assert!((25..=75).contains(&half), "{half} of 100 lines of batch {batch}");
            assert_eq!((1..=100).filter(|line| chosen(batch, *line, 1.0)).count(), 100);
        }
        let tenths: usize = (1..=1_000).filter(|batch| chosen(*batch, 1, 0.1)).count();
        assert!((60..=140).contains(&tenths), "{tenths} of 1,000 first lines");
    }
}
