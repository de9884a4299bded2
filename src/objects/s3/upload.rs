//! One multipart upload: completed, or aborted, however its owner goes.
//!
//! Parts left by an upload that is never ended are stored and paid for, unseen. So the upload's value stands for it from the
//! moment the server knows it, and dropping that value aborts it. Only the death of the process can leave one behind;
//! a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) removes it then.

use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use s3::command::{Command, Multipart};
use s3::serde_types::{CompleteMultipartUploadData, Part};
use s3::signing::uri_encode;
use serde::Deserialize;
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use tokio::time;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::PART;
use super::client::Client;
use super::refusal::Refusal;
use crate::objects::error::{ObjectError, Op};

/// How many parts are on their way at once, each 8 MiB of memory.
const IN_FLIGHT: usize = 2;
/// What S3 allows in one upload: 78 GiB of ours.
const MAX_PARTS: u32 = 10_000;
/// How long an abort waits for parts on their way. One that arrives after the abort would be left behind.
const PATIENCE: Duration = Duration::from_secs(10);
const ABORT_ATTEMPTS: u32 = 5;

#[derive(Debug)]
pub(super) struct Upload {
    target: Target,
    chores: TaskTracker,
    sending: JoinSet<Result<Part, ObjectError>>,
    parts: Vec<Part>,
    begun: u32,
    completed: bool,
    /// Given back after the abort has its own, so that a caller that waits for the store waits for the abort too.
    _under_way: TaskTrackerToken,
}

/// The upload as the server knows it.
#[derive(Clone, Debug)]
struct Target {
    client: Arc<Client>,
    path: String,
    /// As it stands in a URL: rust-s3 puts it there as it is.
    id: String,
    content_type: &'static str,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Begun {
    upload_id: String,
}

impl Upload {
    pub(super) async fn begin(
        client: &Arc<Client>,
        chores: &TaskTracker,
        path: String,
        content_type: &'static str,
    ) -> Result<Self, ObjectError> {
        let target = Target { client: client.clone(), path, id: String::new(), content_type };
        let (at, tracker) = (client.location(&target.path), chores.clone());
        // In a task of its own: dropped while the request is under way, the id to abort would be lost. So the
        // task goes on, and its Upload is dropped unread.
        let begun = chores.spawn(async move {
            let target = target.begin().await?;
            Ok(Self::new(target, tracker))
        });
        begun.await.unwrap_or_else(|error| Err(lost(at, error)))
    }

    fn new(target: Target, chores: TaskTracker) -> Self {
        let under_way = chores.token();
        let (sending, parts) = (JoinSet::new(), Vec::new());
        Self { target, chores, sending, parts, begun: 0, completed: false, _under_way: under_way }
    }

    /// Sends the next part in the background.
    pub(super) fn push(&mut self, content: Bytes) -> Result<(), ObjectError> {
        if self.begun == MAX_PARTS {
            let max = u64::from(MAX_PARTS) * PART as u64;
            return Err(ObjectError::TooLarge { at: self.target.at(), max });
        }
        self.begun += 1;
        let (target, number) = (self.target.clone(), self.begun);
        self.sending.spawn(async move { target.send(number, content).await });
        Ok(())
    }

    /// Waits until another part may be sent.
    pub(super) async fn room(&mut self) -> Result<(), ObjectError> {
        self.drain_to(IN_FLIGHT - 1).await
    }

    /// Makes the object of its parts. From here on it is there.
    pub(super) async fn complete(mut self) -> Result<(), ObjectError> {
        self.drain_to(0).await?;
        let mut parts = mem::take(&mut self.parts);
        parts.sort_by_key(|part| part.part_number);
        self.target.complete(parts).await?;
        self.completed = true;
        Ok(())
    }

    async fn drain_to(&mut self, limit: usize) -> Result<(), ObjectError> {
        while self.sending.len() > limit {
            if let Some(sent) = self.sending.join_next().await {
                let part = sent.unwrap_or_else(|error| Err(lost(self.target.at(), error)))?;
                self.parts.push(part);
            }
        }
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.completed {
            return;
        }
        let (target, sending) = (self.target.clone(), mem::take(&mut self.sending));
        match Handle::try_current() {
            Ok(runtime) => drop(self.chores.spawn_on(abandon(target, sending), &runtime)),
            Err(_) => {
                tracing::warn!(object = target.at(), "an upload was left behind: the process is ending")
            }
        }
    }
}

/// Lets the parts on their way arrive, then aborts the upload.
async fn abandon(target: Target, mut sending: JoinSet<Result<Part, ObjectError>>) {
    let arrived = async { while sending.join_next().await.is_some() {} };
    if time::timeout(PATIENCE, arrived).await.is_err() {
        sending.shutdown().await;
    }
    let mut pause = Duration::from_secs(1);
    for attempt in 1..=ABORT_ATTEMPTS {
        match target.abort().await {
            Ok(()) => return,
            Err(error) if attempt == ABORT_ATTEMPTS || !error.is_transient() => {
                tracing::warn!(
                    object = target.at(),
                    %error,
                    "an unfinished upload could not be aborted; a lifecycle rule of the bucket can remove it"
                );
                return;
            }
            Err(_) => time::sleep(pause).await,
        }
        pause *= 2;
    }
}

impl Target {
    fn at(&self) -> String {
        self.client.location(&self.path)
    }

    async fn begin(mut self) -> Result<Self, ObjectError> {
        let command = Command::InitiateMultipartUpload { content_type: self.content_type };
        let answer = self.client.call(Op::Write, &self.path, command, Bytes::new()).await?;
        let begun: Result<Begun, _> = quick_xml::de::from_str(&String::from_utf8_lossy(&answer));
        self.id = match begun {
            Ok(begun) => uri_encode(&begun.upload_id, true),
            Err(_) => return Err(self.nonsense("begin of a multipart upload", "no upload id")),
        };
        Ok(self)
    }

    async fn send(&self, number: u32, content: Bytes) -> Result<Part, ObjectError> {
        let command = Command::PutObject {
            content: &content,
            content_type: self.content_type,
            custom_headers: None,
            multipart: Some(Multipart::new(number, &self.id)),
        };
        let response = self.client.send(Op::Write, &self.path, command, content.clone()).await?;
        match response.headers().get("etag").and_then(|etag| etag.to_str().ok()) {
            Some(etag) => Ok(Part { part_number: number, etag: etag.to_owned() }),
            None => Err(self.nonsense("part of a multipart upload", "no ETag")),
        }
    }

    async fn complete(&self, parts: Vec<Part>) -> Result<(), ObjectError> {
        let data = CompleteMultipartUploadData { parts };
        let body = Bytes::from(data.to_string());
        let command = Command::CompleteMultipartUpload { upload_id: &self.id, data };
        let answer = self.client.call(Op::Write, &self.path, command, body).await?;
        // S3 answers 200 before it has put the parts together, and may tell of a failure afterwards.
        let refusal = Refusal::read(&answer);
        match refusal.is_empty() {
            true => Ok(()),
            false => Err(self.client.refused(Op::Write, &self.path, 500, refusal)),
        }
    }

    async fn abort(&self) -> Result<(), ObjectError> {
        let command = Command::AbortMultipartUpload { upload_id: &self.id };
        match self.client.call(Op::Write, &self.path, command, Bytes::new()).await {
            // Gone already: an abort whose answer was lost, or a completion that succeeded unheard.
            Err(ObjectError::Server { code, .. }) if code == "NoSuchUpload" => Ok(()),
            Err(ObjectError::NotFound { .. }) => Ok(()),
            result => result.map(drop),
        }
    }

    fn nonsense(&self, asked: &str, problem: &str) -> ObjectError {
        let message = format!("the answer to the {asked} has {problem}");
        ObjectError::Server {
            op: Op::Write,
            at: self.at(),
            status: 200,
            code: "InvalidAnswer".into(),
            message,
        }
    }
}

/// A task of ours ended without a result: it panicked, or the runtime is going down.
fn lost(at: String, error: JoinError) -> ObjectError {
    ObjectError::Io { op: Op::Write, at, source: io::Error::other(error) }
}
