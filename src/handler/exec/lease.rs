//! A process in use: what it is asked, what it answers, and whether it can be asked again.

use super::{
    pool::Pool,
    process::{Ending, Process, Trouble},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
    sync::OwnedSemaphorePermit,
};

/// Dropped in the middle of something, it takes the process along.
#[derive(Debug)]
pub(super) struct Lease {
    process: Option<Process>,
    pool: Pool,
    place: Option<OwnedSemaphorePermit>,
    clean: bool,
}

/// A process that ended, and what that says.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) ending: Ending,
    /// It ended, of itself or by a signal, before it had answered anything.
    pub(super) silent: bool,
    /// It had read some of its input by then.
    pub(super) had_read: bool,
}

impl Lease {
    pub(super) fn new(process: Process, pool: Pool, place: OwnedSemaphorePermit) -> Self {
        Self { process: Some(process), pool, place: Some(place), clean: false }
    }

    /// Its two ends, to be used at the same time, for so many rows or tasks.
    pub(super) fn ends(&mut self, requests: usize) -> (Writer<'_>, Reader<'_>) {
        let process = self.process.as_mut().expect("there until it is replaced, which ends the lease");
        process.requests += requests as u64;
        let reader = Reader {
            stdout: &mut process.stdout,
            stderr: &process.stderr,
            most: self.pool.max_reply_bytes(),
            answered: &mut process.answered,
            names_requests: &mut process.names_requests,
            pool: &self.pool,
        };
        (Writer { stdin: &mut process.stdin, written: &mut process.written }, reader)
    }

    /// How many rows and tasks it may still be given.
    pub(super) fn left(&self) -> usize {
        let given = self.process.as_ref().map_or(0, |process| process.requests);
        self.pool.max_requests().map_or(usize::MAX, |most| most.saturating_sub(given).max(1) as usize)
    }

    /// Whether nothing is left of its output: the reply that was read is the one that was asked for.
    pub(super) fn is_silent(&self) -> bool {
        self.process.as_ref().is_some_and(Process::is_silent)
    }

    /// Everything that was asked was answered: the process can serve the next.
    pub(super) fn is_clean(&mut self) {
        self.clean = true;
    }

    /// Ends the process and says why.
    pub(super) async fn replace(&mut self, trouble: Trouble) -> Loss {
        let Some(process) = self.process.take() else {
            let ending = Ending { reason: "the process was replaced".to_owned(), words: None };
            return Loss { ending, silent: false, had_read: true };
        };
        let silent = matches!(trouble, Trouble::Ended) && !process.answered;
        let had_read = process.has_read();
        if !process.answered {
            self.pool.lost();
        }
        Loss { ending: process.end(trouble).await, silent, had_read }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (true, Some(process), Some(place)) = (self.clean, self.process.take(), self.place.take()) {
            self.pool.give_back(process, place);
        }
    }
}

pub(super) struct Writer<'a> {
    stdin: &'a mut ChildStdin,
    written: &'a mut u64,
}

impl Writer<'_> {
    /// What cannot be written will not be answered either, and that is what the reader finds out.
    pub(super) async fn write(&mut self, mut input: &[u8]) {
        while !input.is_empty() {
            match self.stdin.write(input).await {
                Ok(taken @ 1..) => {
                    *self.written += taken as u64;
                    input = &input[taken..];
                }
                Ok(0) => return,
                Err(error) => {
                    return tracing::debug!(%error, "a program does not read its input any more");
                }
            }
        }
    }
}

pub(super) struct Reader<'a> {
    stdout: &'a mut BufReader<ChildStdout>,
    stderr: &'a super::stderr::Stderr,
    most: usize,
    answered: &'a mut bool,
    names_requests: &'a mut bool,
    pool: &'a Pool,
}

impl Reader<'_> {
    /// From now on what it writes to stderr is about this.
    pub(super) fn begins(&self, id: i64, line: Option<i32>) {
        self.stderr.about(id, line);
    }

    /// The next line, without its end.
    pub(super) async fn line(&mut self) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        let most = self.most as u64 + 1;
        // Not cancelled in the middle: a caller that drops this replaces the process.
        match (&mut *self.stdout).take(most).read_until(b'\n', &mut bytes).await {
            Ok(_) if bytes.last() == Some(&b'\n') => {
                bytes.pop();
                if !std::mem::replace(self.answered, true) {
                    self.pool.answered();
                }
                Ok(bytes)
            }
            Ok(read) if read as u64 >= most => Err(Trouble::TooLong(self.most)),
            Ok(0) | Err(_) => Err(Trouble::Ended),
            Ok(_) => Err(Trouble::HalfLine),
        }
    }

    /// Whether a reply names what it is about. A process that has done so once does so always, or has lost its place.
    pub(super) fn accepts(&mut self, names_its_request: bool) -> bool {
        *self.names_requests |= names_its_request;
        *self.names_requests == names_its_request
    }
}
