//! Holding, releasing, aborting and redriving batches: the functions of the SQL API, with answers that a person can read.

use super::events;
use tokio_postgres::{Client, Error, error::SqlState};

#[derive(Debug, thiserror::Error)]
pub enum SteeringError {
    #[error("there is no batch {id}")]
    Unknown { id: i64 },
    #[error("could not {operation} batch {id}")]
    Query { operation: &'static str, id: i64, source: Error },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    Hold,
    Release,
    Abort,
    /// Its failed rows again, in a new generation.
    Redrive,
}

impl Steer {
    fn word(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Release => "release",
            Self::Abort => "abort",
            Self::Redrive => "redrive",
        }
    }
}

/// Steers a batch; the state it is in afterwards. `aborting` is a batch on its way to `aborted`. `by`: the name of the client that
/// asks for it, for the event.
pub async fn steer(client: &Client, id: i64, what: Steer, by: Option<&str>) -> Result<String, SteeringError> {
    // The functions take tasks as well; here an id is a batch's or a mistake.
    let sql = format!(
        "SELECT musterd.{}(b.id) FROM musterd.batches b WHERE b.id = $1 AND {}",
        what.word(),
        events::client_is(2)
    );
    let row = client.query_opt(&sql, &[&id, &by]).await.map_err(|source| match source.code() {
        Some(code) if *code == SqlState::NO_DATA_FOUND => SteeringError::Unknown { id },
        _ => SteeringError::Query { operation: what.word(), id, source },
    })?;
    row.map(|row| row.get(0)).ok_or(SteeringError::Unknown { id })
}

/// Whether no worker holds a block of the batch, and whether any worker lives that could finish it.
pub async fn hands_on(client: &Client, id: i64) -> Result<Hands, Error> {
    const SQL: &str =
        "SELECT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = $1 AND k.worker IS NOT NULL),
               EXISTS (SELECT FROM musterd.workers w
                        WHERE w.state = 'alive' AND w.seen_at > pg_catalog.now() - interval '2 minutes')";
    let row = client.query_one(SQL, &[&id]).await?;
    Ok(Hands { owned: row.get(0), workers: row.get(1) })
}

/// Who has to do with a batch just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hands {
    pub owned: bool,
    pub workers: bool,
}
