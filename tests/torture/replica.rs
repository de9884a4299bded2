//! One replica: a process that is killed, stopped and started again, as a cluster would.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use musterd::tether::Tether;
use rustix::process::Signal;

use super::faults::{Fault, Faults, Reruns, now};
use crate::suite::support::daemon::http_get;
use crate::suite::support::run;

/// How a replica differs from the others.
#[derive(Clone, Debug)]
pub(crate) struct Kind {
    pub(crate) number: usize,
    pub(crate) note: &'static str,
    pub(crate) binary: PathBuf,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) http_port: u16,
    pub(crate) config: String,
}

#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) kind: Kind,
    pub(crate) dir: PathBuf,
    process: Mutex<Option<Tether>>,
    /// Whether it is to be started again when it has ended.
    wanted: AtomicBool,
    /// For the next start only.
    armed: Mutex<Option<String>>,
    /// An end that a fault has announced: it needs no note of its own.
    expected: AtomicBool,
    /// The most memory that one of its processes has used, in MiB.
    memory: AtomicU64,
    /// Ends that no fault announced, by what they looked like.
    pub(crate) ends: Mutex<Vec<String>>,
}

impl Replica {
    pub(crate) fn new(kind: Kind) -> Result<Self> {
        let dir = run::new_dir("replica");
        std::fs::create_dir(dir.join("tmp"))?;
        std::fs::write(dir.join("musterd.toml"), &kind.config)?;
        Ok(Self {
            kind,
            dir,
            process: Mutex::default(),
            wanted: AtomicBool::new(true),
            armed: Mutex::default(),
            expected: AtomicBool::default(),
            memory: AtomicU64::default(),
            ends: Mutex::default(),
        })
    }

    /// Starts it, and again whenever it has ended, until it is not wanted any more.
    pub(crate) async fn keep(&self, faults: &Faults) {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let ended = match &*self.process.lock().unwrap() {
                None => None,
                Some(process) => match process.status() {
                    None => {
                        self.note_memory(process.pid());
                        continue;
                    }
                    Some(status) => Some((process.pid(), status)),
                },
            };
            if let Some((pid, status)) = ended {
                self.note_end(pid, status, faults);
                *self.process.lock().unwrap() = None;
            }
            if self.wanted.load(Ordering::SeqCst) {
                self.start().unwrap();
            }
        }
    }

    fn note_end(&self, pid: u32, status: ExitStatus, faults: &Faults) {
        run::forget(pid);
        if self.expected.swap(false, Ordering::SeqCst) {
            return;
        }
        let (at, reruns) = (now(), Reruns::Of(self.kind.number));
        let kind = match status.signal() {
            Some(6) => "a row or a failpoint aborts a replica",
            _ => {
                self.ends.lock().unwrap().push(status.to_string());
                "a replica ends by itself"
            }
        };
        faults.add(Fault { kind, reruns, began: at - 0.5, ended: at, pid: Some(pid) });
    }

    fn start(&self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.dir.join("log"))?;
        let mut command = Command::new(&self.kind.binary);
        command.args(["run", "--config"]).arg(self.dir.join("musterd.toml"));
        command.current_dir(&self.dir).env_clear().env("HOME", &self.dir).env("TMPDIR", self.dir.join("tmp"));
        command.env("PATH", std::env::var_os("PATH").context("no PATH")?).env("RUST_LOG", "info");
        command.envs(self.kind.environment.iter().cloned());
        if let Some(mutant) = std::env::var_os("MUSTERD_MUTANT") {
            command.env("MUSTERD_MUTANT", mutant);
        }
        if let Some(failpoint) = self.armed.lock().unwrap().take() {
            command.env("MUSTERD_FAILPOINTS", failpoint);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let process = Tether::spawn(command, Signal::KILL)?;
        run::kill_at_end(process.pid());
        *self.process.lock().unwrap() = Some(process);
        Ok(())
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        let process = self.process.lock().unwrap();
        process.as_ref().filter(|process| process.status().is_none()).map(Tether::pid)
    }

    /// At its next start it dies, or sleeps, at this step.
    pub(crate) fn arm(&self, failpoint: String) {
        *self.armed.lock().unwrap() = Some(failpoint);
    }

    pub(crate) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::SeqCst);
    }

    /// The pid that got the signal.
    pub(crate) fn signal(&self, signal: Signal) -> Option<u32> {
        let process = self.process.lock().unwrap();
        let process = process.as_ref().filter(|process| process.status().is_none())?;
        if matches!(signal, Signal::KILL | Signal::TERM) {
            self.expected.store(true, Ordering::SeqCst);
        }
        process.signal(signal).ok()?;
        Some(process.pid())
    }

    /// Waits until process `pid` has ended; its status.
    pub(crate) async fn wait_exit(&self, pid: u32, limit: Duration) -> Option<ExitStatus> {
        let waiter = match &*self.process.lock().unwrap() {
            Some(process) if process.pid() == pid => process.waiter(),
            _ => return None,
        };
        tokio::task::spawn_blocking(move || waiter(limit)).await.unwrap()
    }

    pub(crate) async fn wait_ready(&self, limit: Duration) -> Result<()> {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            if let Ok((200, _)) = http_get(self.kind.http_port, "/readyz").await {
                return Ok(());
            }
            let late = tokio::time::Instant::now() > deadline;
            ensure!(
                !late,
                "replica {} is not ready after {limit:?}: {}",
                self.kind.number,
                self.last_words()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.dir.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn last_words(&self) -> String {
        let log = self.log();
        log.lines().rev().take(3).collect::<Vec<_>>().join(" | ")
    }

    pub(crate) fn memory(&self) -> u64 {
        self.memory.load(Ordering::SeqCst)
    }

    fn note_memory(&self, pid: u32) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let peak = status.lines().find(|line| line.starts_with("VmHWM:"));
        let kilobytes: u64 =
            peak.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or_default();
        self.memory.fetch_max(kilobytes / 1024, Ordering::SeqCst);
    }
}
