//! The server process: started on a free loopback port, ready when it says so, stopped a little more rudely each time.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::cluster::{Cluster, socket_directories};
use super::directory::{pause, private_file};
use super::error::EmbeddedError;
use super::heal::{PidFile, STOPS};
use crate::tether::Tether;

/// Recovery after a crash may take a while on a big database.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long orphaned backends of a killed server may take to notice its death.
const ORPHAN_LIMIT: Duration = Duration::from_secs(10);
/// A log longer than this is put aside at the next start.
const LOG_LIMIT: u64 = 10 * 1024 * 1024;

const SETTINGS: [(&str, &str); 6] = [
    ("listen_addresses", "127.0.0.1"),
    ("shared_buffers", "128MB"),
    ("max_connections", "100"),
    ("fsync", "on"),
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
];

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    tether: Tether,
    port: u16,
}

impl Server {
    /// Starts the server of `cluster` and waits until it takes connections.
    pub(super) fn start(cluster: &Cluster<'_>, settings: &[(String, String)]) -> Result<Self, EmbeddedError> {
        let begun = Instant::now();
        loop {
            let port = free_port()?;
            let log = Log::open(&cluster.directory.path.join("postgres.log"))?;
            let tether = spawn(cluster, settings, port, &log)?;
            let server = Self { tether, port };
            match server.wait_ready(&cluster.directory.data(), &log) {
                Err(EmbeddedError::Exited { .. })
                    if begun.elapsed() < ORPHAN_LIMIT && passing(port, &cluster.directory.data()) =>
                {
                    pause();
                }
                Err(error) => return Err(error),
                Ok(()) => return Ok(server),
            }
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn pid(&self) -> u32 {
        self.tether.pid()
    }

    pub(super) fn ended(&self) -> Option<ExitStatus> {
        self.tether.status()
    }

    /// Stops the server; safe to repeat.
    pub(super) fn stop(&self) -> Result<(), EmbeddedError> {
        let gone = self.ended().is_some();
        for (step, (signal, name, patience)) in STOPS.into_iter().enumerate() {
            // A signal that cannot be sent shows as a server that does not end.
            let _ = self.tether.signal(signal);
            if self.tether.wait(patience).is_some() {
                return if step == 0 || gone { Ok(()) } else { Err(EmbeddedError::Forced { signal: name }) };
            }
        }
        Err(EmbeddedError::Forced { signal: "SIGKILL, without effect so far" })
    }

    /// As a crash of the whole server would end it.
    #[cfg(test)]
    pub(super) fn kill_for_test(&self) {
        self.tether.signal(Signal::KILL).unwrap();
        self.tether.wait(Duration::from_secs(10)).unwrap();
    }

    fn wait_ready(&self, data: &Path, log: &Log) -> Result<(), EmbeddedError> {
        let deadline = Instant::now() + START_LIMIT;
        let pid = i32::try_from(self.pid()).ok();
        while Instant::now() < deadline {
            // The server's own word, and it names the process: another one that took our port cannot be mistaken
            // for it.
            if PidFile::read(data).is_some_and(|file| file.ready && Some(file.pid) == pid) {
                return Ok(());
            }
            if let Some(status) = self.tether.wait(Duration::from_millis(10)) {
                return Err(EmbeddedError::Exited { status, log: log.tail() });
            }
        }
        Err(EmbeddedError::NotReady { seconds: START_LIMIT.as_secs(), log: log.tail() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.ended().is_none()
            && let Err(error) = self.stop()
        {
            tracing::warn!(%error, "stopping the private PostgreSQL");
        }
    }
}

fn spawn(
    cluster: &Cluster<'_>,
    settings: &[(String, String)],
    port: u16,
    log: &Log,
) -> Result<Tether, EmbeddedError> {
    let mut command = server_command(cluster, settings, port);
    command.stdout(log.handle()?).stderr(log.handle()?);
    // SIGINT is PostgreSQL's fast shutdown: sessions are ended, the data is whole.
    Tether::spawn(command, Signal::INT)
        .map_err(|error| EmbeddedError::Program { program: "postgres", output: error.to_string() })
}

pub(super) fn server_command(cluster: &Cluster<'_>, settings: &[(String, String)], port: u16) -> Command {
    let mut command = cluster.command("postgres");
    command.arg("-D").arg(cluster.directory.data()).arg("-p").arg(port.to_string());
    let sockets = socket_directories(&cluster.directory.path);
    command.arg("-c").arg(format!("unix_socket_directories={sockets}"));
    let usual = SETTINGS.iter().map(|(name, value)| (*name, *value));
    // The last one counts.
    for (name, value) in usual.chain(settings.iter().map(|(name, value)| (name.as_str(), value.as_str()))) {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    // Ctrl-C goes to the terminal's process group: the daemon drains first and then stops the server itself.
    command.process_group(0);
    command
}

fn free_port() -> Result<u16, EmbeddedError> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(EmbeddedError::file("find a free port on", Path::new("127.0.0.1")))
}

/// Whether a server that ended at once did so for a reason that goes away by itself: another process took the port between
/// our look and its own, or it left the lock file of a dead server in place because backends of that one still run.
fn passing(port: u16, data: &Path) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err() || PidFile::read(data).is_some()
}

/// The server's log, and where this start begins in it.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    begin: u64,
}

impl Log {
    fn open(path: &Path) -> Result<Self, EmbeddedError> {
        if fs::symlink_metadata(path).is_ok_and(|log| log.len() > LOG_LIMIT) {
            let aside = path.with_extension("log.1");
            fs::rename(path, &aside).map_err(EmbeddedError::file("put aside", path))?;
        }
        let file = private_file(path, OpenOptions::new().append(true).read(true))?;
        let begin = file.metadata().map_err(EmbeddedError::file("read", path))?.len();
        Ok(Self { path: path.to_path_buf(), file, begin })
    }

    fn handle(&self) -> Result<File, EmbeddedError> {
        self.file.try_clone().map_err(EmbeddedError::file("open", &self.path))
    }

    /// The last lines of this start.
    fn tail(&self) -> String {
        let mut bytes = Vec::new();
        let read = self.handle().ok().and_then(|mut file| {
            file.seek(SeekFrom::Start(self.begin)).ok()?;
            file.read_to_end(&mut bytes).ok()
        });
        if read.is_none_or(|size| size == 0) {
            return format!("(nothing; see {})", self.path.display());
        }
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}
