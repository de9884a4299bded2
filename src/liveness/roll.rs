//! The roll in Redis: who lives and what they hold. Everything here may be empty, stale or wrong without harm.
//!
//! `PREFIX_{id}_HEARTBEAT` = "alive" with a TTL, `PREFIX_WORKER_REGISTRY` the set of ids, `PREFIX_{id}_ROWS` the set of
//! what a worker is running. The braces are in the keys: they put the keys of one worker into one slot of a cluster.

use super::{
    RedisConfig,
    presence::{Presence, Witness},
    redis::{self, CALL_LIMIT, RedisError},
};
use crate::{liveness::tracked::Tracked, worker_id::WorkerId};
use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, KeysInterface, SetsInterface},
    types::{ClusterHash, ConnectHandle, CustomCommand, Expiration, Value},
};
use futures::{FutureExt, future::BoxFuture};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// What fred does when it is awaited.
trait Command<T>: Future<Output = Result<T, Error>> + Send {}
impl<T, F: Future<Output = Result<T, Error>> + Send> Command<T> for F {}

/// A client that has only just been made gets this long to connect before Redis counts as away.
const FIRST_CONNECT: Duration = Duration::from_secs(2);

/// Members of a set that are asked for at once.
const PAGE: usize = 1_000;
/// Pages of a dead worker's set that are read.
const MOST_PAGES: usize = 20;
/// Where a set begins, and where it ends.
pub const FIRST_PAGE: &str = "0";
/// A heartbeat may be seen this much before it was written, by the clocks of two commands.
const SLACK: Duration = Duration::from_secs(1);

/// Some members of a set, and where the next ones are.
#[derive(Debug)]
pub struct Page {
    pub members: Vec<Member>,
    pub next: String,
}

/// A member of a set, whatever it is.
#[derive(Debug)]
pub struct Member(Value);

impl Member {
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes().unwrap_or_default()
    }

    pub fn into_string(self) -> Option<String> {
        self.0.into_string()
    }
}

/// Redis is away, or said something we cannot use. Either way: do without.
#[derive(Debug, thiserror::Error)]
#[error("Redis is of no help now: {reason}")]
pub struct Away {
    reason: String,
}

#[derive(Clone, Debug)]
pub struct Roll {
    client: Client,
    prefix: String,
    /// The longest life of a heartbeat.
    ttl: Duration,
    connection: Arc<Mutex<Option<ConnectHandle>>>,
    witness: Arc<Witness>,
}

impl Roll {
    /// A client that connects, and connects again, on the current runtime for as long as it lives.
    pub fn open(config: &RedisConfig, presence: &Presence, ttl: Duration) -> Result<Self, RedisError> {
        let client = redis::client(config)?;
        let connection = Arc::new(Mutex::new(Some(client.connect())));
        let witness = Arc::new(presence.witness());
        Ok(Self { client, prefix: config.key_prefix.clone(), ttl, connection, witness })
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Says "alive". True when the set of what we hold is there, so that its TTL could be renewed.
    pub async fn beat(&self, id: &WorkerId, ttl: Duration, rows_ttl: Duration) -> Result<bool, Away> {
        let life = Some(Expiration::PX(milliseconds(ttl)));
        let (beat, listed, rows) = tokio::join!(
            self.call(self.client.set::<(), _, _>(self.heartbeat(id.as_str()), "alive", life, None, false)),
            self.add(self.registry(), vec![id.to_string()]),
            self.call(self.client.pexpire::<i64, _>(self.rows(id.as_str()), milliseconds(rows_ttl), None)),
        );
        beat?;
        listed?;
        Ok(rows? == 1)
    }

    /// The end of a worker: of its own free will, or because others found it dead.
    pub async fn strike(&self, id: &str) -> Result<(), Away> {
        self.call(self.client.del::<i64, _>(self.heartbeat(id))).await?;
        self.call(self.client.srem::<i64, _, _>(self.registry(), id)).await.map(|_| ())
    }

    /// What a dead worker held has been freed: the record of it goes.
    pub async fn forget_rows(&self, id: &str) -> Result<(), Away> {
        self.call(self.client.del::<i64, _>(self.rows(id))).await.map(|_| ())
    }

    /// All keys of a worker that is gone; those that cannot be removed now run out, or are found by the next look.
    pub async fn clear(&self, id: &str) {
        let cleared = async {
            self.strike(id).await?;
            self.forget_rows(id).await
        };
        if let Err(error) = cleared.await {
            tracing::debug!(worker = id, %error, "its keys are left to run out");
        }
    }

    /// Some of the registry: names of workers, and whatever else was added to it.
    pub async fn members(&self, cursor: &str) -> Result<Page, Away> {
        self.page(self.registry(), cursor).await
    }

    /// Removes members of the registry that are no worker's name.
    pub async fn remove(&self, garbage: Vec<Member>) -> Result<u64, Away> {
        if garbage.is_empty() {
            return Ok(0);
        }
        let values: Vec<Value> = garbage.into_iter().map(|member| member.0).collect();
        self.call(self.client.srem(self.registry(), values)).await
    }

    /// What a worker's set says that it was running.
    pub async fn tracked(&self, id: &str) -> Result<Tracked, Away> {
        let (mut tracked, mut cursor) = (Tracked::default(), FIRST_PAGE.to_owned());
        for _ in 0..MOST_PAGES {
            let page = self.page(self.rows(id), &cursor).await?;
            page.members.iter().for_each(|member| tracked.add(member.as_bytes()));
            cursor = page.next;
            if cursor == FIRST_PAGE {
                break;
            }
        }
        Ok(tracked)
    }

    async fn page(&self, key: String, cursor: &str) -> Result<Page, Away> {
        let scan = CustomCommand::new_static("SSCAN", ClusterHash::FirstKey, false);
        let asked = vec![key, cursor.to_owned(), "COUNT".to_owned(), PAGE.to_string()];
        let answer: Value = self.call(self.client.custom(scan, asked)).await?;
        let mut parts = answer.into_array().into_iter();
        let next = parts.next().and_then(Value::into_string);
        let members =
            parts.next().map(Value::into_array).unwrap_or_default().into_iter().map(Member).collect();
        match next {
            Some(next) => Ok(Page { members, next }),
            None => Err(Away { reason: "SSCAN was not answered with a cursor".to_owned() }),
        }
    }

    /// The time until a worker's heartbeat runs out; `None` when there is none of ours.
    pub async fn heartbeat_left(&self, id: &str) -> Result<Option<Duration>, Away> {
        let left: i64 = self.call(self.client.pttl(self.heartbeat(id))).await?;
        // -2: no key. -1: a key without an end. Neither that nor one that outlives a heartbeat was written by a worker.
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        Ok(left.filter(|left| *left <= self.ttl + SLACK))
    }

    /// Adds to what a worker holds; the set lives on for `rows_ttl`.
    pub async fn track(&self, id: &WorkerId, held: Vec<String>, rows_ttl: Duration) -> Result<(), Away> {
        if held.is_empty() {
            return Ok(());
        }
        let key = self.rows(id.as_str());
        self.add(key.clone(), held).await?;
        self.call(self.client.pexpire::<i64, _>(key, milliseconds(rows_ttl), None)).await.map(|_| ())
    }

    pub async fn untrack(&self, id: &WorkerId, ended: Vec<String>) -> Result<(), Away> {
        if ended.is_empty() {
            return Ok(());
        }
        self.call(self.client.srem::<i64, _, _>(self.rows(id.as_str()), ended)).await.map(|_| ())
    }

    pub async fn close(&self) {
        // Best effort: the process is ending.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.client.quit()).await;
    }

    /// SADD to a key of ours. Whatever else stands there is not ours, and goes.
    async fn add(&self, key: String, members: Vec<String>) -> Result<(), Away> {
        let added = self.limited(self.client.sadd::<i64, _, _>(key.clone(), members.clone())).await;
        match added {
            Err(Some(error)) if error.details().starts_with("WRONGTYPE") => {
                tracing::warn!(key, "a key of ours holds something else; replacing it");
                self.call(self.client.del::<i64, _>(key.clone())).await?;
                self.call(self.client.sadd::<i64, _, _>(key, members)).await.map(|_| ())
            }
            added => self.judge(added).map(|_| ()),
        }
    }

    fn call<'a, T: Send + 'a>(&'a self, command: impl Command<T> + 'a) -> BoxFuture<'a, Result<T, Away>> {
        let answer = self.limited(command);
        async move { self.judge(answer.await) }.boxed()
    }

    /// Nothing is sent to a server that is not there: the client would keep it for later. Boxed, since fred's futures
    /// are large.
    fn limited<'a, T: Send + 'a>(
        &'a self,
        command: impl Command<T> + 'a,
    ) -> BoxFuture<'a, Result<T, Option<Error>>> {
        let command = command.boxed();
        async move {
            self.revive();
            if self.witness.is_new() {
                // Whether it came or not is seen in the next line.
                let _ = tokio::time::timeout(FIRST_CONNECT, self.client.wait_for_connect()).await;
            }
            if !self.client.is_connected() {
                return Err(None);
            }
            match tokio::time::timeout(CALL_LIMIT, command).await {
                Ok(answer) => answer.map_err(Some),
                Err(_) => Err(None),
            }
        }
        .boxed()
    }

    /// fred gives up on some errors (a changed password, say) for good; we do not.
    fn revive(&self) {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
            *connection = Some(self.client.connect());
        }
    }

    fn judge<T>(&self, answer: Result<T, Option<Error>>) -> Result<T, Away> {
        match answer {
            Ok(value) => {
                self.witness.note(true, "");
                Ok(value)
            }
            // A refusal of one command is not an absence.
            Err(Some(error)) if !is_absence(&error) => Err(Away { reason: error.details().to_owned() }),
            Err(error) => {
                let reason = error
                    .map_or("not connected, or no answer in time".to_owned(), |e| e.details().to_owned());
                self.witness.note(false, &reason);
                Err(Away { reason })
            }
        }
    }

    fn heartbeat(&self, id: &str) -> String {
        format!("{}_{{{id}}}_HEARTBEAT", self.prefix)
    }

    fn rows(&self, id: &str) -> String {
        format!("{}_{{{id}}}_ROWS", self.prefix)
    }

    fn registry(&self) -> String {
        format!("{}_WORKER_REGISTRY", self.prefix)
    }
}

fn is_absence(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::IO | ErrorKind::Timeout | ErrorKind::Canceled | ErrorKind::Tls | ErrorKind::Auth
    )
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}
