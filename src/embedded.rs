//! The private PostgreSQL of `musterd dev`: made from the machine's own binaries, ours alone, gone when we are.
//!
//! All of it is synchronous: it runs before there is a runtime and after there was one.

mod binaries;
mod cluster;
mod directory;
mod error;
mod heal;
mod pointer;
mod server;
mod user;

use std::path::{Path, PathBuf};

pub use binaries::{Binaries, find_binaries};
use cluster::{Cluster, NAME};
use directory::Directory;
pub use directory::{outputs_dir, private_dir};
pub use error::EmbeddedError;
use pointer::Announcement;
pub use pointer::{RunningDev, default_dir, discover, ephemeral_dir};
use server::Server;
use user::ServerUser;

/// What kind of server to start, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory of the server: its data, password, log and lock.
    pub dir: PathBuf,
    /// Remove the directory at the end.
    pub ephemeral: bool,
    /// Server settings over the usual ones.
    pub settings: Vec<(String, String)>,
}

impl Options {
    /// A server whose data stays.
    pub fn kept(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), ephemeral: false, settings: Vec::new() }
    }

    /// A server whose data goes with it.
    pub fn ephemeral(dir: impl Into<PathBuf>) -> Self {
        Self { ephemeral: true, ..Self::kept(dir) }
    }

    /// With one more server setting.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }
}

/// A running private PostgreSQL. Dropping it stops the server.
// The fields are dropped in this order: unannounced, stopped, then the directory given up or removed.
pub struct EmbeddedPostgres {
    announcement: Option<Announcement>,
    server: Server,
    directory: Directory,
    url: String,
}

impl std::fmt::Debug for EmbeddedPostgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the url: it has the password in it.
        f.debug_struct("EmbeddedPostgres")
            .field("server", &self.server)
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl EmbeddedPostgres {
    /// Starts the server, making its directory if need be and putting right what an earlier owner left.
    pub fn start(options: Options) -> Result<Self, EmbeddedError> {
        let user = ServerUser::choose()?;
        let binaries = cluster::binaries_for(&options.dir)?;
        let directory = Directory::claim(&options.dir, options.ephemeral, &user, &binaries)?;
        heal::recover(&directory.path)?;
        let cluster = Cluster { directory: &directory, binaries: &binaries, user: &user };
        let password = cluster.prepare()?;
        let server = Server::start(&cluster, &options.settings)?;
        let url = format!("postgres://{NAME}:{password}@127.0.0.1:{}/{NAME}", server.port());
        Ok(Self { announcement: None, server, directory, url })
    }

    /// How to connect, with the password.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The server's directory.
    pub fn dir(&self) -> &Path {
        &self.directory.path
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The port on 127.0.0.1, a new one at each start.
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// How the server ended, if it did so by itself.
    pub fn ended(&self) -> Option<std::process::ExitStatus> {
        self.server.ended()
    }

    /// Lets the other commands of this user find the server with [`discover`], until it stops.
    pub fn announce(&mut self) -> Result<(), EmbeddedError> {
        self.announce_in(&pointer::state_dir())
    }

    fn announce_in(&mut self, state: &Path) -> Result<(), EmbeddedError> {
        let (pid, dir) = (std::process::id(), self.directory.path.clone());
        self.announcement = Some(Announcement::make(&RunningDev { url: self.url.clone(), pid, dir }, state)?);
        Ok(())
    }

    /// Stops the server and waits for its end; then an ephemeral directory is removed.
    pub fn stop(mut self) -> Result<(), EmbeddedError> {
        self.announcement = None;
        self.server.stop()
    }
}

#[cfg(test)]
mod tests;
