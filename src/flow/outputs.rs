//! Output files: the text that rows added to named files, uploaded in line order before their batch ends.
//!
//! No lock on a row is held here. Closedness, counts and text are read in one snapshot, and the keys carry all that the content
//! depends on: two uploads of a key have the same bytes, and a late one cannot touch a newer one's files. The manifest is written
//! last; only the completing transaction refers to it. An advisory lock keeps workers from uploading the same batch at the same
//! time; any session may hold it for ever, so it is a courtesy.

mod manifest;

pub use manifest::{FileEntry, Manifest, folder, home};

use crate::{
    error_text::describe,
    failpoint,
    json::Json,
    objects::{self, Key, ObjectError, file_name_problem},
    store::{
        batches::{Closed, Look},
        outputs::{FileSpan, FilesError, Snapshot, is_overtaken},
    },
};
use bytes::Bytes;
use deadpool_postgres::{Object, Pool, PoolError};
use futures::TryStreamExt;
use sha2::{Digest, Sha256};
use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};
use tokio_util::io::StreamReader;

/// Uploads what batches leave behind.
#[derive(Clone, Debug)]
pub struct Uploader {
    pub pool: Pool,
    pub objects: objects::Store,
}

#[derive(Debug, thiserror::Error)]
pub enum OutputsError {
    #[error("no connection to read outputs with")]
    Connect(#[from] PoolError),
    #[error("could not read the outputs")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("could not describe the outputs")]
    Describe(#[from] serde_json::Error),
    #[error("{0}")]
    TooManyFiles(FilesError),
    /// Not a fault: the upload is under way elsewhere, or a session that has nothing to do with it holds its lock.
    #[error("another worker seems to be uploading the outputs of batch {id}")]
    Busy { id: i64 },
}

impl From<FilesError> for OutputsError {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::Query(error) => Self::Query(error),
            FilesError::TooMany { .. } => Self::TooManyFiles(error),
        }
    }
}

impl OutputsError {
    /// The same for everything that one repair would fix.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::Query(_) => "database",
            Self::Object(error) => error.kind(),
            Self::Describe(_) => "manifest",
            Self::TooManyFiles(_) => "too_many_files",
            Self::Busy { .. } => "busy",
        }
    }

    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. })
    }

    /// The files cannot be stored, for a reason that lies with them or with the store; the database is not to blame.
    pub fn is_of_store(&self) -> bool {
        matches!(self, Self::Object(_) | Self::Describe(_) | Self::TooManyFiles(_))
    }
}

/// Files that are there, and the end of the batch that they belong to.
#[derive(Debug)]
pub struct Uploaded {
    pub closed: Closed,
    /// What the batch shows as its outputs; `None` when no row has any.
    pub summary: Option<Json>,
    manifest: Key,
    files: Vec<Key>,
}

impl Uploader {
    /// Uploads the files of a batch that is over; `None` when it is not, or when its lines do not add up. Unless the caller
    /// insists, an upload that another worker seems to have under way is left to it.
    pub async fn upload(&self, id: i64, insist: bool) -> Result<Option<Uploaded>, OutputsError> {
        let mut client = self.pool.get().await?;
        let uploaded = self.upload_with(&mut client, id, insist).await;
        if uploaded.as_ref().is_err_and(|error| !error.is_busy()) {
            // It may be in the middle of a file; a new one is cheap.
            drop(Object::take(client));
        }
        uploaded
    }

    async fn upload_with(
        &self,
        client: &mut Object,
        id: i64,
        insist: bool,
    ) -> Result<Option<Uploaded>, OutputsError> {
        let snapshot = Snapshot::begin(client).await?;
        if !snapshot.try_lock(id).await? && !insist {
            return Err(OutputsError::Busy { id });
        }
        let Some(Look::Closed(closed)) = snapshot.look(id).await? else { return Ok(None) };
        failpoint!("outputs.before");
        let mut manifest = Manifest::of(&closed);
        for file in usable(id, snapshot.files(id).await?) {
            manifest.files.push(self.upload_file(&snapshot, &closed, &file).await?);
        }
        failpoint!("outputs.files");
        let key = manifest::key(&closed)?;
        let files = manifest.files.iter().map(|file| Key::new(&*file.key)).collect::<Result<_, _>>()?;
        let mut summary = None;
        // Without any file, too, when all names were impossible: the end of the batch asks for a manifest.
        if closed.outputs {
            self.objects.put(&key, Bytes::from(serde_json::to_vec_pretty(&manifest)?)).await?;
            summary = Some(manifest.summary(&key, &self.objects)?);
            let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
            tracing::info!(batch = id, files = manifest.files.len(), bytes, "uploaded outputs");
        }
        Ok(Some(Uploaded { closed, summary, manifest: key, files }))
    }

    async fn upload_file(
        &self,
        snapshot: &Snapshot<'_>,
        closed: &Closed,
        file: &FileSpan,
    ) -> Result<FileEntry, OutputsError> {
        let key = Key::new(format!("{}/{}", folder(closed), file.name))?;
        let sum = Arc::new(Mutex::new(Sum::default()));
        let counting = Arc::clone(&sum);
        let unread = Arc::new(Mutex::new(None));
        let noted = Arc::clone(&unread);
        let failed = move |error: tokio_postgres::Error| {
            let text = describe(&error);
            *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            io::Error::other(text)
        };
        let text = snapshot.text(closed.id, file).map_err(failed).inspect_ok(move |text| {
            counting.lock().unwrap_or_else(PoisonError::into_inner).add(text);
        });
        let put = self.objects.put_stream(&key, StreamReader::new(Box::pin(text))).await;
        // A store that was given half a file complains, too; the cause comes first.
        if let Some(error) = unread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error.into());
        }
        put?;
        let sum = std::mem::take(&mut *sum.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(FileEntry {
            name: file.name.clone(),
            key: key.to_string(),
            bytes: sum.bytes,
            rows: sum.rows,
            sha256: hex::encode(sum.hash.finalize()),
        })
    }

    /// Removes an upload that another end of the batch has made worthless. If that fails, files are left behind that nothing refers to.
    pub async fn remove_if_overtaken(&self, client: &Object, uploaded: &Uploaded) {
        if uploaded.summary.is_none() {
            return;
        }
        match is_overtaken(client, &uploaded.closed, uploaded.manifest.as_str()).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                return tracing::debug!(error = describe(&error), "an upload may have been overtaken");
            }
        }
        // The manifest first: what it lists is there as long as it is.
        for key in std::iter::once(&uploaded.manifest).chain(&uploaded.files) {
            if let Err(error) = self.objects.delete(key).await {
                tracing::info!(object = %key, error = describe(&error), "an overtaken output was left behind");
            }
        }
    }
}

/// Names are checked when a row's outcome is taken. What is wrong here was written by other means, and must not keep the batch from
/// its end.
fn usable(batch: i64, files: Vec<FileSpan>) -> Vec<FileSpan> {
    let (good, bad): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file_name_problem(&file.name).is_none());
    if let Some(first) = bad.first() {
        tracing::error!(
            batch,
            files = bad.len(),
            first = first.name,
            "output files with impossible names were left out"
        );
    }
    good
}

/// What went through.
#[derive(Default)]
struct Sum {
    hash: Sha256,
    bytes: u64,
    rows: u64,
}

impl Sum {
    fn add(&mut self, text: &Bytes) {
        self.hash.update(text);
        self.bytes += text.len() as u64;
        self.rows += 1;
    }
}
