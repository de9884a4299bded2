//! The one door for files: a store holds whole objects under keys, in a directory or in S3.
//!
//! An object is there whole or not at all. A write that fails or is cancelled leaves nothing behind: what the store
//! still has to clean up for it runs in the background, and [`Store::wait_for_cleanup`] waits for that.
//!
//! Nothing here tries again: a stream cannot be replayed. The caller opens its source again, and asks
//! [`ObjectError::is_transient`] how loudly to say why.

mod config;
mod error;
mod file;
mod key;
mod name;
mod s3;

use bytes::Bytes;
use tokio::io::AsyncRead;
use uuid::Uuid;

pub use self::config::{Config, Kind, S3Config};
pub use self::error::{ObjectError, Op};
pub use self::file::FileStore;
pub use self::key::Key;
pub use self::name::{MANIFEST, file_name_problem};
pub use self::s3::S3Store;

/// An object being read, piece by piece.
pub type ObjectReader = Box<dyn AsyncRead + Send + Unpin>;

/// What a write has put into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub bytes: u64,
}

/// Where output files go. Clones share connections.
#[derive(Clone, Debug)]
pub enum Store {
    File(FileStore),
    S3(S3Store),
}

impl Store {
    /// Opens the store that `config` names. Asks no server: [`Store::probe`] does.
    pub fn open(config: &Config) -> Result<Self, ObjectError> {
        Self::open_with(config, |name| std::env::var(name).ok())
    }

    /// As [`Store::open`], with the environment in which credentials are looked for.
    pub fn open_with(
        config: &Config,
        env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self, ObjectError> {
        if let Some((key, problem)) = config.check().into_iter().next() {
            return Err(ObjectError::Config { key, problem });
        }
        match config.store {
            Kind::File => FileStore::open(&config.dir).map(Self::File),
            Kind::S3 => S3Store::open(&config.s3, env).map(Self::S3),
        }
    }

    /// Writes all that `reader` gives under `key`, over what was there, in constant memory.
    ///
    /// On an error, or when this future is dropped, nothing is left and what was there before stays. (Dropped in its
    /// last step, the object may yet appear, whole.) There is no retry inside: call again with a reader that starts
    /// from the beginning.
    pub async fn put_stream<R>(&self, key: &Key, reader: R) -> Result<Stored, ObjectError>
    where
        R: AsyncRead + Send + Unpin,
    {
        match self {
            Self::File(store) => store.put_stream(key, reader).await,
            Self::S3(store) => store.put_stream(key, reader).await,
        }
    }

    /// Writes `content` under `key`, over what was there.
    pub async fn put(&self, key: &Key, content: Bytes) -> Result<Stored, ObjectError> {
        self.put_stream(key, content.as_ref()).await
    }

    /// Opens an object to be read piece by piece. A connection that ends early is an error of the reader.
    pub async fn get_stream(&self, key: &Key) -> Result<ObjectReader, ObjectError> {
        match self {
            Self::File(store) => store.get_stream(key).await,
            Self::S3(store) => store.get_stream(key).await,
        }
    }

    /// Reads a whole object into memory: for manifests and the like.
    pub async fn read(&self, key: &Key) -> Result<Bytes, ObjectError> {
        match self {
            Self::File(store) => store.read(key).await,
            Self::S3(store) => store.read(key).await,
        }
    }

    /// Deletes an object; one that is not there counts as deleted.
    pub async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        let deleted = match self {
            Self::File(store) => store.delete(key).await,
            Self::S3(store) => store.delete(key).await,
        };
        deleted.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }

    /// Deletes every object whose key begins with `folder` and a slash.
    pub async fn delete_folder(&self, folder: &Key) -> Result<(), ObjectError> {
        match self {
            Self::File(store) => store.delete_folder(folder).await,
            Self::S3(store) => store.delete_folder(folder).await,
        }
    }

    /// Where people find the object: a path, or an `s3://` address.
    pub fn location(&self, key: &Key) -> String {
        match self {
            Self::File(store) => store.path(key).display().to_string(),
            Self::S3(store) => store.location(key),
        }
    }

    /// Writes, reads back and deletes a tiny object.
    pub async fn probe(&self) -> Result<(), ObjectError> {
        let key = Key::new(format!("musterd-probe-{}", Uuid::new_v4()))?;
        let content = Bytes::from_static(b"musterd was here\n");
        let made = match self {
            Self::File(store) => store.missing_dirs(),
            Self::S3(_) => Vec::new(),
        };
        self.put(&key, content.clone()).await?;
        let read = self.read(&key).await;
        // Deleted in any case: a probe that cannot read must not litter.
        let deleted = self.delete(&key).await;
        // The directory, too, if it was made for the probe; if anything was written into it meanwhile it stays.
        made.iter().for_each(|dir| _ = std::fs::remove_dir(dir));
        if read? != content {
            return Err(ObjectError::Altered { at: self.location(&key) });
        }
        deleted
    }

    /// Waits until no write is under way and what failed and cancelled ones left is cleaned up. Call it before the
    /// process ends, within the time there is: with an unreachable server it takes a while.
    pub async fn wait_for_cleanup(&self) {
        match self {
            Self::File(store) => store.wait_for_cleanup().await,
            Self::S3(store) => store.wait_for_cleanup().await,
        }
    }
}
