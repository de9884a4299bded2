//! LISTEN on a connection of its own: wakes dispatchers, cancels aborted work, asks for checks.

use super::{
    batches,
    connect::{ConnectError, Connection, Target},
};
use futures::{StreamExt, channel::mpsc, stream};
use std::time::Duration;
use tokio_postgres::{AsyncMessage, Client};
use tokio_util::sync::CancellationToken;

/// What the database told us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// There may be work in this queue.
    Work(String),
    /// This batch or task is being aborted.
    Abort(i64),
    /// This scope may be over.
    Check(i64),
    /// The connection is new: anything may have been missed.
    AnythingMissed,
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

/// How often the connection is asked whether it still lives, and what a lost notification may have said.
const PULSE: Duration = Duration::from_secs(5);

/// Hands over news until `stop` or until the connection is lost; the supervisor then starts it again.
pub async fn listen(
    target: &Target,
    stop: &CancellationToken,
    held_batches: impl Fn() -> Vec<i64>,
    mut tell: impl FnMut(News),
) -> Result<(), ListenError> {
    let (client, connection) = target.connect("musterd listen").await?;
    let (sender, mut heard) = mpsc::unbounded();
    let driving = drive(connection, sender);
    tokio::pin!(driving);
    let listening = async {
        client.batch_execute(CHANNELS).await.map_err(|source| ListenError::Listen { source })?;
        tell(News::AnythingMissed);
        let mut pulse = tokio::time::interval(PULSE);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(news) = heard.next() => tell(news),
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

async fn aborted(client: &Client, held: Vec<i64>) -> Result<Vec<i64>, ListenError> {
    let asked = tokio::time::timeout(PULSE, batches::aborting(client, &held)).await;
    match asked {
        Ok(Ok(batches)) => Ok(batches),
        Ok(Err(source)) => Err(ListenError::Lost { source: Some(source) }),
        Err(_) => Err(ListenError::Lost { source: None }),
    }
}

/// Moves the bytes of the connection and picks the notifications out of them.
async fn drive(
    mut connection: Connection,
    sender: mpsc::UnboundedSender<News>,
) -> Option<tokio_postgres::Error> {
    let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
    while let Some(message) = messages.next().await {
        match message {
            Ok(AsyncMessage::Notification(note)) => {
                if let Some(news) = understand(note.channel(), note.payload()) {
                    // The other half of this function's caller is gone only when we are about to be.
                    let _ = sender.unbounded_send(news);
                }
            }
            Ok(_) => {}
            Err(error) => return Some(error),
        }
    }
    None
}

/// Anybody may NOTIFY: what is not ours to understand is passed over.
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
