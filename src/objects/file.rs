//! Files appear whole or not at all: written beside their place under another name, synced, then renamed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use uuid::Uuid;

use super::error::{ObjectError, Op};
use super::key::{Key, TEMP_PREFIX};
use super::{ObjectReader, Stored};

const BUFFER: usize = 1 << 20;
/// No write pauses this long; what is older was left by a process that was killed.
const STALE: Duration = Duration::from_hours(24);

#[derive(Clone, Debug)]
pub struct FileStore {
    root: PathBuf,
    /// Writes and blocking calls under way, also those whose caller has gone.
    calls: TaskTracker,
}

impl FileStore {
    pub(super) fn open(dir: &Path) -> Result<Self, ObjectError> {
        // The place must not move with the working directory, and people are shown the whole path.
        let root = std::path::absolute(dir).map_err(|error| ObjectError::config("outputs.dir", error))?;
        let calls = TaskTracker::new();
        // Closed from the start: it goes on taking calls, and waiting for it means waiting until none is left.
        calls.close();
        Ok(Self { root, calls })
    }

    pub(super) async fn wait_for_cleanup(&self) {
        self.calls.wait().await;
    }

    /// The directories that a first write would make, the innermost first.
    pub(super) fn missing_dirs(&self) -> Vec<PathBuf> {
        self.root.ancestors().take_while(|dir| !dir.exists()).map(Path::to_path_buf).collect()
    }

    pub(super) fn path(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    pub(super) async fn put_stream<R>(&self, key: &Key, mut reader: R) -> Result<Stored, ObjectError>
    where
        R: AsyncRead + Send + Unpin,
    {
        let (root, path, under_way) = (self.root.clone(), self.path(key), self.calls.token());
        let mut temp =
            self.blocking(&path, Op::Write, move |path| TempFile::create(&root, path, under_way)).await?;
        let mut bytes = 0;
        let mut buffer = BytesMut::with_capacity(BUFFER);
        loop {
            fill(&mut reader, &mut buffer).await.map_err(|error| ObjectError::source_of(key, error))?;
            if buffer.is_empty() {
                break;
            }
            bytes += buffer.len() as u64;
            (temp, buffer) = self.blocking(&path, Op::Write, move |_| temp.append(buffer)).await?;
        }
        self.blocking(&path, Op::Write, move |path| temp.publish(path)).await?;
        Ok(Stored { bytes })
    }

    pub(super) async fn get_stream(&self, key: &Key) -> Result<ObjectReader, ObjectError> {
        let path = self.path(key);
        let file = self.blocking(&path, Op::Read, open_file).await?;
        Ok(Box::new(tokio::fs::File::from_std(file)))
    }

    pub(super) async fn read(&self, key: &Key) -> Result<Bytes, ObjectError> {
        let read = |path: &Path| {
            let mut content = Vec::new();
            open_file(path)?.read_to_end(&mut content)?;
            Ok(Bytes::from(content))
        };
        self.blocking(&self.path(key), Op::Read, read).await
    }

    pub(super) async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        let delete = |path: &Path| {
            fs::remove_file(path)?;
            path.parent().map_or(Ok(()), sync_dir)
        };
        self.blocking(&self.path(key), Op::Delete, delete).await
    }

    pub(super) async fn delete_folder(&self, folder: &Key) -> Result<(), ObjectError> {
        let delete = |path: &Path| match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            deleted => deleted.and_then(|()| path.parent().map_or(Ok(()), sync_dir)),
        };
        self.blocking(&self.path(folder), Op::Delete, delete).await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        path: &Path,
        op: Op,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ObjectError> {
        let owned = path.to_owned();
        let done = self.calls.spawn_blocking(move || work(&owned)).await;
        let done = done.unwrap_or_else(|error| Err(io::Error::other(error)));
        done.map_err(|error| ObjectError::from_io(op, path, error))
    }
}

/// Results are for the worker's user and group; what the umask takes away is taken away as well.
const FILE_MODE: u32 = 0o640;
const DIR_MODE: u32 = 0o750;

/// A file under a name of its own, until published. Dropped before that, it is removed.
///
/// It travels into and out of the blocking calls by value: a call whose caller was cancelled still ends, and then
/// drops it. A guard kept outside could remove the name before the call had made it.
struct TempFile {
    file: File,
    name: PathBuf,
    published: bool,
    /// Given back after the removal, so that a caller that waits for the store finds nothing left.
    _under_way: TaskTrackerToken,
}

impl TempFile {
    fn create(root: &Path, target: &Path, under_way: TaskTrackerToken) -> io::Result<Self> {
        let dir = target.parent().unwrap_or(root);
        make_dirs(root, dir)?;
        remove_stale(dir);
        let name = dir.join(format!("{TEMP_PREFIX}{}", Uuid::new_v4()));
        let file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&name)?;
        Ok(Self { file, name, published: false, _under_way: under_way })
    }

    fn append(mut self, mut content: BytesMut) -> io::Result<(Self, BytesMut)> {
        self.file.write_all(&content)?;
        content.clear();
        Ok((self, content))
    }

    fn publish(mut self, target: &Path) -> io::Result<()> {
        // Without this a crash after the rename could leave the right name on an empty file.
        self.file.sync_all()?;
        fs::rename(&self.name, target)?;
        self.published = true;
        target.parent().map_or(Ok(()), sync_dir)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_file(&self.name)
        {
            tracing::warn!(path = %self.name.display(), %error, "an unfinished output file could not be removed");
        }
    }
}

/// Makes `dir` under `root`, and the names of what was made durable.
fn make_dirs(root: &Path, dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir)?;
    for made in dir.ancestors().take_while(|made| made.starts_with(root)) {
        made.parent().map_or(Ok(()), sync_dir)?;
    }
    Ok(())
}

/// Removes what killed processes left in `dir`. Failing to is no reason not to write.
fn remove_stale(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(TEMP_PREFIX));
        if ours && entry.metadata().and_then(|meta| meta.modified()).is_ok_and(is_stale) {
            tracing::info!(path = %entry.path().display(), "removing an unfinished output file of a killed process");
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_stale(modified: SystemTime) -> bool {
    modified.elapsed().is_ok_and(|age| age > STALE)
}

/// Opens a file for reading; a directory, or a file where a directory is meant, holds no object.
fn open_file(path: &Path) -> io::Result<File> {
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotADirectory => io::Error::from(io::ErrorKind::NotFound),
        _ => error,
    })?;
    if file.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(file)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Reads until `buffer` is full or the reader has ended.
async fn fill<R: AsyncRead + Unpin>(reader: &mut R, buffer: &mut BytesMut) -> io::Result<()> {
    while buffer.len() < BUFFER && reader.read_buf(buffer).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn what_is_written_is_not_for_every_user() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(&dir.path().join("outputs")).unwrap();
        let key = Key::new("batches/1/out.csv").unwrap();
        store.put_stream(&key, &b"1"[..]).await.unwrap();
        let file = store.path(&key);
        for path in file.ancestors().take_while(|path| *path != dir.path()) {
            let mode = path.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o027, 0, "{}: {mode:o}", path.display());
        }
    }
}
