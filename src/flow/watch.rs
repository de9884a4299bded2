//! Which rows are running, and since when: so that handlers which do not stop are found.
//!
//! A handler past its time is cancelled where it runs. One that blocks its thread cannot be: this is how it is seen, and its
//! block given up.

use crate::store::blocks::{BlockRef, Parts};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use uuid::Uuid;

#[derive(Clone, Debug)]
pub struct Watch {
    began: Instant,
    posts: Arc<Mutex<HashMap<Uuid, Arc<Post>>>>,
}

/// Where a block says what it is doing; a store without a lock for every row.
#[derive(Debug)]
pub struct Post {
    watched: Watched,
    /// Milliseconds from the watch's beginning to the row's deadline; zero between rows.
    deadline: AtomicU64,
    line: AtomicI32,
    reported: AtomicI32,
}

/// A block, with what is needed to give it up without its fiber.
#[derive(Clone, Debug)]
pub struct Watched {
    pub block: BlockRef,
    pub parts: Parts,
    pub command: String,
    pub attempt: i32,
    pub max_attempts: i32,
}

/// A row that runs though its time is over.
#[derive(Clone, Debug)]
pub struct Overdue {
    pub watched: Watched,
    pub line: i32,
    pub late: Duration,
    /// Not reported before.
    pub news: bool,
}

impl Default for Watch {
    fn default() -> Self {
        Self { began: Instant::now(), posts: Arc::default() }
    }
}

impl Watch {
    /// Begins to watch a block; until the guard is dropped.
    pub fn post(&self, watched: Watched) -> Guard {
        let token = watched.block.token;
        let post = Arc::new(Post {
            watched,
            deadline: AtomicU64::new(0),
            line: AtomicI32::new(0),
            reported: AtomicI32::new(0),
        });
        self.lock().insert(token, Arc::clone(&post));
        Guard { watch: self.clone(), post }
    }

    /// Rows that are past their deadline by more than `grace`.
    pub fn overdue(&self, grace: Duration) -> Vec<Overdue> {
        let now = self.now();
        let late = |post: &Arc<Post>| {
            let deadline = post.deadline.load(Ordering::Acquire);
            let late = Duration::from_millis(now.saturating_sub(deadline));
            let line = post.line.load(Ordering::Relaxed);
            (deadline > 0 && late > grace).then(|| Overdue {
                watched: post.watched.clone(),
                line,
                late,
                news: post.reported.swap(line, Ordering::Relaxed) != line,
            })
        };
        self.lock().values().filter_map(late).collect()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Post>>> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub struct Guard {
    watch: Watch,
    post: Arc<Post>,
}

impl Guard {
    pub fn begin(&self, line: i32, timeout: Duration) {
        let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.post.line.store(line, Ordering::Relaxed);
        self.post.deadline.store(self.watch.now().saturating_add(timeout).max(1), Ordering::Release);
    }

    pub fn end(&self) {
        self.post.deadline.store(0, Ordering::Release);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.watch.lock().remove(&self.post.watched.block.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_past_its_deadline_is_seen_and_is_news_once() {
        let watch = Watch::default();
        let block = BlockRef { id: 1, token: Uuid::new_v4(), batch: 7 };
        let (parts, command) = (Parts::default(), "slow".to_owned());
        let guard = watch.post(Watched { block, parts, command, attempt: 1, max_attempts: 3 });
        guard.begin(3, Duration::from_secs(3600));
        assert!(watch.overdue(Duration::ZERO).is_empty());
        guard.begin(4, Duration::ZERO);
        std::thread::park_timeout(Duration::from_millis(5));
        let seen = watch.overdue(Duration::ZERO);
        assert_eq!((seen[0].watched.block.batch, seen[0].line, seen[0].news), (7, 4, true));
        assert!(!watch.overdue(Duration::ZERO)[0].news);
        guard.end();
        assert!(watch.overdue(Duration::ZERO).is_empty());
        guard.begin(5, Duration::ZERO);
        drop(guard);
        std::thread::park_timeout(Duration::from_millis(5));
        assert!(watch.overdue(Duration::ZERO).is_empty());
    }
}
