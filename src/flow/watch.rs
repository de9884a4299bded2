//! Which rows and tasks are running, and since when: so that handlers which do not stop are found.
//!
//! A handler past its time is cancelled where it runs. One that blocks its thread cannot be: this is how it is seen, and its row or
//! task given up. A fiber and the look from outside agree by one exchange each: on what is given up, and on who gives back the tasks
//! that wait behind another one.

use crate::held::Key;
use crate::store::{
    blocks::{BlockRef, Parts},
    tasks::Task,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

#[derive(Clone, Debug)]
pub struct Watch {
    began: Instant,
    posts: Arc<Mutex<HashMap<Key, Arc<Post>>>>,
}

/// What a fiber runs, with what is needed to give it up without the fiber.
#[derive(Clone, Debug)]
pub enum Watched {
    Block(WatchedBlock),
    /// Tasks that one fiber runs one after the other; never empty.
    Tasks(Arc<Vec<Task>>),
}

#[derive(Clone, Debug)]
pub struct WatchedBlock {
    pub block: BlockRef,
    pub parts: Parts,
    pub command: String,
    pub attempt: i32,
    pub max_attempts: i32,
}

/// Where a fiber says what it is doing; a store without a lock for every row.
#[derive(Debug)]
pub struct Post {
    watched: Watched,
    since: Instant,
    /// Milliseconds from the watch's beginning to the deadline of what runs; [`IDLE`] between two, [`GIVEN_UP`] afterwards.
    deadline: AtomicU64,
    /// The line that runs, or the place of the task. The tasks behind it belong to the fiber; once they were given back, all bits are
    /// inverted.
    place: AtomicI32,
}

const IDLE: u64 = 0;
const GIVEN_UP: u64 = u64::MAX;

/// What runs though its time is over, and was not seen before. It is given up: the fiber learns of it when it comes back.
#[derive(Clone, Debug)]
pub struct Overdue {
    post: Arc<Post>,
    pub late: Duration,
}

/// What a look found.
#[derive(Debug, Default)]
pub struct Late {
    pub news: Vec<Overdue>,
    /// With those that were given up before.
    pub count: usize,
}

impl Default for Watch {
    fn default() -> Self {
        Self { began: Instant::now(), posts: Arc::default() }
    }
}

impl Watched {
    fn key(&self) -> Option<Key> {
        match self {
            Self::Block(block) => Some(block.block.token.into()),
            Self::Tasks(tasks) => tasks.first().map(|task| task.reference.into()),
        }
    }
}

impl Watch {
    /// Begins to watch; until the guard is dropped.
    pub fn post(&self, watched: Watched) -> Guard {
        let key = watched.key();
        let post = Arc::new(Post {
            watched,
            since: Instant::now(),
            deadline: AtomicU64::new(IDLE),
            place: AtomicI32::new(0),
        });
        if let Some(key) = key {
            self.lock().insert(key, Arc::clone(&post));
        }
        Guard { watch: self.clone(), post }
    }

    /// Rows and tasks that are past their deadline by more than `grace`. Those that are new are given up by this.
    pub fn overdue(&self, grace: Duration) -> Late {
        let now = self.now();
        let mut found = Late::default();
        for post in self.lock().values() {
            let deadline = post.deadline.load(Ordering::Acquire);
            let late = Duration::from_millis(now.saturating_sub(deadline));
            if deadline == GIVEN_UP {
                found.count += 1;
            } else if deadline != IDLE && late > grace && post.give_up(deadline) {
                found.count += 1;
                found.news.push(Overdue { post: Arc::clone(post), late });
            }
        }
        found
    }

    /// Tasks that have waited for longer than `patience` behind one that blocks their fiber. They are the caller's to give back.
    pub fn stranded(&self, patience: Duration) -> Vec<Task> {
        let posts = self.lock();
        let waiting = posts.values().filter(|post| post.since.elapsed() > patience && post.has_more());
        waiting.flat_map(|post| post.take_rest()).cloned().collect()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Post>>> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Overdue {
    pub fn watched(&self) -> &Watched {
        &self.post.watched
    }

    /// Of a block: the line that runs.
    pub fn line(&self) -> i32 {
        self.post.place.load(Ordering::Relaxed)
    }

    /// The task that runs.
    pub fn task(&self) -> Option<&Task> {
        match &self.post.watched {
            Watched::Tasks(tasks) => tasks.get(place_of(self.post.place.load(Ordering::Acquire))),
            Watched::Block(_) => None,
        }
    }

    /// The tasks that wait behind it. They are the caller's to give back.
    pub fn take_rest(&self) -> &[Task] {
        self.post.take_rest()
    }
}

/// The place of a task, whether or not those behind it were given back.
fn place_of(place: i32) -> usize {
    usize::try_from(if place < 0 { !place } else { place }).unwrap_or_default()
}

impl Post {
    fn give_up(&self, deadline: u64) -> bool {
        self.deadline.compare_exchange(deadline, GIVEN_UP, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes the tasks behind the one that runs; none when they were taken before.
    fn take_rest(&self) -> &[Task] {
        let Watched::Tasks(tasks) = &self.watched else { return &[] };
        let place = self.place.load(Ordering::Acquire);
        let is_taken = place >= 0
            && self.place.compare_exchange(place, !place, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if is_taken { tasks.get(place_of(place) + 1..).unwrap_or_default() } else { &[] }
    }

    fn has_more(&self) -> bool {
        let place = self.place.load(Ordering::Acquire);
        matches!(&self.watched, Watched::Tasks(tasks) if place >= 0 && place_of(place) + 1 < tasks.len())
    }
}

#[derive(Debug)]
pub struct Guard {
    watch: Watch,
    post: Arc<Post>,
}

impl Guard {
    /// A row begins.
    pub fn begin_row(&self, line: i32, timeout: Duration) {
        self.post.place.store(line, Ordering::Relaxed);
        self.begin(timeout);
    }

    /// What is next begins.
    pub fn begin(&self, timeout: Duration) {
        let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let deadline = self.watch.now().saturating_add(timeout).clamp(IDLE + 1, GIVEN_UP - 1);
        self.post.deadline.store(deadline, Ordering::Release);
    }

    /// It has returned. False: it was given up before.
    pub fn end(&self) -> bool {
        self.post.deadline.swap(IDLE, Ordering::AcqRel) != GIVEN_UP
    }

    /// The task behind the last one begins. False: it was given back before.
    pub fn advance(&self) -> bool {
        let place = self.post.place.load(Ordering::Acquire);
        place >= 0
            && self.post.place.compare_exchange(place, place + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The tasks behind the one that runs. They are the caller's to give back.
    pub fn take_rest(&self) -> &[Task] {
        self.post.take_rest()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(key) = self.post.watched.key() {
            self.watch.lock().remove(&key);
        }
    }
}

#[cfg(test)]
mod tests;
