//! LISTEN on a connection of its own: wakes dispatchers, cancels aborted work, asks for checks. The session lock, by
//! which others see that this process lives, is held on the same connection.

use super::{
    batches,
    connect::{ConnectError, Connection, Target},
    workers,
};
use crate::worker_id::WorkerId;
use futures::{StreamExt, channel::mpsc, stream};
use std::time::Duration;
use tokio::sync::watch;
use tokio_postgres::{AsyncMessage, Client};
use tokio_util::sync::CancellationToken;

/// What the database told us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// There may be work in this queue.
    Work(String),
    /// This batch or task is being aborted, as the database confirmed.
    Abort(i64),
    /// This scope may be over.
    Check(i64),
    /// The connection is new, and the lock taken: anything may have been missed.
    AnythingMissed,
}

/// What the connection is good for.
#[derive(Debug)]
pub enum Line {
    /// A session that stays ours. The lock is for the worker of this name, whatever it becomes.
    Session(watch::Receiver<WorkerId>),
    /// A pooler in transaction mode: the next statement may run in another session.
    Pooled,
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("could not listen")]
    Listen { source: tokio_postgres::Error },
    #[error("the listening connection was lost")]
    Lost { source: Option<tokio_postgres::Error> },
}

const CHANNELS: &str = "LISTEN musterd_wake; LISTEN musterd_abort; LISTEN musterd_check";

/// Notifications that wait to be looked at; further ones are dropped. What they said is found by asking.
const MOST_NEWS: usize = 1_000;

/// How often the connection is asked whether it still lives, and what a lost notification may have said.
const PULSE: Duration = Duration::from_secs(5);

/// Hands over news until `stop` or until the connection is lost.
pub async fn listen(
    target: &Target,
    stop: &CancellationToken,
    mut line: Line,
    held_batches: impl Fn() -> Vec<i64>,
    mut tell: impl FnMut(News),
) -> Result<(), ListenError> {
    let (client, connection) = target.connect("musterd listen").await?;
    let (sender, mut heard) = mpsc::channel(MOST_NEWS);
    let driving = drive(connection, sender);
    tokio::pin!(driving);
    let listening = async {
        let key = rand::random();
        if let Line::Session(name) = &mut line {
            client.batch_execute(CHANNELS).await.map_err(|source| ListenError::Listen { source })?;
            let worker = name.borrow_and_update().clone();
            lock(&client, &worker, key).await?;
        }
        tell(News::AnythingMissed);
        let mut pulse = tokio::time::interval(PULSE);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(news) = heard.next() => {
                    let mut aborts = Vec::new();
                    for news in std::iter::once(news).chain(std::iter::from_fn(|| heard.try_recv().ok())) {
                        match news {
                            News::Abort(id) => aborts.push(id),
                            news => tell(news),
                        }
                    }
                    // Any session may send a notification: it is a hint, and the database is asked before anything is
                    // cancelled.
                    if !aborts.is_empty() {
                        aborted(&client, aborts).await?.into_iter().for_each(|id| tell(News::Abort(id)));
                    }
                }
                name = renamed(&mut line) => publish(&client, &name, key).await?,
                _ = pulse.tick() => {
                    for batch in aborted(&client, held_batches()).await? {
                        tell(News::Abort(batch));
                    }
                }
            }
        }
    };
    tokio::select! {
        ended = listening => ended,
        source = &mut driving => Err(ListenError::Lost { source }),
    }
}

/// The lock first, the list second: a lock that is in the list can be missed.
async fn lock(client: &Client, worker: &WorkerId, key: i64) -> Result<(), ListenError> {
    workers::take_session_lock(client, key).await.map_err(|source| ListenError::Listen { source })?;
    publish(client, worker, key).await
}

async fn publish(client: &Client, worker: &WorkerId, key: i64) -> Result<(), ListenError> {
    let published = workers::publish_session_lock(client, worker, key).await;
    published.map_err(|source| ListenError::Listen { source })
}

/// The worker's next name; the lock is its lock, too.
async fn renamed(line: &mut Line) -> WorkerId {
    if let Line::Session(name) = line
        && name.changed().await.is_ok()
    {
        return name.borrow_and_update().clone();
    }
    std::future::pending().await
}

async fn aborted(client: &Client, held: Vec<i64>) -> Result<Vec<i64>, ListenError> {
    let asked = tokio::time::timeout(PULSE, batches::aborting(client, &held)).await;
    match asked {
        Ok(Ok(batches)) => Ok(batches),
        Ok(Err(source)) => Err(ListenError::Lost { source: Some(source) }),
        Err(_) => Err(ListenError::Lost { source: None }),
    }
}

/// Moves the bytes of the connection and picks the notifications out of them.
async fn drive(mut connection: Connection, mut sender: mpsc::Sender<News>) -> Option<tokio_postgres::Error> {
    let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
    while let Some(message) = messages.next().await {
        match message {
            Ok(AsyncMessage::Notification(note)) => {
                if let Some(news) = understand(note.channel(), note.payload()) {
                    // Refused when too many wait, or when the caller is gone and so is this function.
                    let _ = sender.try_send(news);
                }
            }
            Ok(_) => {}
            Err(error) => return Some(error),
        }
    }
    None
}

/// Any session may NOTIFY: what is not ours to understand is passed over.
fn understand(channel: &str, payload: &str) -> Option<News> {
    match channel {
        "musterd_wake" => Some(News::Work(payload.to_owned())),
        "musterd_abort" => payload.parse().ok().map(News::Abort),
        "musterd_check" => payload.parse().ok().map(News::Check),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_from_a_stranger_is_passed_over() {
        assert_eq!(understand("musterd_abort", "17"), Some(News::Abort(17)));
        assert_eq!(understand("musterd_abort", "all of them"), None);
        assert_eq!(understand("somebody_else", "17"), None);
        assert_eq!(understand("musterd_wake", "default"), Some(News::Work("default".into())));
    }
}
