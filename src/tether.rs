//! A child process that never outlives its owner: the kernel signals it when the owner dies, however that happens.
//!
//! Linux ties the parent-death signal to the *thread* that forked, not to the process, so every child gets a
//! thread of its own that forks it and then only waits for its end. Elsewhere there is no such signal; there the
//! next start repairs that.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// A running (or ended) child and the end of it.
#[derive(Debug)]
pub struct Tether {
    pid: Pid,
    /// The child's standard input, if it was piped.
    pub stdin: Option<ChildStdin>,
    /// The child's standard output, if it was piped.
    pub stdout: Option<ChildStdout>,
    /// The child's standard error, if it was piped.
    pub stderr: Option<ChildStderr>,
    ending: Arc<Ending>,
}

#[derive(Debug, Default)]
struct Ending {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Tether {
    /// Starts `command`; should this process die, the child gets `at_death`.
    pub fn spawn(command: Command, at_death: Signal) -> io::Result<Self> {
        Self::start(command, at_death, |_| (), |_| ())
    }

    /// Starts `command` as the leader of a process group of its own. When the leader ends, for whatever reason, the rest of
    /// its group is killed. `at_start` and `at_end` get the group's number; at the end no other process can have it yet.
    pub fn spawn_group(
        mut command: Command,
        at_death: Signal,
        at_start: impl FnOnce(u32) + Send + 'static,
        at_end: impl FnOnce(u32) + Send + 'static,
    ) -> io::Result<Self> {
        command.process_group(0);
        let number = |pid: Pid| pid.as_raw_nonzero().get().unsigned_abs();
        let at_start = move |pid| at_start(number(pid));
        Self::start(command, at_death, at_start, move |pid| {
            // An empty group is no error.
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
            at_end(number(pid));
        })
    }

    fn start(
        mut command: Command,
        at_death: Signal,
        at_start: impl FnOnce(Pid) + Send + 'static,
        at_end: impl FnOnce(Pid) + Send + 'static,
    ) -> io::Result<Self> {
        send_when_parent_dies(&mut command, at_death);
        let ending = Arc::new(Ending::default());
        let (report, born) = mpsc::sync_channel(1);
        let shared = Arc::clone(&ending);
        std::thread::Builder::new().name("tether".into()).spawn(move || match command.spawn() {
            Ok(mut child) => {
                let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
                let pid = Pid::from_child(&child);
                at_start(pid);
                // The receiver is this function's caller, which waits; a failed send changes nothing here.
                let _ = report.send(Ok((pid, pipes)));
                shared.wait_for(pid, child, at_end);
            }
            Err(error) => {
                let _ = report.send(Err(error));
            }
        })?;
        let (pid, (stdin, stdout, stderr)) =
            born.recv().map_err(|_| io::Error::other("the thread that starts the child died"))??;
        Ok(Self { pid, stdin, stdout, stderr, ending })
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends `signal` unless the child has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        self.if_alive(|| rustix::process::kill_process(self.pid, signal))
    }

    /// Sends `signal` to the child's process group, which it must lead (`Command::process_group(0)`).
    pub fn signal_group(&self, signal: Signal) -> io::Result<()> {
        self.if_alive(|| rustix::process::kill_process_group(self.pid, signal))
    }

    /// How the child ended, if it has.
    pub fn status(&self) -> Option<ExitStatus> {
        *self.ending.lock()
    }

    /// Waits for the child's end, at most `limit`.
    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        self.ending.wait(limit)
    }

    /// A handle that waits for the end from elsewhere, for example a blocking task.
    pub fn waiter(&self) -> impl Fn(Duration) -> Option<ExitStatus> + Send + 'static {
        let ending = Arc::clone(&self.ending);
        move |limit| ending.wait(limit)
    }

    fn if_alive(&self, send: impl FnOnce() -> rustix::io::Result<()>) -> io::Result<()> {
        // The child is reaped under this lock, so while we hold it the pid cannot become another process's.
        let status = self.ending.lock();
        if status.is_some() { Ok(()) } else { Ok(send()?) }
    }
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the child has ended, then reaps it.
    fn wait_for(&self, pid: Pid, mut child: Child, at_end: impl FnOnce(Pid)) {
        // NOWAIT leaves the zombie, and with it the pid, until the lock is ours.
        while let Err(rustix::io::Errno::INTR) =
            rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
        {}
        let mut status = self.lock();
        at_end(pid);
        // A status that cannot be read (another part reaped the child) is still an end.
        *status = Some(child.wait().unwrap_or(ExitStatus::from_raw(0)));
        self.changed.notify_all();
    }

    fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        let mut status = self.lock();
        while status.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (status, _) = self.changed.wait_timeout(status, left).unwrap_or_else(PoisonError::into_inner);
        }
        *status
    }
}

#[cfg(target_os = "linux")]
#[expect(
    unsafe_code,
    reason = "a hook between fork and exec is the only place to ask for the parent-death signal"
)]
fn send_when_parent_dies(command: &mut Command, signal: Signal) {
    let parent = rustix::process::getpid();
    let hook = move || {
        rustix::process::set_parent_process_death_signal(Some(signal))?;
        // The parent may have died before the line above; then the signal would never be sent.
        match rustix::process::getppid() {
            Some(now) if now == parent => Ok(()),
            _ => Err(rustix::io::Errno::SRCH.into()),
        }
    };
    // SAFETY: the hook makes two system calls and touches no memory that another thread could have left locked.
    unsafe { command.pre_exec(hook) };
}

#[cfg(not(target_os = "linux"))]
fn send_when_parent_dies(_command: &mut Command, _signal: Signal) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Command {
        let mut command = Command::new("sleep");
        command.arg("600");
        command
    }

    #[test]
    fn a_child_is_signalled_and_its_end_is_known() {
        let tether = Tether::spawn(sleeper(), Signal::KILL).unwrap();
        assert_eq!(tether.status(), None);
        assert_eq!(tether.wait(Duration::from_millis(1)), None);
        tether.signal(Signal::TERM).unwrap();
        let status = tether.wait(Duration::from_secs(10)).unwrap();
        assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
        tether.signal(Signal::TERM).unwrap();
    }

    #[test]
    fn what_a_leader_leaves_behind_in_its_group_is_killed() {
        use std::io::Read;
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!"]).stdout(std::process::Stdio::piped());
        let mut tether = Tether::spawn_group(command, Signal::KILL, |_| (), |_| ()).unwrap();
        let mut out = String::new();
        // The grandchild holds the other end of the pipe: it ends when that one does.
        tether.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert!(out.trim().parse::<u32>().is_ok(), "{out}");
        assert!(tether.wait(Duration::from_secs(10)).is_some());
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_of_the_caller() {
        let error = Tether::spawn(Command::new("/nonexistent/program"), Signal::KILL).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_child_outlives_the_thread_that_asked_for_it() {
        let tether = std::thread::spawn(|| Tether::spawn(sleeper(), Signal::KILL).unwrap()).join().unwrap();
        // Were the signal tied to the asking thread, the child would be dead by now or very soon.
        assert_eq!(tether.wait(Duration::from_millis(200)), None);
        tether.signal(Signal::KILL).unwrap();
        assert!(tether.wait(Duration::from_secs(10)).is_some());
    }
}
