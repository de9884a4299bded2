//! The lane for batches that have files to upload: few at a time, and a failed one rests, longer each time.
//!
//! Uploads take long and fail for reasons of their own (a server that is away, a disk that is full). They must neither
//! hold up batches without files nor give up after five tries; and a fault that hits a thousand batches is one line.

use crate::{backoff, error_text::describe, flow::outputs::OutputsError, store::UPLOADS};
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};
use tokio::time::Instant;

/// The rest after a failed upload: doubled with each further one, and never longer.
const SHORTEST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct UploadLane {
    waiting: HashMap<i64, Waiting>,
    /// By batch: how often its upload has failed.
    under_way: HashMap<i64, u32>,
    /// Causes that were logged and have not gone away yet.
    complaints: HashSet<&'static str>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    due: Instant,
    failures: u32,
}

impl UploadLane {
    /// A batch waits for its turn.
    pub(super) fn enter(&mut self, id: i64) {
        self.waiting.entry(id).or_insert(Waiting { due: Instant::now(), failures: 0 });
    }

    /// The batch whose turn it is, if there is room, and how often its upload has failed.
    pub(super) fn next(&mut self) -> Option<(i64, u32)> {
        if !self.has_room() {
            return None;
        }
        let (id, waiting) =
            self.waiting.iter().min_by_key(|(_, waiting)| waiting.due).map(|(id, w)| (*id, *w))?;
        if waiting.due > Instant::now() {
            return None;
        }
        self.waiting.remove(&id);
        self.under_way.insert(id, waiting.failures);
        Some((id, waiting.failures))
    }

    /// When `next` will have something, as far as that is known.
    pub(super) fn next_due(&self) -> Option<Instant> {
        if !self.has_room() {
            return None;
        }
        self.waiting.values().map(|waiting| waiting.due).min()
    }

    fn has_room(&self) -> bool {
        self.under_way.len() < UPLOADS as usize
    }

    /// A batch leaves the lane: it ended with its files, or (another worker was first) there was nothing to upload.
    pub(super) fn left(&mut self, id: i64, uploaded: bool) {
        self.under_way.remove(&id);
        if uploaded && !std::mem::take(&mut self.complaints).is_empty() {
            tracing::info!("outputs can be uploaded again");
        }
    }

    /// An upload failed: it rests. Every distinct cause is logged once, until something has worked again.
    pub(super) fn failed(&mut self, id: i64, error: &OutputsError) {
        let failures = self.under_way.remove(&id).unwrap_or_default() + 1;
        let rest = backoff::delay(SHORTEST_REST, LONGEST_REST, failures);
        self.waiting.insert(id, Waiting { due: Instant::now() + rest, failures });
        let error_text = describe(error);
        if error.is_busy() {
            tracing::debug!(batch = id, failures, ?rest, "another worker is uploading the outputs");
        } else if self.complaints.insert(error.cause()) {
            tracing::error!(
                batch = id,
                error = error_text,
                "outputs cannot be uploaded; the batch ends once they can: trying again, at most 30 s apart"
            );
        } else {
            tracing::debug!(batch = id, failures, ?rest, error = error_text, "the upload failed again");
        }
    }

    /// At the end of the daemon nothing waits for what has failed before. How many there were.
    pub(super) fn abandon_resting(&mut self) -> Vec<i64> {
        let resting: Vec<i64> =
            self.waiting.iter().filter(|(_, waiting)| waiting.failures > 0).map(|(id, _)| *id).collect();
        self.waiting.retain(|_, waiting| waiting.failures == 0);
        resting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{ObjectError, Op};

    fn no_bucket(key: &str) -> OutputsError {
        let (at, bucket, endpoint) = (key.to_owned(), "b".to_owned(), "http://h".to_owned());
        ObjectError::NoSuchBucket { op: Op::Write, at, bucket, endpoint }.into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_upload_rests_longer_each_time_and_lets_others_pass() {
        let mut lane = UploadLane::default();
        lane.enter(7);
        let mut rest = Duration::ZERO;
        for failures in 0..10 {
            assert_eq!(lane.next(), Some((7, failures)), "after {failures} failures");
            lane.failed(7, &no_bucket("a"));
            lane.enter(7); // asked for again meanwhile: it goes on resting
            assert_eq!(lane.next(), None);
            lane.enter(8);
            assert_eq!(lane.next(), Some((8, 0)), "another batch does not wait for it");
            lane.left(8, true);
            let due = lane.next_due().unwrap();
            rest = due - Instant::now();
            tokio::time::sleep_until(due).await;
        }
        assert!((15..=30).contains(&rest.as_secs()), "{rest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_room_for_few_and_the_rest_wait() {
        let mut lane = UploadLane::default();
        (0..10).for_each(|id| lane.enter(id));
        let begun: Vec<i64> = std::iter::from_fn(|| lane.next()).map(|(id, _)| id).collect();
        assert_eq!(begun.len(), UPLOADS as usize);
        assert_eq!(lane.next_due(), None, "nothing to wait for but the end of one");
        lane.left(begun[0], true);
        assert!(lane.next().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_end_only_what_has_failed_is_given_up() {
        let mut lane = UploadLane::default();
        lane.enter(1);
        assert_eq!(lane.next(), Some((1, 0)));
        lane.failed(1, &no_bucket("a"));
        lane.enter(2);
        assert_eq!(lane.abandon_resting(), [1]);
        assert_eq!(lane.next(), Some((2, 0)));
    }
}
