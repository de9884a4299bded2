//! What an owner that was killed may leave: a running server, or the lock file of a dead one.
//!
//! A stale `postmaster.pid` is never simply removed: PostgreSQL reads from it which shared memory to look at, to be
//! sure that no orphaned backend still writes to the same files.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::directory::pause;
use super::error::EmbeddedError;

/// How a server is asked to stop, each time more rudely, and how long each has to work.
pub(super) const STOPS: [(Signal, &str, Duration); 3] = [
    (Signal::INT, "SIGINT (fast)", Duration::from_secs(30)),
    (Signal::QUIT, "SIGQUIT (immediate)", Duration::from_secs(10)),
    (Signal::KILL, "SIGKILL", Duration::from_secs(5)),
];

/// What `postmaster.pid` says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PidFile {
    pub(super) pid: i32,
    pub(super) ready: bool,
}

impl PidFile {
    pub(super) fn read(data: &Path) -> Option<Self> {
        let text = fs::read_to_string(data.join("postmaster.pid")).ok()?;
        let mut lines = text.lines();
        let pid = lines.next()?.trim().parse().ok()?;
        // The eighth line is the state; pg_ctl waits for the same word.
        Some(Self { pid, ready: lines.nth(6).is_some_and(|state| state.trim() == "ready") })
    }
}

/// Puts `dir` right after an owner that was killed. Only for the holder of its lock.
pub(super) fn recover(dir: &Path) -> Result<(), EmbeddedError> {
    let data = dir.join("data");
    if let Some(file) = PidFile::read(&data)
        && let Some(pid) = Pid::from_raw(file.pid)
        && is_alive(pid)
    {
        if is_our_server(pid, &data) {
            tracing::info!(pid = file.pid, "an earlier owner left its PostgreSQL running; stopping it first");
            stop_stranger(pid, &data)?;
        } else {
            disown(&data)?;
        }
    }
    remove_sockets(dir);
    Ok(())
}

fn is_alive(pid: Pid) -> bool {
    // Not permitted to signal it means that it is there.
    !matches!(test_kill_process(pid), Err(rustix::io::Errno::SRCH))
}

/// Whether `pid` is a server on `data`, and not a process that got the number of a dead one.
fn is_our_server(pid: Pid, data: &Path) -> bool {
    let Some(arguments) = command_line(pid) else { return false };
    let is_postgres = arguments
        .first()
        .is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == "postgres"));
    is_postgres && arguments.iter().any(|argument| Path::new(argument) == data)
}

#[cfg(target_os = "linux")]
fn command_line(pid: Pid) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(bytes.split(|byte| *byte == 0).map(|part| String::from_utf8_lossy(part).into_owned()).collect())
}

#[cfg(not(target_os = "linux"))]
fn command_line(pid: Pid) -> Option<Vec<String>> {
    let ps = std::process::Command::new("ps").args(["-o", "args=", "-p", &pid.to_string()]).output().ok()?;
    Some(String::from_utf8_lossy(&ps.stdout).split_whitespace().map(str::to_owned).collect())
}

/// Stops a server that is not our child, so that only looking tells when it has ended.
fn stop_stranger(pid: Pid, data: &Path) -> Result<(), EmbeddedError> {
    for (signal, _, patience) in STOPS {
        // Gone in the meantime is what we want; anything else shows in the look below.
        let _ = kill_process(pid, signal);
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if !is_our_server(pid, data) {
                return Ok(());
            }
            pause();
        }
    }
    Err(EmbeddedError::Unstoppable { pid: pid.as_raw_nonzero().get(), data: data.to_path_buf() })
}

/// The recorded pid now belongs to something else, and PostgreSQL would refuse to start because that is alive.
/// It does not mind its own parent's pid, which says "stale" and keeps the shared memory in the file to be checked.
///
/// The file is in a directory of the server's user, who must not be able to point root at another file: neither by a symbolic link
/// nor by a hard one.
fn disown(data: &Path) -> Result<(), EmbeddedError> {
    let path = data.join("postmaster.pid");
    let rewrite = || {
        let nofollow = OFlags::NOFOLLOW.bits().cast_signed();
        let mut file = OpenOptions::new().read(true).write(true).custom_flags(nofollow).open(&path)?;
        let about = file.metadata()?;
        if !about.is_file() || about.nlink() != 1 {
            return Err(io::Error::other("it is a link, or no file"));
        }
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}\n{rest}", std::process::id())
    };
    rewrite().map_err(EmbeddedError::file("rewrite", &path))
}

/// Sockets of other starts: the port, and with it the name, is a new one each time.
fn remove_sockets(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".s.PGSQL.") {
            // One that stays does no harm.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_read_from_the_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("postmaster.pid");
        assert_eq!(PidFile::read(dir.path()), None);
        fs::write(&file, "42\n/data\n1700000000\n5432\n\n127.0.0.1\n  1 2\nstarting\n").unwrap();
        assert_eq!(PidFile::read(dir.path()), Some(PidFile { pid: 42, ready: false }));
        fs::write(&file, "42\n/data\n1700000000\n5432\n\n127.0.0.1\n  1 2\nready   \n").unwrap();
        assert_eq!(PidFile::read(dir.path()), Some(PidFile { pid: 42, ready: true }));
    }

    #[test]
    fn a_number_that_now_belongs_to_another_is_replaced_by_ours_and_the_memory_kept() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        // Process 1 is always alive and never our server.
        fs::write(data.join("postmaster.pid"), "1\n/data\n1700000000\n5432\n\n127.0.0.1\n  7 8\nready\n")
            .unwrap();
        recover(dir.path()).unwrap();
        let text = fs::read_to_string(data.join("postmaster.pid")).unwrap();
        assert!(text.starts_with(&format!("{}\n/data\n", std::process::id())), "{text}");
        assert!(text.contains("  7 8\n"), "{text}");
    }

    #[test]
    fn a_lock_file_that_is_a_link_is_not_written_through() {
        for symbolic in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (data, precious) = (dir.path().join("data"), dir.path().join("precious"));
            fs::create_dir(&data).unwrap();
            fs::write(&precious, "1\nanother's words\n").unwrap();
            let file = data.join("postmaster.pid");
            match symbolic {
                true => std::os::unix::fs::symlink(&precious, file).unwrap(),
                false => fs::hard_link(&precious, file).unwrap(),
            }
            let error = recover(dir.path()).unwrap_err().to_string();
            assert!(error.contains("postmaster.pid"), "{error}");
            assert_eq!(fs::read_to_string(&precious).unwrap(), "1\nanother's words\n");
        }
    }
}
