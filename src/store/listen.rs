//! LISTEN on a connection of its own: wakes dispatchers, cancels aborted work, asks for checks. The session lock, by
//! which others see that this process lives, is held on the same connection.

use super::{
    batches,
    connect::{ConnectError, Connection, Target},
    workers,
};
use crate::worker_id::WorkerId;
use futures::{StreamExt, channel::mpsc, stream};
use std::{pin::pin, time::Duration};
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_postgres::{AsyncMessage, Client};
use tokio_util::sync::CancellationToken;

/// What a notification says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// There may be work in this queue.
    Work(String),
    /// This batch or task is being aborted, as the database confirmed.
    Abort(i64),
    /// This scope may be over.
    Check(i64),
    /// The connection does not answer, or does again after it did not: the session and its lock may be gone.
    Doubt(bool),
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

/// How often the connection is asked what a lost notification may have said; and how long an answer may take before it counts as
/// lost.
const PULSE: Duration = Duration::from_secs(5);
/// How often a worker that holds something asks whether the connection still lives; an answer that takes as long is in doubt. Others
/// take a worker for dead when its lock is gone for three seconds and no beat has come meanwhile.
const PING: Duration = Duration::from_secs(1);

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
        let (mut pulse, mut ping) = (tokio::time::interval(PULSE), tokio::time::interval(PING));
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
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
                        aborted(&client, aborts, &mut tell).await?.into_iter().for_each(|id| tell(News::Abort(id)));
                    }
                }
                name = renamed(&mut line) => publish(&client, &name, key).await?,
                // Without a statement: the server only has to answer. A worker with nothing in hand has nothing to lose.
                _ = ping.tick(), if matches!(line, Line::Session(_)) => {
                    if !held_batches().is_empty() {
                        answered(client.batch_execute(""), &mut tell).await?;
                    }
                }
                _ = pulse.tick() => match held_batches() {
                    held if held.is_empty() => answered(client.batch_execute(""), &mut tell).await?,
                    held => aborted(&client, held, &mut tell).await?.into_iter().for_each(|id| tell(News::Abort(id))),
                },
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

async fn aborted(
    client: &Client,
    held: Vec<i64>,
    tell: &mut impl FnMut(News),
) -> Result<Vec<i64>, ListenError> {
    answered(batches::aborting(client, &held), tell).await
}

/// Waits for an answer; a connection that is slow to give it is in doubt meanwhile.
async fn answered<T>(
    question: impl Future<Output = Result<T, tokio_postgres::Error>>,
    tell: &mut impl FnMut(News),
) -> Result<T, ListenError> {
    let mut question = pin!(question);
    let answer = match tokio::time::timeout(PING, &mut question).await {
        Ok(answer) => answer,
        Err(_) => {
            tell(News::Doubt(true));
            let late = tokio::time::timeout(PULSE - PING, question).await;
            let answer = late.map_err(|_| ListenError::Lost { source: None })?;
            tell(News::Doubt(false));
            answer
        }
    };
    answer.map_err(|source| ListenError::Lost { source: Some(source) })
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
        assert_eq!(understand("another_channel", "17"), None);
        assert_eq!(understand("musterd_wake", "default"), Some(News::Work("default".into())));
    }
}
