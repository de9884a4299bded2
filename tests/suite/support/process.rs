//! Any command of the binary that stays: its output apart by stream, its signals, its end.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use musterd::tether::Tether;
use rustix::process::Signal;

use super::daemon::Log;

/// A running command. Dropping it kills its process group; when the test is failing, its output is shown.
#[derive(Debug)]
pub(crate) struct Process {
    tether: Tether,
    pub(crate) out: Log,
    pub(crate) err: Log,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut tether = Tether::spawn(command, Signal::KILL).unwrap();
        let (out, err) = (Log::default(), Log::default());
        out.follow("out", tether.stdout.take().unwrap());
        err.follow("err", tether.stderr.take().unwrap());
        Self { tether, out, err }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.tether.pid()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.tether.signal(signal).unwrap();
    }

    pub(crate) fn status(&self) -> Option<ExitStatus> {
        self.tether.status()
    }

    pub(crate) async fn wait_exit(&self, limit: Duration) -> ExitStatus {
        let wait = self.tether.waiter();
        let ended = tokio::task::spawn_blocking(move || wait(limit)).await.unwrap();
        let ended = ended.unwrap_or_else(|| panic!("still running after {limit:?}"));
        self.out.wait_for_end().await;
        self.err.wait_for_end().await;
        ended
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.tether.signal_group(Signal::KILL);
        self.tether.wait(Duration::from_secs(10));
        if std::thread::panicking() {
            let show = |log: &Log| log.lines_from(0).join("\n");
            println!(
                "--- {} said\n{}\n--- and on stderr\n{}\n---",
                self.pid(),
                show(&self.out),
                show(&self.err)
            );
        }
    }
}
