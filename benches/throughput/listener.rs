//! A connection that listens on one channel.

use crate::ground::Database;
use anyhow::{Context, Result};
use futures::{StreamExt, stream};
use musterd::store::connect::Target;
use serde_json::Value;
use std::time::{Duration, SystemTime};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_postgres::{AsyncMessage, Client};

pub(crate) struct Listener {
    pub(crate) client: Client,
    notes: mpsc::UnboundedReceiver<Note>,
    /// Reads the connection for as long as the listener lives.
    _driver: JoinSet<()>,
}

/// A notification and when it was received.
struct Note {
    payload: String,
    at: SystemTime,
}

const ANSWER_LIMIT: Duration = Duration::from_secs(30);

impl Listener {
    pub(crate) async fn open(database: &Database, channel: &str) -> Result<Self> {
        let (client, mut connection) = Target::parse(&database.url)?.connect("musterd bench").await?;
        let (sender, notes) = mpsc::unbounded_channel();
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
            while let Some(Ok(message)) = messages.next().await {
                if let AsyncMessage::Notification(note) = message {
                    // The receiver is gone once all samples are taken.
                    let _ = sender.send(Note { payload: note.payload().to_owned(), at: SystemTime::now() });
                }
            }
        });
        client.batch_execute(&format!("LISTEN {channel}")).await?;
        Ok(Self { client, notes, _driver: driver })
    }

    /// Waits for one notification; `false` when the connection was lost.
    pub(crate) async fn heard(&mut self) -> bool {
        self.notes.recv().await.is_some()
    }

    /// When a notification named this id as ended.
    pub(crate) async fn end_of(&mut self, id: i64) -> Result<SystemTime> {
        let found = async {
            while let Some(note) = self.notes.recv().await {
                if serde_json::from_str(&note.payload).is_ok_and(|payload| names(&payload, id)) {
                    return Ok(note.at);
                }
            }
            anyhow::bail!("the connection that listens was lost")
        };
        tokio::time::timeout(ANSWER_LIMIT, found).await.with_context(|| format!("{id} did not end"))?
    }
}

/// Whether the id is in a payload. A notification may name one end or many: every number in it is an id.
fn names(payload: &Value, id: i64) -> bool {
    match payload {
        Value::Number(number) => number.as_i64() == Some(id),
        Value::Array(values) => values.iter().any(|value| names(value, id)),
        Value::Object(fields) => fields.values().any(|value| names(value, id)),
        _ => false,
    }
}
