//! Every way the private PostgreSQL can fail, each saying what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// What went wrong with the private PostgreSQL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// No usable binaries.
    #[error(
        "no PostgreSQL {oldest} or later was found; looked in {places}{rejected}\n\
         install it (Debian, Ubuntu: apt-get install postgresql; Fedora, RHEL: dnf install postgresql-server; \
         macOS: brew install postgresql@17), or set MUSTERD_PG_BIN to the directory of its programs"
    )]
    NotFound {
        /// The oldest major version that will do.
        oldest: u32,
        /// Where we looked, for a person.
        places: String,
        /// What was there and would not do, for a person; may be empty.
        rejected: String,
    },

    /// The data directory was made by a major version that is not installed.
    #[error(
        "{data} was made by PostgreSQL {made_by}, and only {installed} can be found here; \
         install PostgreSQL {made_by} again (or point MUSTERD_PG_BIN at it), \
         or choose another --dir to begin afresh"
    )]
    OtherVersion {
        /// The data directory.
        data: PathBuf,
        /// The major version in its `PG_VERSION`.
        made_by: String,
        /// What is installed, for a person.
        installed: String,
    },

    /// Another process owns the directory.
    #[error("{dir} is in use by process {pid}; stop it, or choose another --dir")]
    Held {
        /// The directory.
        dir: PathBuf,
        /// The owner's process id as it wrote it down.
        pid: String,
    },

    /// The directory has something else in it.
    #[error("{dir} is not empty and was not made by musterd; choose another --dir")]
    Foreign {
        /// The directory.
        dir: PathBuf,
    },

    /// An ephemeral server was asked for where data is kept.
    #[error(
        "{dir} already holds a database, and an ephemeral server would throw it away at its end; \
         leave out --ephemeral, or choose another --dir"
    )]
    NotEphemeral {
        /// The directory.
        dir: PathBuf,
    },

    /// The server's user cannot get to the directory.
    #[error(
        "PostgreSQL does not run as root; it would run as `{user}`, who may not enter {closed}; \
         choose a --dir that `{user}` can reach, or open that directory (chmod o+x)"
    )]
    Closed {
        /// The outermost directory that is closed to the user.
        closed: PathBuf,
        /// The user the server would run as.
        user: String,
    },

    /// The server's user may not run the binaries.
    #[error("`{user}` may not run {program}; choose other binaries with MUSTERD_PG_BIN")]
    Forbidden {
        /// The program.
        program: PathBuf,
        /// The user the server would run as.
        user: String,
    },

    /// Root has no user to run the server as.
    #[error(
        "PostgreSQL does not run as root and there is neither a user `postgres` nor `nobody`; \
         run musterd as another user"
    )]
    NoUser,

    /// A program of PostgreSQL could not be run or failed.
    #[error("{program} failed: {output}")]
    Program {
        /// Which program.
        program: &'static str,
        /// What it said.
        output: String,
    },

    /// The password file of an existing database is gone.
    #[error(
        "{file} is missing, and without it no client can log in to the database beside it; \
         restore it, or remove the directory to begin afresh"
    )]
    NoPassword {
        /// Where the password should be.
        file: PathBuf,
    },

    /// The server ended before it was ready.
    #[error("PostgreSQL ended while starting ({status}); its log says:\n{log}")]
    Exited {
        /// How it ended.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },

    /// The server is not ready after a long time.
    #[error("PostgreSQL was not ready after {seconds} s; its log says:\n{log}")]
    NotReady {
        /// How long we waited.
        seconds: u64,
        /// The end of its log.
        log: String,
    },

    /// A server left over by an earlier owner does not end.
    #[error("an earlier PostgreSQL (process {pid}) still runs on {data} and does not stop; stop it by hand")]
    Unstoppable {
        /// Its process id.
        pid: i32,
        /// The data directory.
        data: PathBuf,
    },

    /// The server had to be killed. Nothing committed is lost; the next start recovers.
    #[error(
        "PostgreSQL did not stop by itself and was ended with {signal}; the next start recovers its data"
    )]
    Forced {
        /// The signal that ended it.
        signal: &'static str,
    },

    /// A file operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What we tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl EmbeddedError {
    /// For `map_err`: `cannot {action} {path}`.
    pub(super) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { action, path, source }
    }
}
