//! Tasks together: quick procedures share a transaction, and with it the wait for the disk at its commit. All of them succeed, or
//! nothing has happened and each runs by itself.

use super::{Sql, is_lost};
use crate::{
    backoff,
    handler::{TaskCall, TaskOutcome},
    store::tasks::Finish,
};
use futures::future::{MaybeDone, maybe_done};
use std::{
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::Poll,
    time::{Duration, Instant},
};
use tokio_postgres::Error;

/// Tasks of one transaction, unless the configuration says otherwise.
pub(super) const MOST: usize = 32;

/// Longer than quick tasks take together, and the longest that one of them keeps the locks of the others.
const LIMIT: Duration = Duration::from_millis(300);

/// How many tasks may share a transaction. After tasks that could not, each runs by itself for a while.
#[derive(Debug)]
pub(super) struct Together {
    most: usize,
    apart: Mutex<Apart>,
}

#[derive(Debug, Default)]
struct Apart {
    /// Transactions in a row that came to nothing.
    failures: u32,
    until: Option<Instant>,
}

impl Together {
    pub(super) fn new(most: usize) -> Self {
        Self { most, apart: Mutex::default() }
    }

    pub(super) fn most(&self) -> usize {
        let apart = self.apart.lock().unwrap_or_else(PoisonError::into_inner);
        if apart.until.is_some_and(|until| Instant::now() < until) { 1 } else { self.most }
    }

    fn worked(&self) {
        *self.apart.lock().unwrap_or_else(PoisonError::into_inner) = Apart::default();
    }

    fn failed(&self) {
        let mut apart = self.apart.lock().unwrap_or_else(PoisonError::into_inner);
        apart.failures = apart.failures.saturating_add(1);
        let pause = backoff::delay(Duration::from_millis(100), Duration::from_secs(60), apart.failures);
        apart.until = Some(Instant::now() + pause);
    }
}

impl Sql {
    /// `None`: everything was rolled back, and each is to be tried by itself.
    pub(super) async fn attempt_together(&self, calls: &[TaskCall<'_>]) -> Option<Vec<TaskOutcome>> {
        let (session, bystander) = self.database.session().await.ok()?;
        match tokio::time::timeout(LIMIT, self.transact(session.client(), calls)).await {
            Ok(Ok((finish, condition))) => {
                session.finish(condition);
                // One of them was not held any more.
                if finish.finished.is_empty() {
                    return None;
                }
                self.together.worked();
                Some(share(finish, calls))
            }
            // Any of them may have done it, so each is a suspect, if one is: a suspect runs by itself.
            Ok(Err(error)) if is_lost(&error) => {
                let ending = session.ending();
                session.discard(&error);
                let outcome = self.judge(calls.first()?.task, &error, &ending, bystander.as_deref()).await;
                Some(vec![outcome; calls.len()])
            }
            Ok(Err(error)) => {
                session.discard(&error);
                self.together.failed();
                None
            }
            // The session is dropped, and with that its query cancelled.
            Err(_) => {
                self.together.failed();
                None
            }
        }
    }
}

/// What one transaction finished, as the outcome of each task.
fn share(mut finish: Finish, calls: &[TaskCall<'_>]) -> Vec<TaskOutcome> {
    let own = |call: &TaskCall<'_>| {
        let finished = finish.finished.remove_entry(&call.task.reference.id);
        let uncles = std::mem::take(&mut finish.uncles);
        TaskOutcome::Committed(Finish { finished: finished.into_iter().collect(), uncles })
    };
    calls.iter().map(own).collect()
}

/// Waits for all of them; polls them in their order, so that the statements they send leave in this order. The error is the first one.
pub(super) async fn in_order<F>(futures: impl Iterator<Item = F>) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let mut futures: Vec<Pin<Box<MaybeDone<F>>>> =
        futures.map(|future| Box::pin(maybe_done(future))).collect();
    std::future::poll_fn(|cx| {
        let mut pending = false;
        for future in &mut futures {
            pending |= future.as_mut().poll(cx).is_pending();
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    futures.iter_mut().filter_map(|future| future.as_mut().take_output()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failure_tasks_run_apart_for_a_while_that_grows() {
        let together = Together::new(32);
        assert_eq!(together.most(), 32);
        together.failed();
        assert_eq!(together.most(), 1);
        together.worked();
        assert_eq!(together.most(), 32);
        (0..5).for_each(|_| together.failed());
        let until = together.apart.lock().unwrap().until.unwrap();
        assert!(until > Instant::now() + Duration::from_millis(500));
    }

    #[tokio::test]
    async fn futures_are_first_polled_in_their_order() {
        let seen = Mutex::new(Vec::new());
        let note = async |place: u32| {
            seen.lock().unwrap().push(place);
            tokio::task::yield_now().await;
            Ok(())
        };
        in_order((0..100).map(&note)).await.unwrap();
        assert!(seen.lock().unwrap().is_sorted());
    }
}
