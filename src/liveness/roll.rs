//! The roll in Redis: who lives and what they hold. Everything here may be empty, stale or wrong without harm.
//!
//! `PREFIX_{id}_HEARTBEAT` = "alive" with a TTL, `PREFIX_WORKER_REGISTRY` the set of ids, `PREFIX_{id}_ROWS` the set of
//! what a worker holds. The braces are in the keys: they put the keys of one worker into one slot of a cluster.

use super::{
    RedisConfig,
    presence::{Presence, Witness},
    redis::{self, CALL_LIMIT, RedisError},
};
use crate::worker_id::WorkerId;
use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, KeysInterface, SetsInterface},
    types::{ConnectHandle, Expiration},
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
    connection: Arc<Mutex<Option<ConnectHandle>>>,
    witness: Arc<Witness>,
}

impl Roll {
    /// A client that connects, and connects again, on the current runtime for as long as it lives.
    pub fn open(config: &RedisConfig, presence: &Presence) -> Result<Self, RedisError> {
        let client = redis::client(config)?;
        let connection = Arc::new(Mutex::new(Some(client.connect())));
        let witness = Arc::new(presence.witness());
        Ok(Self { client, prefix: config.key_prefix.clone(), connection, witness })
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

    /// Everybody who ever said to be here and has not been struck off.
    pub async fn members(&self) -> Result<Vec<String>, Away> {
        self.call(self.client.smembers(self.registry())).await
    }

    /// The time until a worker's heartbeat runs out; `None` when there is none.
    pub async fn heartbeat_left(&self, id: &str) -> Result<Option<Duration>, Away> {
        let left: i64 = self.call(self.client.pttl(self.heartbeat(id))).await?;
        // -2: no key. -1: a key without an end is not one of ours, and proves nothing.
        Ok(u64::try_from(left).ok().map(Duration::from_millis))
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
