//! Holding, releasing, aborting and redriving batches, and keeping their data: the functions of the SQL API, with answers that a person can read.

use super::{batches::Progress, events};
use crate::{error_group::ErrorGroup, json::Json, lines::Lines};
use serde::Serialize;
use tokio_postgres::{Client, Error, GenericClient, error::SqlState};

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
    /// Its data stays whatever retention says.
    HoldData,
    ReleaseData,
}

impl Steer {
    fn word(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Release => "release",
            Self::Abort => "abort",
            Self::HoldData => "hold_data",
            Self::ReleaseData => "release_data",
        }
    }
}

fn failed(operation: &'static str, id: i64, source: Error) -> SteeringError {
    match source.code() {
        Some(code) if *code == SqlState::NO_DATA_FOUND => SteeringError::Unknown { id },
        _ => SteeringError::Query { operation, id, source },
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
    let row = client.query_opt(&sql, &[&id, &by]).await.map_err(|source| failed(what.word(), id, source))?;
    row.map(|row| row.get(0)).ok_or(SteeringError::Unknown { id })
}

/// Which failed rows run again, and with what.
#[derive(Clone, Debug, Default)]
pub struct Redrive {
    /// Those that failed with an error of one of these groups; any when there is none.
    pub groups: Vec<ErrorGroup>,
    pub lines: Option<Lines>,
    /// What their inputs contain.
    pub input: Option<Json>,
    /// Only if the batch is still in this generation.
    pub generation: Option<i32>,
    pub context: Option<Json>,
    pub command: Option<String>,
}

impl Redrive {
    fn groups(&self) -> Option<Vec<String>> {
        (!self.groups.is_empty()).then(|| self.groups.iter().map(ToString::to_string).collect())
    }
}

/// What a redrive did: the state of the batch afterwards, and how many rows run again.
#[derive(Clone, Debug, Serialize)]
pub struct Redriven {
    pub id: i64,
    pub state: String,
    pub rows: i32,
}

/// Runs failed rows of an ended batch again, in a new generation.
pub async fn redrive(
    client: &Client,
    id: i64,
    what: &Redrive,
    by: Option<&str>,
) -> Result<Redriven, SteeringError> {
    let sql = format!(
        "SELECT r.state, r.redriven
           FROM musterd.batches b
          CROSS JOIN LATERAL musterd.redrive(b.id, $3, $4, $5, $6, $7, $8) r
          WHERE b.id = $1 AND {}",
        events::client_is(2)
    );
    let Redrive { lines, input, generation, context, command, .. } = what;
    let found =
        client.query_opt(&sql, &[&id, &by, &what.groups(), lines, input, generation, context, command]).await;
    match found.map_err(|source| failed("redrive", id, source))? {
        Some(row) => Ok(Redriven { id, state: row.get(0), rows: row.get(1) }),
        None => Err(SteeringError::Unknown { id }),
    }
}

/// What a redrive would run again.
#[derive(Clone, Debug, Serialize)]
pub struct Preview {
    pub id: i64,
    pub rows: i32,
    pub first_lines: Vec<i32>,
    /// The largest groups of errors.
    pub errors: Json,
}

/// The same, and nothing is changed.
pub async fn preview(client: &Client, id: i64, what: &Redrive) -> Result<Preview, SteeringError> {
    const SQL: &str = "SELECT p.rows, p.first_lines, p.groups FROM musterd.redrive_preview($1, $2, $3, $4) p";
    let row = client.query_one(SQL, &[&id, &what.groups(), &what.lines, &what.input]).await;
    let row = row.map_err(|source| failed("redrive", id, source))?;
    Ok(Preview { id, rows: row.get(0), first_lines: row.get(1), errors: row.get(2) })
}

/// What became of the rows of one redrive.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Outcome {
    pub generation: i32,
    /// How many had failed.
    pub redriven: i32,
    pub fixed: i32,
    /// Failed again with an error of the same group, or of another one.
    pub same: i32,
    pub otherwise: i32,
    /// Without an outcome: the batch still runs, or was aborted.
    pub left_over: i32,
}

/// A batch with all that is known of it.
#[derive(Clone, Debug, Serialize)]
pub struct Detail {
    #[serde(flatten)]
    pub progress: Progress,
    pub canary: Option<Canary>,
    /// What became of the rows that were run again, by generation.
    pub redrives: Vec<Outcome>,
}

/// Rows of a batch that run first, alone.
#[derive(Clone, Debug, Serialize)]
pub struct Canary {
    pub rows: i32,
    /// `running`, `held` when it has ended and the rest waits, `released`.
    pub state: String,
    /// In percent of its rows: with fewer failures the rest runs by itself.
    pub auto_release: Option<f32>,
    pub report: Option<Json>,
}

async fn canary(client: &impl GenericClient, id: i64) -> Result<Option<Canary>, Error> {
    const SQL: &str = "SELECT b.canary, b.auto_release, b.canary_report,
               CASE WHEN NOT b.canary_only THEN 'released' WHEN b.canary_report IS NULL THEN 'running' ELSE 'held' END
          FROM musterd.batches b WHERE b.id = $1 AND b.canary IS NOT NULL";
    let read = |row: tokio_postgres::Row| Canary {
        rows: row.get(0),
        auto_release: row.get(1),
        report: row.get(2),
        state: row.get(3),
    };
    Ok(client.query_opt(SQL, &[&id]).await?.map(read))
}

/// What a batch shows beside its progress.
pub async fn detail(client: &impl GenericClient, progress: Progress) -> Result<Detail, Error> {
    let redrives = match progress.generation {
        1 => Vec::new(),
        _ => redrives(client, progress.id).await?,
    };
    let canary = canary(client, progress.id).await?;
    Ok(Detail { progress, canary, redrives })
}

/// What became of the rows of every redrive.
pub async fn redrives(client: &impl GenericClient, id: i64) -> Result<Vec<Outcome>, Error> {
    const SQL: &str =
        "SELECT generation, redriven, fixed, same, otherwise, left_over FROM musterd.batch_redrives($1)";
    let read = |row: &tokio_postgres::Row| Outcome {
        generation: row.get(0),
        redriven: row.get(1),
        fixed: row.get(2),
        same: row.get(3),
        otherwise: row.get(4),
        left_over: row.get(5),
    };
    Ok(client.query(SQL, &[&id]).await?.iter().map(read).collect())
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
