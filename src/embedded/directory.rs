//! The directory of one private server: ours alone while `dev.lock` is held, and closed to everybody else.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::binaries::Binaries;
use super::error::EmbeddedError;
use super::user::ServerUser;

pub(super) const LOCK: &str = "dev.lock";

/// How long a lock may be busy before we believe it: `discover` takes it for an instant to see whether it is free.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);

/// A directory that this process owns until it is dropped.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    ephemeral: bool,
    lock: File,
}

impl Directory {
    /// Makes the directory if need be and takes it for this process.
    pub(super) fn claim(
        path: &Path,
        ephemeral: bool,
        user: &ServerUser,
        binaries: &Binaries,
    ) -> Result<Self, EmbeddedError> {
        let path = std::path::absolute(path).map_err(EmbeddedError::file("resolve", path))?;
        // Asked before anything is made, so that a refusal leaves nothing behind.
        if let Some(existing) = path.ancestors().find(|ancestor| ancestor.exists()) {
            user.must_reach(if existing == path { parent(&path) } else { existing }, binaries)?;
        }
        make(&path)?;
        refuse_foreign(&path)?;
        let lock = take_lock(&path)?;
        if ephemeral && path.join("data").exists() {
            return Err(EmbeddedError::NotEphemeral { dir: path });
        }
        make_private(&path)?;
        let directory = Self { path, ephemeral, lock };
        fs::set_permissions(&directory.path, Permissions::from_mode(0o700))
            .map_err(EmbeddedError::file("close", &directory.path))?;
        user.own(&directory.path)?;
        // Again: root's umask may have closed a directory made on the way.
        user.must_reach(&directory.path, binaries)?;
        Ok(directory)
    }

    pub(super) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        self.ephemeral
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let private = private_dir(&self.path);
        let both = [Some(&self.path), Some(&private).filter(|private| **private != self.path)];
        for path in both.into_iter().flatten().filter(|_| self.ephemeral) {
            if let Err(error) = fs::remove_dir_all(path) {
                tracing::warn!(dir = %path.display(), %error, "the ephemeral directory could not be removed");
            }
        }
        // Said, not left to the closing: a child that another thread is forking just now still has the file.
        if let Err(error) = flock(&self.lock, FlockOperation::Unlock) {
            tracing::warn!(dir = %self.path.display(), %error, "the directory's lock was not given up by hand");
        }
    }
}

/// A directory in which no other user can plant a link: the server's own, and for root, whose server runs as another user, one
/// beside it.
pub fn private_dir(dir: &Path) -> PathBuf {
    if !rustix::process::geteuid().is_root() {
        return dir.to_path_buf();
    }
    let mut beside = dir.as_os_str().to_owned();
    beside.push("-outputs");
    beside.into()
}

/// Where the output files of a worker beside the server of `dir` go.
pub fn outputs_dir(dir: &Path) -> PathBuf {
    match private_dir(dir) {
        own if own == dir => own.join("outputs"),
        beside => beside,
    }
}

/// Makes root's directory beside the server's; what is there already must be one, and root's.
fn make_private(dir: &Path) -> Result<(), EmbeddedError> {
    let path = private_dir(dir);
    if path == dir {
        return Ok(());
    }
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let about = fs::symlink_metadata(&path).map_err(EmbeddedError::file("look at", &path))?;
            match about.is_dir() && about.uid() == rustix::process::geteuid().as_raw() {
                true => Ok(()),
                false => {
                    let not_ours = io::Error::other("it is a link, or belongs to another user: remove it");
                    Err(EmbeddedError::file("use", &path)(not_ours))
                }
            }
        }
        made => made.map_err(EmbeddedError::file("make", &path)),
    }
}

/// Opens or makes a file that only its owner may read. Never follows a link: the directory may belong to the
/// server's user, who must not be able to point root at another user's file.
pub(super) fn private_file(path: &Path, options: &mut OpenOptions) -> Result<File, EmbeddedError> {
    let nofollow = OFlags::NOFOLLOW.bits().cast_signed();
    options
        .create(true)
        .mode(0o600)
        .custom_flags(nofollow)
        .open(path)
        .map_err(EmbeddedError::file("open", path))
}

/// The pid in a directory's lock file, if a process holds it.
pub(super) fn holder(dir: &Path) -> Option<u32> {
    let mut lock = File::open(dir.join(LOCK)).ok()?;
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => read_pid(&mut lock).parse().ok(),
        _ => None,
    }
}

/// Waits a little between two looks at something that has no event to wait for.
#[expect(clippy::disallowed_methods, reason = "synchronous code that never runs on a runtime's thread")]
pub(super) fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn make(path: &Path) -> Result<(), EmbeddedError> {
    let above = parent(path);
    fs::create_dir_all(above).map_err(EmbeddedError::file("make", above))?;
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map_err(EmbeddedError::file("make", path)),
    }
}

/// We change mode and owner of this directory and may remove it, so it must be ours or empty.
fn refuse_foreign(path: &Path) -> Result<(), EmbeddedError> {
    let mut entries = fs::read_dir(path).map_err(EmbeddedError::file("read", path))?;
    if entries.next().is_some() && !path.join(LOCK).is_file() {
        return Err(EmbeddedError::Foreign { dir: path.to_path_buf() });
    }
    Ok(())
}

fn take_lock(dir: &Path) -> Result<File, EmbeddedError> {
    let path = dir.join(LOCK);
    let mut lock = private_file(&path, OpenOptions::new().read(true).write(true).truncate(false))?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => pause(),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(EmbeddedError::Held { dir: dir.to_path_buf(), pid: read_pid(&mut lock) });
            }
            Err(error) => return Err(EmbeddedError::file("lock", &path)(error.into())),
        }
    }
    let write = |lock: &mut File| {
        lock.set_len(0)?;
        lock.rewind()?;
        write!(lock, "{}", std::process::id())
    };
    write(&mut lock).map_err(EmbeddedError::file("write", &path))?;
    Ok(lock)
}

fn read_pid(lock: &mut File) -> String {
    let mut text = String::new();
    match lock.rewind().and_then(|()| lock.read_to_string(&mut text)) {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(path: &Path, ephemeral: bool) -> Result<Directory, EmbeddedError> {
        let binaries = super::super::find_binaries().unwrap();
        Directory::claim(path, ephemeral, &ServerUser::choose().unwrap(), &binaries)
    }

    /// A temporary directory that the server's user can pass through.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), Permissions::from_mode(0o711)).unwrap();
        root
    }

    #[test]
    fn a_second_owner_is_told_who_the_first_is() {
        let root = root();
        let dir = root.path().join("dev");
        let first = claim(&dir, false).unwrap();
        assert_eq!(holder(&dir), Some(std::process::id()));
        let error = claim(&dir, false).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
        drop(first);
        assert_eq!(holder(&dir), None);
        claim(&dir, false).unwrap();
    }

    #[test]
    fn the_directory_is_closed_to_others() {
        let root = root();
        let directory = claim(&root.path().join("a/b/dev"), false).unwrap();
        assert_eq!(fs::metadata(&directory.path).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn another_users_directory_is_left_alone() {
        let root = root();
        fs::write(root.path().join("thesis.txt"), "years of work").unwrap();
        let error = claim(root.path(), true).unwrap_err();
        assert!(matches!(error, EmbeddedError::Foreign { .. }), "{error}");
        assert!(root.path().join("thesis.txt").exists());
    }

    #[test]
    fn an_ephemeral_directory_goes_and_a_kept_one_is_never_thrown_away() {
        let root = root();
        let dir = root.path().join("dev");
        drop(claim(&dir, true).unwrap());
        assert!(!dir.exists());

        drop(claim(&dir, false).unwrap());
        fs::create_dir(dir.join("data")).unwrap();
        let error = claim(&dir, true).unwrap_err();
        assert!(matches!(error, EmbeddedError::NotEphemeral { .. }), "{error}");
        assert!(dir.join("data").exists());
    }

    #[test]
    fn root_writes_nothing_where_the_servers_user_could_plant_a_link() {
        if !rustix::process::geteuid().is_root() {
            return; // everybody else's server runs as themselves
        }
        let root = root();
        let dir = root.path().join("dev");
        let claimed = claim(&dir, true).unwrap();
        let outputs = outputs_dir(&dir);
        assert!(!outputs.starts_with(&dir), "{}", outputs.display());
        let about = fs::symlink_metadata(&outputs).unwrap();
        assert_eq!((about.uid(), about.permissions().mode() & 0o777), (0, 0o700));
        drop(claimed);
        assert!(!outputs.exists(), "an ephemeral one is removed");
        std::os::unix::fs::symlink(root.path(), &outputs).unwrap();
        let error = claim(&dir, true).unwrap_err().to_string();
        assert!(error.contains("dev-outputs"), "{error}");
    }

    #[test]
    fn for_root_the_closed_parent_is_named() {
        if !rustix::process::geteuid().is_root() {
            return; // everybody else runs the server as themselves
        }
        let root = root();
        let closed = root.path().join("closed");
        fs::create_dir_all(closed.join("inner")).unwrap();
        fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
        let error = claim(&closed.join("inner/dev"), false).unwrap_err();
        assert!(matches!(&error, EmbeddedError::Closed { closed: named, .. } if *named == closed), "{error}");
        assert!(error.to_string().contains("choose a --dir"), "{error}");
        assert!(!closed.join("inner/dev").exists(), "a refusal leaves nothing behind");
    }
}
