//! The data directory: made whole beside its place and renamed into it, so a death in between leaves no half of one.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use super::binaries::{Binaries, Search};
use super::directory::{Directory, private_file};
use super::error::EmbeddedError;
use super::user::ServerUser;
use crate::{store::migrate, tether::Tether};

/// The role that owns everything, and its database.
pub(super) const NAME: &str = "musterd";

/// The binaries for `dir`: those of its major version if it has data, else the newest.
pub(super) fn binaries_for(dir: &Path) -> Result<Binaries, EmbeddedError> {
    let data = dir.join("data");
    let search = Search::of_this_machine();
    let Ok(version) = fs::read_to_string(data.join("PG_VERSION")) else {
        return search.newest();
    };
    let made_by = version.trim();
    let found = made_by.parse().ok().and_then(|major| search.of_major(major));
    match found {
        Some(binaries) => Ok(binaries),
        None => {
            // With nothing installed at all, what to install matters more than which version.
            search.newest()?;
            let (made_by, installed) = (made_by.to_owned(), search.installed());
            Err(EmbeddedError::OtherVersion { data, made_by, installed })
        }
    }
}

/// One data directory and those who serve it.
#[derive(Debug)]
pub(super) struct Cluster<'a> {
    pub(super) directory: &'a Directory,
    pub(super) binaries: &'a Binaries,
    pub(super) user: &'a ServerUser,
}

impl Cluster<'_> {
    /// Makes the data directory unless it is there; the password either way.
    pub(super) fn prepare(&self) -> Result<String, EmbeddedError> {
        let file = self.directory.path.join("password");
        if self.directory.data().exists() {
            return match fs::read_to_string(&file) {
                Ok(password) => Ok(password.trim().to_owned()),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    Err(EmbeddedError::NoPassword { file })
                }
                Err(error) => Err(EmbeddedError::file("read", &file)(error)),
            };
        }
        let password = self.new_password(&file)?;
        self.create(&file)?;
        Ok(password)
    }

    /// A command of PostgreSQL, run as the server's user and deaf to the `PG…` variables of the caller.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.program(program));
        command
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .env("HOME", &self.directory.path)
            .env("LC_ALL", "C")
            .current_dir(&self.directory.path)
            .stdin(Stdio::null());
        self.user.run(&mut command);
        command
    }

    fn new_password(&self, path: &Path) -> Result<String, EmbeddedError> {
        let password = hex::encode(rand::random::<[u8; 24]>());
        let mut file = private_file(path, OpenOptions::new().write(true).truncate(true))?;
        self.user.own_file(&file, path)?;
        file.write_all(password.as_bytes()).map_err(EmbeddedError::file("write", path))?;
        file.sync_all().map_err(EmbeddedError::file("sync", path))?;
        Ok(password)
    }

    fn create(&self, password_file: &Path) -> Result<(), EmbeddedError> {
        let fresh = self.directory.path.join("data.new");
        // C.UTF-8 knows letters beyond ASCII; not every system has it.
        if let Err(error) = self.initdb(&fresh, password_file, "C.UTF-8") {
            tracing::debug!(%error, "no locale C.UTF-8, taking C");
            self.initdb(&fresh, password_file, "C")?;
        }
        self.create_database(&fresh)?;
        let data = self.directory.data();
        fs::rename(&fresh, &data).map_err(EmbeddedError::file("rename into place", &data))?;
        File::open(&self.directory.path)
            .and_then(|dir| dir.sync_all())
            .map_err(EmbeddedError::file("sync", &self.directory.path))
    }

    fn initdb(&self, fresh: &Path, password_file: &Path, locale: &str) -> Result<(), EmbeddedError> {
        remove_torn(fresh)?;
        let mut command = self.command("initdb");
        command.arg("-D").arg(fresh).args(["-U", NAME, "-A", "scram-sha-256", "-E", "UTF8"]);
        command.arg("--pwfile").arg(password_file).arg("--locale").arg(locale).arg("--no-instructions");
        if self.directory.is_ephemeral() {
            command.arg("--no-sync");
        }
        run("initdb", command, "")
    }

    /// By a server of one session, before the rename: a data directory in its place always has its database.
    fn create_database(&self, fresh: &Path) -> Result<(), EmbeddedError> {
        let mut command = self.command("postgres");
        command.arg("--single").arg("-D").arg(fresh).args(["-c", "exit_on_error=true"]);
        if self.directory.is_ephemeral() {
            command.args(["-c", "fsync=off"]);
        }
        command.arg("template1");
        run("postgres --single", command, &migrate::create_database(NAME))
    }
}

/// What a killed `initdb` left.
fn remove_torn(fresh: &Path) -> Result<(), EmbeddedError> {
    match fs::remove_dir_all(fresh) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(EmbeddedError::file("remove", fresh)),
    }
}

/// Longer than `initdb` takes on the slowest machine.
const PROGRAM_LIMIT: Duration = Duration::from_secs(300);

/// Runs a program to its end. It goes with us should we be killed, and a Ctrl-C of the terminal does not reach it:
/// what has begun is finished, then all of it is stopped in order.
fn run(program: &'static str, mut command: Command, input: &str) -> Result<(), EmbeddedError> {
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let said = || -> std::io::Result<(Option<ExitStatus>, String)> {
        let mut child = Tether::spawn(command, Signal::TERM)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes())?;
        }
        let mut said = Vec::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_end(&mut said)?;
        }
        Ok((child.wait(PROGRAM_LIMIT), String::from_utf8_lossy(&said).trim_end().to_owned()))
    };
    let output = match said() {
        Ok((Some(status), _)) if status.success() => return Ok(()),
        Ok((Some(status), said)) => format!("{status}\n{said}"),
        Ok((None, said)) => format!("it does not end\n{said}"),
        Err(error) => error.to_string(),
    };
    Err(EmbeddedError::Program { program, output })
}

/// The setting for a Unix socket in `dir`, or for none where the path is too long for one.
pub(super) fn socket_directories(dir: &Path) -> String {
    // The shortest limit of the systems we know is macOS's 104 bytes, with the name and a final zero.
    let name: PathBuf = dir.join(".s.PGSQL.65535");
    match dir.to_str() {
        Some(text) if name.as_os_str().len() < 104 && !text.contains('"') => format!("\"{text}\""),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_too_long_for_a_socket_has_none() {
        assert_eq!(socket_directories(Path::new("/tmp/a, b")), "\"/tmp/a, b\"");
        assert_eq!(socket_directories(Path::new(&format!("/{}", "x".repeat(100)))), "");
        assert_eq!(socket_directories(Path::new("/tmp/\"")), "");
    }

    #[test]
    fn data_of_a_version_that_is_not_here_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        fs::write(dir.path().join("data/PG_VERSION"), "9\n").unwrap();
        let error = binaries_for(dir.path()).unwrap_err().to_string();
        assert!(error.contains("was made by PostgreSQL 9, and only"), "{error}");
        assert!(error.contains("install PostgreSQL 9 again"), "{error}");
    }
}
