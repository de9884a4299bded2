//! How other commands find a running `musterd dev`: a file that is believed only while its server's lock is held.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Uid, geteuid};
use serde::{Deserialize, Serialize};

use super::directory::{holder, private_file};
use super::error::EmbeddedError;

/// A `musterd dev` that is running now.
#[derive(Clone, Deserialize, Serialize)]
pub struct RunningDev {
    /// How to connect, with the password.
    pub url: String,
    /// The owner's process id.
    pub pid: u32,
    /// Its directory.
    pub dir: PathBuf,
}

impl std::fmt::Debug for RunningDev {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the url: it has the password in it.
        f.debug_struct("RunningDev").field("pid", &self.pid).field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// The `musterd dev` of this user that announced itself last, if it still runs.
pub fn discover() -> Option<RunningDev> {
    discover_in(&state_dir())
}

/// Where `musterd dev` keeps its data unless configured otherwise.
pub fn default_dir() -> PathBuf {
    state_dir().join("dev")
}

/// A new directory for a server that is thrown away, where every user can get to.
pub fn ephemeral_dir() -> PathBuf {
    let name = format!("musterd-dev-{}-{:08x}", std::process::id(), rand::random::<u32>());
    std::env::temp_dir().join(name)
}

/// The file of one announcement, taken away with it.
#[derive(Debug)]
pub(super) struct Announcement {
    file: PathBuf,
    pid: u32,
    dir: PathBuf,
}

impl Announcement {
    pub(super) fn make(running: &RunningDev, state: &Path) -> Result<Self, EmbeddedError> {
        Self::make_as(geteuid(), running, state)
    }

    fn make_as(user: Uid, running: &RunningDev, state: &Path) -> Result<Self, EmbeddedError> {
        fs::create_dir_all(state).map_err(EmbeddedError::file("make", state))?;
        let metadata = fs::metadata(state).map_err(EmbeddedError::file("look at", state))?;
        if !belongs_to(user, &metadata) {
            let theirs =
                std::io::Error::new(std::io::ErrorKind::PermissionDenied, "it belongs to another user");
            return Err(EmbeddedError::file("use", state)(theirs));
        }
        let file = pointer_file(state);
        // Renamed into place, so that no reader sees half of it.
        let fresh = state.join(format!("running-dev.{}.new", running.pid));
        let text =
            serde_json::to_vec(running).map_err(|error| EmbeddedError::file("write", &file)(error.into()))?;
        private_file(&fresh, OpenOptions::new().write(true).truncate(true))?
            .write_all(&text)
            .map_err(EmbeddedError::file("write", &fresh))?;
        fs::rename(&fresh, &file).map_err(EmbeddedError::file("rename into place", &file))?;
        Ok(Self { file, pid: running.pid, dir: running.dir.clone() })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // A later dev may have announced itself over us; its file stays.
        if read_as(geteuid(), &self.file).is_some_and(|now| now.pid == self.pid && now.dir == self.dir) {
            // Left behind it is merely not believed.
            let _ = fs::remove_file(&self.file);
        }
    }
}

pub(super) fn discover_in(state: &Path) -> Option<RunningDev> {
    discover_as(geteuid(), state)
}

fn discover_as(user: Uid, state: &Path) -> Option<RunningDev> {
    // The lock alone is not enough: a new owner of the same directory has another port until it announces itself.
    read_as(user, &pointer_file(state)).filter(|running| holder(&running.dir) == Some(running.pid))
}

pub(super) fn state_dir() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    state_dir_of(set("XDG_STATE_HOME"), set("HOME"), geteuid().is_root())
}

fn state_dir_of(xdg: Option<PathBuf>, home: Option<PathBuf>, root: bool) -> PathBuf {
    match (xdg, home) {
        (Some(xdg), _) if xdg.is_absolute() => xdg.join("musterd"),
        // The server's user can usually not enter root's home.
        _ if root => "/var/lib/musterd".into(),
        (_, Some(home)) => home.join(".local/state/musterd"),
        (_, None) => std::env::temp_dir().join(format!("musterd-{}", geteuid().as_raw())),
    }
}

fn pointer_file(state: &Path) -> PathBuf {
    state.join("running-dev.json")
}

/// What another user wrote there is not believed: it names a database to send rows to.
fn read_as(user: Uid, file: &Path) -> Option<RunningDev> {
    let file = fs::File::open(file).ok()?;
    if !belongs_to(user, &file.metadata().ok()?) {
        return None;
    }
    serde_json::from_reader(file).ok()
}

fn belongs_to(user: Uid, metadata: &fs::Metadata) -> bool {
    metadata.uid() == user.as_raw()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    fn running(dir: &Path, pid: u32) -> RunningDev {
        RunningDev { url: "postgres://musterd:canary@127.0.0.1:1/musterd".into(), pid, dir: dir.into() }
    }

    #[test]
    fn an_announcement_is_believed_while_its_lock_is_held_by_the_same_process() {
        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let lock = dir.path().join("dev.lock");
        fs::write(&lock, "77").unwrap();
        let announcement = Announcement::make(&running(dir.path(), 77), state.path()).unwrap();
        assert!(discover_in(state.path()).is_none(), "no process holds the lock");

        let held = fs::File::open(&lock).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        assert_eq!(discover_in(state.path()).unwrap().pid, 77);

        fs::write(&lock, "78").unwrap();
        assert!(discover_in(state.path()).is_none(), "another process holds it");
        drop(announcement);
        assert!(!state.path().join("running-dev.json").exists());
    }

    #[test]
    fn a_later_announcement_survives_the_end_of_an_earlier_one() {
        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let earlier = Announcement::make(&running(dir.path(), 1), state.path()).unwrap();
        let _later = Announcement::make(&running(dir.path(), 2), state.path()).unwrap();
        drop(earlier);
        assert_eq!(read_as(geteuid(), &pointer_file(state.path())).unwrap().pid, 2);
    }

    #[test]
    fn the_password_is_for_the_owner_alone() {
        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let running = running(dir.path(), 1);
        let _announcement = Announcement::make(&running, state.path()).unwrap();
        let mode = fs::metadata(pointer_file(state.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!format!("{running:?}").contains("canary"));
    }

    /// Without HOME the place is one that every user can write to.
    #[test]
    fn what_belongs_to_another_user_is_neither_believed_nor_written_to() {
        let own = geteuid();
        let without_home = state_dir_of(None, None, false);
        assert_eq!(without_home, std::env::temp_dir().join(format!("musterd-{}", own.as_raw())));

        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("dev.lock"), "77").unwrap();
        let held = fs::File::open(dir.path().join("dev.lock")).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let running = running(dir.path(), 77);
        let _announcement = Announcement::make(&running, state.path()).unwrap();
        let other = Uid::from_raw(own.as_raw() + 1);
        assert_eq!(discover_as(own, state.path()).unwrap().pid, 77);
        assert!(discover_as(other, state.path()).is_none(), "the file of another user is believed");
        let refused = Announcement::make_as(other, &running, state.path()).unwrap_err();
        assert!(refused.to_string().contains(&state.path().display().to_string()), "{refused}");
    }

    #[test]
    fn the_state_directory_follows_the_user() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(state_dir_of(path("/x"), path("/home/a"), false), Path::new("/x/musterd"));
        assert_eq!(state_dir_of(None, path("/home/a"), false), Path::new("/home/a/.local/state/musterd"));
        assert_eq!(
            state_dir_of(path("relative"), path("/home/a"), false),
            Path::new("/home/a/.local/state/musterd")
        );
        assert_eq!(state_dir_of(None, path("/root"), true), Path::new("/var/lib/musterd"));
    }
}
