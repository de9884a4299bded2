//! What a program writes to stderr: into the log, with the row it was at, and no more than a log can take.

use crate::handler::protocol::quote;
use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    process::ChildStderr,
    task::JoinHandle,
};

/// The longest line that is read whole; the log gets its beginning.
const LONGEST_LINE: u64 = 8 << 10;
/// Lines of one process in one second; the rest is counted.
const LINES_A_SECOND: u32 = 100;

#[derive(Debug)]
pub(super) struct Stderr {
    shared: Arc<Mutex<Shared>>,
    reading: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The batch or task, and the line of a batch.
    id: i64,
    line: Option<i32>,
    last: Option<String>,
}

impl Stderr {
    pub(super) fn follow(handler: &str, pid: u32, stderr: std::process::ChildStderr) -> io::Result<Self> {
        let stderr = ChildStderr::from_std(stderr)?;
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (handler, heard) = (handler.to_owned(), Arc::clone(&shared));
        #[expect(
            clippy::disallowed_methods,
            reason = "ends with the process it listens to; the handle is kept beside it"
        )]
        let reading = tokio::spawn(async move { listen(&handler, pid, stderr, &heard).await });
        Ok(Self { shared, reading })
    }

    pub(super) fn about(&self, id: i64, line: Option<i32>) {
        let mut shared = lock(&self.shared);
        (shared.id, shared.line) = (id, line);
    }

    /// The batch or task it is about.
    pub(super) fn id(&self) -> i64 {
        lock(&self.shared).id
    }

    /// The last line of a process that has ended.
    pub(super) async fn last_words(mut self) -> Option<String> {
        // Its group is dead, so the pipe ends; one that a process outside the group holds open is not waited for.
        let _ = tokio::time::timeout(Duration::from_millis(200), &mut self.reading).await;
        lock(&self.shared).last.take()
    }
}

impl Drop for Stderr {
    /// A process outside the group may hold the pipe for ever: it is not read for longer than the program lives.
    fn drop(&mut self) {
        self.reading.abort();
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn listen(handler: &str, pid: u32, stderr: ChildStderr, shared: &Mutex<Shared>) {
    let mut stderr = BufReader::new(stderr);
    let (mut second, mut lines, mut dropped) = (Instant::now(), 0, 0_u64);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match (&mut stderr).take(LONGEST_LINE).read_until(b'\n', &mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = quote(&bytes);
        if text.is_empty() {
            continue;
        }
        if second.elapsed() >= Duration::from_secs(1) {
            if dropped > 0 {
                tracing::warn!(handler, pid, dropped, "the program wrote more to stderr than the log takes");
            }
            (second, lines, dropped) = (Instant::now(), 0, 0);
        }
        let (id, line) = {
            let mut shared = lock(shared);
            shared.last = Some(text.clone());
            (shared.id, shared.line)
        };
        lines += 1;
        if lines > LINES_A_SECOND {
            dropped += 1;
            continue;
        }
        match line {
            Some(line) => tracing::info!(handler, pid, batch = id, line, stderr = text, "the program says"),
            None => tracing::info!(handler, pid, task = id, stderr = text, "the program says"),
        }
    }
}
