//! Who the server runs as: PostgreSQL refuses root, so root lends it an unprivileged user.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{chown, fchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::binaries::Binaries;
use super::error::EmbeddedError;
use crate::passwd::ids_of;

/// The server's user: ourselves, or for root an unprivileged user.
#[derive(Clone, Debug)]
pub(super) struct ServerUser {
    name: String,
    /// User and group to become; none when we stay who we are.
    ids: Option<(u32, u32)>,
}

impl ServerUser {
    pub(super) fn choose() -> Result<Self, EmbeddedError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { name: "this user".into(), ids: None });
        }
        let file = Path::new("/etc/passwd");
        let passwd = fs::read_to_string(file).map_err(EmbeddedError::file("read", file))?;
        ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| Some(Self { name: name.into(), ids: Some(ids_of(&passwd, name)?) }))
            .ok_or(EmbeddedError::NoUser)
    }

    /// Makes `command` run as this user. The standard library also drops root's supplementary groups then.
    pub(super) fn run(&self, command: &mut Command) {
        if let Some((uid, gid)) = self.ids {
            command.uid(uid).gid(gid);
        }
    }

    pub(super) fn own(&self, path: &Path) -> Result<(), EmbeddedError> {
        match self.ids {
            Some((uid, gid)) => {
                chown(path, Some(uid), Some(gid)).map_err(EmbeddedError::file("change the owner of", path))
            }
            None => Ok(()),
        }
    }

    pub(super) fn own_file(&self, file: &File, path: &Path) -> Result<(), EmbeddedError> {
        match self.ids {
            Some((uid, gid)) => {
                fchown(file, Some(uid), Some(gid)).map_err(EmbeddedError::file("change the owner of", path))
            }
            None => Ok(()),
        }
    }

    /// Refuses a directory this user cannot get to, naming the outermost closed one.
    pub(super) fn must_reach(&self, dir: &Path, binaries: &Binaries) -> Result<(), EmbeddedError> {
        if self.ids.is_none() || self.can_enter(dir, binaries) {
            return Ok(());
        }
        let mut ways: Vec<PathBuf> = dir.ancestors().map(Path::to_path_buf).collect();
        ways.reverse();
        match ways.iter().position(|way| !self.can_enter(way, binaries)) {
            // Not even `/` can be entered: it is the program that may not be run.
            Some(0) => {
                let program = binaries.program("postgres");
                Err(EmbeddedError::Forbidden { program, user: self.name.clone() })
            }
            Some(closed) => {
                Err(EmbeddedError::Closed { closed: ways.swap_remove(closed), user: self.name.clone() })
            }
            None => Ok(()),
        }
    }

    /// Tries it for real, because permission bits do not tell about access lists and the like.
    fn can_enter(&self, dir: &Path, binaries: &Binaries) -> bool {
        let mut command = Command::new(binaries.program("postgres"));
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.run(command.current_dir(dir));
        !matches!(command.status(), Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }
}
