//! Objects in S3: small ones by one PUT, larger ones by a multipart upload of which two parts are in flight.

mod client;
mod credentials;
mod refusal;
mod upload;

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt;
use s3::command::Command;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_util::io::StreamReader;
use tokio_util::task::TaskTracker;

use self::client::Client;
use self::upload::Upload;
use super::config::S3Config;
use super::error::{ObjectError, Op};
use super::{Key, ObjectReader, Stored};
use crate::renewed::{Renewed, Stamp};

/// The size of every part but the last. S3 wants at least 5 MiB; memory per upload is two of these.
const PART: usize = 8 << 20;

#[derive(Clone, Debug)]
pub struct S3Store {
    clients: Arc<Renewed<Arc<Client>>>,
    prefix: String,
    /// Uploads under way and being aborted: what may outlive the future that asked for it.
    chores: TaskTracker,
}

impl S3Store {
    pub(super) fn open(
        config: &S3Config,
        env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self, ObjectError> {
        let (looked, made) = (config.clone(), config.clone());
        let make = move || Client::new(&made, credentials::find(&made, &env)?).map(Arc::new);
        let clients = Arc::new(Renewed::new("outputs.s3", move || stamps(&looked), make)?);
        let prefix = match config.prefix.trim_matches('/') {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        let chores = TaskTracker::new();
        // Closed from the start: it goes on taking chores, and waiting for it means waiting until none is left.
        chores.close();
        Ok(Self { clients, prefix, chores })
    }

    pub(super) async fn put_stream<R>(&self, key: &Key, mut reader: R) -> Result<Stored, ObjectError>
    where
        R: AsyncRead + Send + Unpin,
    {
        let mut part = read_part(key, &mut reader).await?;
        if part.len() < PART {
            return self.put_small(key, part).await;
        }
        let mut upload =
            Upload::begin(&self.client(), &self.chores, self.path(key), content_type(key)).await?;
        let mut bytes = 0;
        while !part.is_empty() {
            bytes += part.len() as u64;
            upload.push(part)?;
            // Room first, then the next part: so no third one is ever in memory.
            upload.room().await?;
            part = read_part(key, &mut reader).await?;
        }
        upload.complete().await?;
        Ok(Stored { bytes })
    }

    pub(super) async fn get_stream(&self, key: &Key) -> Result<ObjectReader, ObjectError> {
        let response =
            self.client().send(Op::Read, &self.path(key), Command::GetObject, Bytes::new()).await?;
        let stream = response.bytes_stream().map_err(std::io::Error::other);
        Ok(Box::new(StreamReader::new(Box::pin(stream))))
    }

    pub(super) async fn read(&self, key: &Key) -> Result<Bytes, ObjectError> {
        self.client().call(Op::Read, &self.path(key), Command::GetObject, Bytes::new()).await
    }

    pub(super) async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        self.client().call(Op::Delete, &self.path(key), Command::DeleteObject, Bytes::new()).await.map(drop)
    }

    /// A page of keys at a time, until there is none.
    pub(super) async fn delete_folder(&self, folder: &Key) -> Result<(), ObjectError> {
        let prefix = format!("{}/", self.path(folder));
        loop {
            let list = Command::ListObjectsV2 {
                prefix: prefix.clone(),
                delimiter: None,
                continuation_token: None,
                start_after: None,
                max_keys: None,
            };
            let client = self.client();
            let answer = client.call(Op::Delete, "/", list, Bytes::new()).await?;
            let listed: Listed = quick_xml::de::from_str(&String::from_utf8_lossy(&answer))
                .map_err(|error| ObjectError::source_of(folder, std::io::Error::other(error)))?;
            if listed.contents.is_empty() {
                return Ok(());
            }
            for object in listed.contents {
                client.call(Op::Delete, &object.key, Command::DeleteObject, Bytes::new()).await?;
            }
        }
    }

    pub(super) fn location(&self, key: &Key) -> String {
        self.client().location(&self.path(key))
    }

    pub(super) async fn wait_for_cleanup(&self) {
        self.chores.wait().await;
    }

    async fn put_small(&self, key: &Key, content: Bytes) -> Result<Stored, ObjectError> {
        let body = content.clone();
        let command = Command::PutObject {
            content: &content,
            content_type: content_type(key),
            custom_headers: None,
            multipart: None,
        };
        self.client().call(Op::Write, &self.path(key), command, body).await?;
        Ok(Stored { bytes: content.len() as u64 })
    }

    /// With the keys and authorities of now.
    fn client(&self) -> Arc<Client> {
        Arc::clone(&self.clients.get())
    }

    fn path(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// The objects of a folder, as S3 lists them.
#[derive(Deserialize)]
struct Listed {
    #[serde(rename = "Contents", default)]
    contents: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    key: String,
}

/// What a client is made of; the keys of the environment never change.
fn stamps(config: &S3Config) -> Vec<Stamp> {
    let keys = [&config.access_key, &config.secret_key].into_iter().filter(|key| key.file().is_some());
    let authorities = Some(config.ca_file.as_path()).filter(|path| !path.as_os_str().is_empty());
    keys.map(Stamp::of_secret).chain(authorities.map(Stamp::of_file)).collect()
}

/// Reads a whole part; a shorter one is the last.
async fn read_part<R: AsyncRead + Unpin>(key: &Key, reader: &mut R) -> Result<Bytes, ObjectError> {
    let mut part = BytesMut::with_capacity(PART);
    let mut rest = reader.take(PART as u64);
    while rest.read_buf(&mut part).await.map_err(|error| ObjectError::source_of(key, error))? > 0 {}
    Ok(part.freeze())
}

/// The content type of the object, for browsers.
fn content_type(key: &Key) -> &'static str {
    match key.as_str().rsplit_once('.').map(|(_, extension)| extension) {
        Some("json") => "application/json",
        Some("ndjson" | "jsonl") => "application/x-ndjson",
        Some("csv") => "text/csv; charset=utf-8",
        Some("txt" | "log") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}
