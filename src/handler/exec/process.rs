//! One child process that can be given work, and how it ended.

use super::{program::Owned, stderr::Stderr};
use rustix::process::Signal;
use std::{
    io,
    os::{fd::AsFd, unix::process::ExitStatusExt},
    process::ExitStatus,
    time::{Duration, Instant},
};
use tokio::{
    io::BufReader,
    process::{ChildStdin, ChildStdout},
};

/// What Linux lets every user have.
#[cfg(target_os = "linux")]
const PIPE_BYTES: usize = 1 << 20;
/// So long a process that is not wanted any more has to end by itself.
const FAREWELL: Duration = Duration::from_secs(5);

/// Why a process is replaced.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It closed its output, or its output cannot be read.
    Ended,
    /// It closed its output in the middle of a line.
    HalfLine,
    /// It wrote what is no reply; in its own words.
    Noise(String),
    TooLong(usize),
    Late(Duration),
}

/// How a process ended.
#[derive(Debug)]
pub(super) struct Ending {
    /// In our words, fit for any log.
    pub(super) reason: String,
    /// In the program's: what it wrote, which may be anything it was given.
    pub(super) words: Option<String>,
}

impl Ending {
    /// For the row or task it happened to.
    pub(super) fn error(&self) -> String {
        match &self.words {
            Some(words) => format!("{} ({words})", self.reason),
            None => self.reason.clone(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) stdin: ChildStdin,
    pub(super) stdout: BufReader<ChildStdout>,
    pub(super) stderr: Stderr,
    /// Dropped last, and with it the process ends.
    owned: Owned,
    /// It has answered something.
    pub(super) answered: bool,
    /// Its replies name what they are about: then every one has to.
    pub(super) names_requests: bool,
    /// Bytes that its input has taken.
    pub(super) written: u64,
    /// Rows and tasks that it was given.
    pub(super) requests: u64,
    since: Instant,
}

impl Process {
    pub(super) fn new(handler: &str, mut owned: Owned) -> io::Result<Self> {
        let missing = || io::Error::other("a pipe of the child is missing");
        let (stdin, stdout) =
            (owned.0.stdin.take().ok_or_else(missing)?, owned.0.stdout.take().ok_or_else(missing)?);
        widen(&stdin);
        widen(&stdout);
        let (stdin, stdout) = (ChildStdin::from_std(stdin)?, ChildStdout::from_std(stdout)?);
        let stderr = owned.0.stderr.take().ok_or_else(missing)?;
        Ok(Self {
            stdin,
            stdout: BufReader::with_capacity(64 << 10, stdout),
            stderr: Stderr::follow(handler, owned.0.pid(), stderr)?,
            owned,
            answered: false,
            names_requests: false,
            written: 0,
            requests: 0,
            since: Instant::now(),
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.owned.0.status().is_none()
    }

    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether it has written nothing that was not read: else the next reply would be taken for another request's.
    pub(super) fn is_silent(&self) -> bool {
        let in_pipe = rustix::io::ioctl_fionread(self.stdout.get_ref().as_fd());
        self.stdout.buffer().is_empty() && in_pipe.is_ok_and(|bytes| bytes == 0)
    }

    /// The batch or task that it was given last.
    pub(super) fn last_request(&self) -> i64 {
        self.stderr.id()
    }

    /// Whether it has read any of its input. A program that ends before it has read anything ends of itself.
    pub(super) fn has_read(&self) -> bool {
        let unread = rustix::io::ioctl_fionread(self.stdin.as_fd());
        unread.map_or(true, |unread| unread < self.written)
    }

    /// Lets it end by itself, now that it has answered everything.
    pub(super) fn retire(self) {
        let Self { stdin, stdout, stderr, owned, .. } = self;
        // The end of its input is the end of its work.
        drop(stdin);
        tokio::task::spawn_blocking(move || {
            owned.end_within(FAREWELL);
            drop((stdout, stderr));
        });
    }

    /// Ends it if it still runs, and says why it is not wanted any more.
    pub(super) async fn end(self, trouble: Trouble) -> Ending {
        if !matches!(trouble, Trouble::Ended | Trouble::HalfLine) {
            let _ = self.owned.0.signal_group(Signal::KILL);
        }
        let wait = self.owned.0.waiter();
        // One that closed its output and lives on gets a moment to end by itself, for its status is worth knowing.
        let status =
            tokio::task::spawn_blocking(move || wait(Duration::from_millis(500))).await.ok().flatten();
        let mut quoted = None;
        let reason = match trouble {
            Trouble::Ended => format!("the program ended: {}", ending(status)),
            Trouble::HalfLine => format!("the program ended in the middle of a reply: {}", ending(status)),
            Trouble::Noise(what) => {
                quoted = Some(what);
                "the program wrote what is no reply".to_owned()
            }
            Trouble::TooLong(most) => format!("the reply is longer than max_reply_bytes, {most}"),
            Trouble::Late(timeout) => {
                format!("ran longer than its timeout of {}", humantime::format_duration(timeout))
            }
        };
        let words: Vec<String> = quoted.into_iter().chain(self.stderr.last_words().await).collect();
        Ending { reason, words: (!words.is_empty()).then(|| words.join("; ")) }
    }
}

/// Room for a whole block of rows: with less, program and musterd wake each other for every few of them.
fn widen(pipe: &impl AsFd) {
    // The usual size serves too; a user with many pipes may be refused more.
    #[cfg(target_os = "linux")]
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, PIPE_BYTES);
    #[cfg(not(target_os = "linux"))]
    let _ = pipe;
}

fn ending(status: Option<ExitStatus>) -> String {
    match status {
        None => "it closed its output and was killed".to_owned(),
        Some(status) => match status.signal() {
            Some(signal) => format!("killed by signal {signal}"),
            None => format!("exit status {}", status.code().unwrap_or_default()),
        },
    }
}
