//! Archives: before the rows of a batch go, they are written to the store of the outputs with what became of them, in the form that
//! `submit --exported` reads.
//!
//! The key carries the batch's uid, its generation and its rows: an archive of an older generation is another object. The manifest is written
//! last, and the batch refers to it in the transaction that gives its rows up. An archive that lacks a row is none.

use super::export::{ExportError, Format, Taker, export};
use crate::{
    json::Json,
    objects::{self, Key, MANIFEST, ObjectError},
    store::{
        batches::{self, Progress},
        export::Rows,
        facts,
        query::QueryError,
        retention::Due,
    },
};
use bytes::Bytes;
use deadpool_postgres::{Object, Pool, PoolError};
use flate2::{Compression, write::GzEncoder};
use futures::stream;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use tokio::sync::mpsc;
use tokio_util::io::StreamReader;

#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("no connection to archive with")]
    Connect(#[from] PoolError),
    #[error("could not read the batch")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Facts(#[from] QueryError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("could not describe the archive")]
    Describe(#[from] serde_json::Error),
    #[error("the batch is not there any more")]
    Missing,
    #[error("{found} of its {rows} rows can be read: it is not archived, and its data stays")]
    Incomplete { found: u64, rows: i32 },
}

/// What an archive is, and all that is needed to submit it again.
#[derive(Debug, Serialize)]
struct Manifest<'m> {
    uid: String,
    batch: &'m Progress,
    context: &'m Json,
    file: &'m File,
}

#[derive(Debug, Serialize)]
struct File {
    key: String,
    rows: u64,
    bytes: u64,
    sha256: String,
}

/// Writes the archive of an ended batch; what the batch is to say of it. The same batch is archived to the same place, over what an
/// earlier try has left.
pub async fn archive(pool: &Pool, objects: &objects::Store, due: &Due) -> Result<Json, ArchiveError> {
    let mut client = pool.get().await?;
    let progress = batches::progress(&**client, due.id).await?.ok_or(ArchiveError::Missing)?;
    let facts = facts::read(&client, due.id, due.uid).await?.ok_or(ArchiveError::Missing)?;
    let folder = folder(due);
    let key = Key::new(format!("{folder}/rows.ndjson.gz"))?;
    let file = match write(&mut client, objects, due.id, &key).await {
        Ok(file) => file,
        Err(error) => {
            // It may be in the middle of a page; a new one is cheap.
            drop(Object::take(client));
            return Err(error);
        }
    };
    if i64::from(due.rows) != file.rows as i64 {
        objects.delete(&key).await?;
        return Err(ArchiveError::Incomplete { found: file.rows, rows: due.rows });
    }
    let manifest =
        Manifest { uid: due.uid.to_string(), batch: &progress, context: &facts.context, file: &file };
    let place = Key::new(format!("{folder}/{MANIFEST}"))?;
    objects.put(&place, Bytes::from(serde_json::to_vec_pretty(&manifest)?)).await?;
    tracing::info!(batch = due.id, rows = file.rows, bytes = file.bytes, "archived the rows of a batch");
    Ok(Json::of(&serde_json::json!({
        "manifest": place.as_str(), "location": objects.location(&key), "key": key.as_str(),
        "generation": due.generation, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256,
    }))?)
}

/// Where the archive of this generation of a batch lies.
fn folder(due: &Due) -> String {
    let Due { id, generation, rows, .. } = due;
    format!("archive/{id}-{}/g{generation}-r{rows}", &due.uid.simple().to_string()[..8])
}

async fn write(
    client: &mut Object,
    objects: &objects::Store,
    batch: i64,
    key: &Key,
) -> Result<File, ArchiveError> {
    let (pieces, received) = mpsc::channel::<io::Result<Bytes>>(2);
    let reading = async {
        let mut press = Press::new(pieces);
        let read = export(client, batch, Rows::All, Format::Ndjson, &mut press).await;
        press.end(read).await
    };
    let taken = stream::unfold(received, async |mut received| Some((received.recv().await?, received)));
    let putting = objects.put_stream(key, StreamReader::new(Box::pin(taken)));
    let (read, put) = tokio::join!(reading, putting);
    match (read, put) {
        // A store that was given half a file complains, too; the cause comes first.
        (Err(error), Err(_)) if !error.is_gone() => Err(error.into()),
        (_, Err(error)) => Err(error.into()),
        (read, Ok(_)) => Ok(File { key: key.to_string(), ..read? }),
    }
}

/// Compresses what it takes, and counts and hashes what comes out.
struct Press {
    gzip: GzEncoder<Vec<u8>>,
    pieces: mpsc::Sender<io::Result<Bytes>>,
    hash: Sha256,
    bytes: u64,
}

impl Press {
    fn new(pieces: mpsc::Sender<io::Result<Bytes>>) -> Self {
        Self {
            gzip: GzEncoder::new(Vec::new(), Compression::default()),
            pieces,
            hash: Sha256::new(),
            bytes: 0,
        }
    }

    async fn pass_on(&mut self, piece: Vec<u8>) -> io::Result<()> {
        self.hash.update(&piece);
        self.bytes += piece.len() as u64;
        self.pieces.send(Ok(piece.into())).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// The end of the file; or that there is none, so that the store does not take the half for the whole.
    async fn end(mut self, read: Result<u64, ExportError>) -> Result<File, ExportError> {
        let rows = match read {
            Ok(rows) => rows,
            Err(error) => {
                // The store may have given up before.
                let _ = self.pieces.send(Err(io::Error::other("the rows could not be read"))).await;
                return Err(error);
            }
        };
        self.gzip.try_finish()?;
        let last = std::mem::take(self.gzip.get_mut());
        self.pass_on(last).await?;
        Ok(File { key: String::new(), rows, bytes: self.bytes, sha256: hex::encode(self.hash.finalize()) })
    }
}

impl Taker for Press {
    async fn take(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.gzip.write_all(&bytes)?;
        let piece = std::mem::take(self.gzip.get_mut());
        match piece.is_empty() {
            true => Ok(()),
            false => self.pass_on(piece).await,
        }
    }
}
