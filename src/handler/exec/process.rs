//! One child process: started without a shell, in a group of its own, and gone when nobody needs it.

use super::{ENVIRONMENT, MAX_REPLY_BYTES, pool::Pool, stderr::Stderr, watch};
use crate::{embedded::Tether, handler::Config};
use rustix::process::Signal;
use std::{
    ffi::OsString,
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
    sync::OwnedSemaphorePermit,
};

/// What Linux lets every user have.
#[cfg(target_os = "linux")]
const PIPE_BYTES: usize = 1 << 20;

/// What to start.
#[derive(Clone, Debug)]
pub(super) struct Program {
    handler: String,
    argv: Vec<String>,
    env: Vec<(OsString, OsString)>,
    cwd: Option<PathBuf>,
    max_memory: Option<u64>,
    max_reply_bytes: usize,
}

/// Why a process is replaced.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It closed its output, or its output cannot be read.
    Ended,
    /// It closed its output in the middle of a line.
    HalfLine,
    /// It wrote what is no reply.
    Noise(String),
    TooLong(usize),
    Late(Duration),
}

impl Program {
    pub(super) fn new(handler: &str, config: &Config) -> Self {
        let names: Vec<String> = match &config.env {
            Some(names) => names.clone(),
            None => ENVIRONMENT.map(str::to_owned).to_vec(),
        };
        let env = names.iter().filter_map(|name| Some((name.into(), std::env::var_os(name)?))).collect();
        Self {
            handler: handler.to_owned(),
            argv: config.argv.clone(),
            env,
            cwd: config.cwd.clone(),
            max_memory: config.max_memory.map(|bytes| bytes.get()),
            max_reply_bytes: config.max_reply_bytes.unwrap_or(MAX_REPLY_BYTES),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.argv.first().map_or("", String::as_str)
    }

    /// Starting a process blocks; a caller that gives up meanwhile leaves nothing behind.
    pub(super) async fn start(&self) -> io::Result<Process> {
        let program = self.clone();
        let tether =
            tokio::task::spawn_blocking(move || Owned::spawn(&program)).await.map_err(io::Error::other)??;
        Process::new(tether, self)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.name());
        command.args(self.argv.iter().skip(1)).env_clear().envs(self.env.iter().cloned());
        if let Some(dir) = &self.cwd {
            command.current_dir(dir);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// A child that dies with its owner in this process.
#[derive(Debug)]
struct Owned(Tether);

impl Owned {
    #[expect(unsafe_code, reason = "limits and the word to the watch must be set between fork and exec")]
    fn spawn(program: &Program) -> io::Result<Self> {
        let mut command = program.command();
        let (limit, watch) = (program.max_memory, watch::line());
        let hook = move || {
            if let Some(bytes) = limit {
                let limit = rustix::process::Rlimit { current: Some(bytes), maximum: Some(bytes) };
                rustix::process::setrlimit(rustix::process::Resource::As, limit)?;
            }
            // Before the program can start anything itself: no moment is left in which nobody would clear up after it.
            watch.map_or(Ok(()), |watch| watch.begins())
        };
        // SAFETY: the hook makes system calls only, on values that were copied before the fork.
        unsafe { command.pre_exec(hook) };
        let forget = move |group| watch.map_or((), |watch| watch.ended(group));
        Tether::spawn_group(command, Signal::KILL, forget).map(Self)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Ended already is fine; its group went with it.
        let _ = self.0.signal_group(Signal::KILL);
    }
}

/// A process that can be given work.
#[derive(Debug)]
pub(super) struct Process {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: Stderr,
    /// Dropped last, and with it the process ends.
    owned: Owned,
    max_reply_bytes: usize,
    answered: bool,
}

impl Process {
    fn new(mut owned: Owned, program: &Program) -> io::Result<Self> {
        let missing = || io::Error::other("a pipe of the child is missing");
        let (stdin, stdout) =
            (owned.0.stdin.take().ok_or_else(missing)?, owned.0.stdout.take().ok_or_else(missing)?);
        widen(&stdin);
        widen(&stdout);
        let (stdin, stdout) = (ChildStdin::from_std(stdin)?, ChildStdout::from_std(stdout)?);
        let stderr =
            Stderr::follow(&program.handler, owned.0.pid(), owned.0.stderr.take().ok_or_else(missing)?)?;
        Ok(Self {
            stdin,
            stdout: BufReader::with_capacity(64 << 10, stdout),
            stderr,
            owned,
            max_reply_bytes: program.max_reply_bytes,
            answered: false,
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.owned.0.status().is_none()
    }

    /// Ends it if it still runs, and says why it is not wanted any more.
    async fn end(self, trouble: Trouble) -> String {
        if !matches!(trouble, Trouble::Ended | Trouble::HalfLine) {
            let _ = self.owned.0.signal_group(Signal::KILL);
        }
        let wait = self.owned.0.waiter();
        // One that closed its output and lives on gets a moment to end by itself, for its status is worth knowing.
        let status =
            tokio::task::spawn_blocking(move || wait(Duration::from_millis(500))).await.ok().flatten();
        let reason = match trouble {
            Trouble::Ended => format!("the program ended: {}", ending(status)),
            Trouble::HalfLine => format!("the program ended in the middle of a reply: {}", ending(status)),
            Trouble::Noise(what) => format!("the program wrote what is no reply: {what}"),
            Trouble::TooLong(most) => format!("the reply is longer than max_reply_bytes, {most}"),
            Trouble::Late(timeout) => {
                format!("ran longer than its timeout of {}", humantime::format_duration(timeout))
            }
        };
        match self.stderr.last_words().await {
            Some(words) => format!("{reason} ({words})"),
            None => reason,
        }
    }
}

/// Room for a whole block of rows: with less, program and musterd wake each other for every few of them.
fn widen(pipe: &impl std::os::fd::AsFd) {
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

/// A process in use. Dropped in the middle of something, it takes the process along.
#[derive(Debug)]
pub(super) struct Lease {
    process: Option<Process>,
    pool: Pool,
    place: Option<OwnedSemaphorePermit>,
    clean: bool,
}

impl Lease {
    pub(super) fn new(process: Process, pool: Pool, place: OwnedSemaphorePermit) -> Self {
        Self { process: Some(process), pool, place: Some(place), clean: false }
    }

    /// Its two ends, to be used at the same time.
    pub(super) fn ends(&mut self) -> (Writer<'_>, Reader<'_>) {
        let process = self.process.as_mut().expect("there until it is replaced, which ends the lease");
        let reader = Reader {
            stdout: &mut process.stdout,
            stderr: &process.stderr,
            most: process.max_reply_bytes,
            answered: &mut process.answered,
        };
        (Writer(&mut process.stdin), reader)
    }

    /// Everything that was asked was answered: the process can serve the next.
    pub(super) fn is_clean(&mut self) {
        self.clean = true;
    }

    /// Ends the process and says why.
    pub(super) async fn replace(&mut self, trouble: Trouble) -> String {
        let Some(process) = self.process.take() else { return "the process was replaced".to_owned() };
        if process.answered {
            self.pool.had_answered();
        }
        self.pool.lost();
        process.end(trouble).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (true, Some(process), Some(place)) = (self.clean, self.process.take(), self.place.take()) {
            self.pool.give_back(process, place);
        }
    }
}

pub(super) struct Writer<'a>(&'a mut ChildStdin);

impl Writer<'_> {
    /// What cannot be written will not be answered either, and that is what the reader finds out.
    pub(super) async fn write(&mut self, input: &[u8]) {
        if let Err(error) = self.0.write_all(input).await {
            tracing::debug!(%error, "a program does not read its input any more");
        }
    }
}

pub(super) struct Reader<'a> {
    stdout: &'a mut BufReader<ChildStdout>,
    stderr: &'a Stderr,
    most: usize,
    answered: &'a mut bool,
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
        // Not cancelled in the middle: whoever drops this replaces the process.
        match (&mut *self.stdout).take(most).read_until(b'\n', &mut bytes).await {
            Ok(_) if bytes.last() == Some(&b'\n') => {
                bytes.pop();
                *self.answered = true;
                Ok(bytes)
            }
            Ok(read) if read as u64 >= most => Err(Trouble::TooLong(self.most)),
            Ok(0) | Err(_) => Err(Trouble::Ended),
            Ok(_) => Err(Trouble::HalfLine),
        }
    }
}
