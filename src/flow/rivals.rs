//! Tasks and rows of one queue share its fibers. The side with the better priority goes first; a side that has nothing is
//! not waited for.
//!
//! A side that defers and gets nothing says so and wakes the other. The other then claims, or has nothing either; in both
//! cases it wakes the first. So no side sleeps over work, and two empty sides fall silent after a claim or two.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};
use tokio::sync::Notify;

/// One of the two.
#[derive(Debug, Default)]
struct Side {
    wake: Notify,
    /// Its last claim, not behind the other's work, found nothing.
    empty: AtomicBool,
    /// Its last claim found nothing that was not behind the other's.
    yielded: AtomicBool,
}

/// One side's view of the two.
#[derive(Clone, Debug)]
pub struct Rival {
    me: Arc<Side>,
    other: Arc<Side>,
}

/// The rows' side and the tasks' side of one queue.
pub fn pair() -> (Rival, Rival) {
    let (rows, tasks) = (Arc::new(Side::default()), Arc::new(Side::default()));
    (Rival { me: Arc::clone(&rows), other: Arc::clone(&tasks) }, Rival { me: tasks, other: rows })
}

impl Rival {
    /// There may be work for either.
    pub fn news(&self) {
        for side in [&self.me, &self.other] {
            side.empty.store(false, SeqCst);
            side.wake.notify_one();
        }
    }

    /// Until there is a reason to look again.
    pub async fn woken(&self) {
        self.me.wake.notified().await;
    }

    /// Whether the other may have something better.
    pub fn defers(&self) -> bool {
        !self.other.empty.load(SeqCst)
    }

    /// A claim came back; `deferred`: it took nothing that was behind the other's work.
    pub fn claimed(&self, count: usize, deferred: bool) {
        let other_yielded = self.other.yielded.swap(false, SeqCst);
        let nothing = count == 0;
        // Both behind each other: what this side was deferred to is out of reach (locked), so the other need not wait.
        self.me.empty.store(nothing && (!deferred || other_yielded), SeqCst);
        if other_yielded {
            self.other.wake.notify_one();
        } else if nothing && deferred {
            self.me.yielded.store(true, SeqCst);
            self.other.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn is_woken(side: &Rival) -> bool {
        side.woken().now_or_never().is_some()
    }

    #[test]
    fn who_yields_is_woken_by_the_others_claim() {
        let (rows, tasks) = pair();
        rows.claimed(0, rows.defers());
        assert!(is_woken(&tasks) && !is_woken(&rows));
        tasks.claimed(3, tasks.defers());
        assert!(is_woken(&rows) && !is_woken(&tasks));
        assert!(rows.defers(), "there may be more tasks");
    }

    #[test]
    fn two_sides_without_work_fall_silent() {
        let (rows, tasks) = pair();
        rows.claimed(0, rows.defers());
        let mut claims = 0;
        while let Some(side) = [&rows, &tasks].into_iter().find(|side| is_woken(side)) {
            claims += 1;
            side.claimed(0, side.defers());
        }
        assert_eq!(claims, 2, "the tasks, and the rows once more without deferring");
        assert!(!rows.defers() && !tasks.defers());
        rows.news();
        assert!(rows.defers() && tasks.defers());
    }

    #[test]
    fn better_work_that_is_out_of_reach_is_not_waited_for() {
        let (rows, tasks) = pair();
        rows.claimed(0, true);
        tasks.claimed(0, true);
        assert!(is_woken(&rows));
        assert!(!rows.defers());
    }
}
