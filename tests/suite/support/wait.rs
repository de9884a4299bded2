//! Waiting with an end: a test that hangs should fail, and say at what.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

/// Longer than anything takes on a busy machine: a limit that a test waits out only when it fails.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// The result of `future`, which must come within `limit`.
#[track_caller]
pub(crate) fn within<F: Future>(limit: Duration, future: F) -> impl Future<Output = F::Output> {
    let place = std::panic::Location::caller();
    let future = Box::pin(timeout(limit, future));
    async move { future.await.unwrap_or_else(|_| panic!("nothing after {limit:?} at {place}")) }
}

/// Asks `probe` until it has an answer, for at most `limit`. Only for what has no event to wait for, such as a state
/// in the database.
pub(crate) async fn eventually<T>(
    limit: Duration,
    what: &str,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(answer) = probe().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a process of this number is there and not a zombie.
pub(crate) fn process_runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        // The state follows the name, which is in parentheses and may have any character in it.
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])))
}
