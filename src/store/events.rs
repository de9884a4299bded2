//! What was done, by whom: written by the functions of the SQL API, in the transaction of the change. Read here.

use super::{batches::Unbalanced, moment};
use crate::json::Json;
use serde::Serialize;
use tokio_postgres::{Error, GenericClient, Row};

/// The kinds of events there are.
pub const KINDS: [&str; 19] = [
    "hold",
    "release",
    "abort",
    "redrive",
    "retry",
    "pause",
    "resume",
    "budget_hold",
    "budget_abort",
    "canary_hold",
    "canary_release",
    "worker_dead",
    "lines_reopened",
    "tickets_reissued",
    "unbalanced",
    "hold_data",
    "release_data",
    "abandoned",
    "prune",
];

/// An event as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    pub id: i64,
    pub at: jiff::Timestamp,
    pub kind: String,
    /// The login of the session.
    pub actor: String,
    /// The name of the API token.
    pub client: Option<String>,
    pub worker: Option<String>,
    pub batch: Option<i64>,
    pub task: Option<i64>,
    pub detail: Option<Json>,
}

/// Which events a list shows.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub batch: Option<i64>,
    pub task: Option<i64>,
    pub kind: Option<String>,
    /// Only ids below this one: the next page.
    pub before: Option<i64>,
    pub limit: i64,
}

/// The newest first.
pub async fn list(client: &impl GenericClient, filter: &Filter) -> Result<Vec<Event>, Error> {
    const SQL: &str = "SELECT e.id, e.at, e.kind, e.actor, e.client, e.worker, e.batch, e.task, e.detail FROM musterd.events e
         WHERE ($1::bigint IS NULL OR e.batch = $1) AND ($2::bigint IS NULL OR e.task = $2)
           AND ($3::text IS NULL OR e.kind = $3) AND ($4::bigint IS NULL OR e.id < $4)
         ORDER BY e.id DESC LIMIT $5";
    let Filter { batch, task, kind, before, limit } = filter;
    let rows = client.query(SQL, &[batch, task, kind, before, limit]).await?;
    Ok(rows.iter().map(Event::read).collect())
}

impl Event {
    fn read(row: &Row) -> Self {
        Self {
            id: row.get("id"),
            at: moment::of(row, "at"),
            kind: row.get("kind"),
            actor: row.get("actor"),
            client: row.get("client"),
            worker: row.get("worker"),
            batch: row.get("batch"),
            task: row.get("task"),
            detail: row.get("detail"),
        }
    }
}

/// A condition that is always true and names, for the events of its statement alone, the client that asks for the change:
/// parameter `number`, a text or null.
pub(super) fn client_is(number: u32) -> String {
    format!("pg_catalog.set_config('musterd.client', COALESCE(${number}::text, ''), true) IS NOT NULL")
}

/// The lines of a batch that seemed to be over do not add up: an event, unless the last one says the same.
pub async fn record_unbalanced(client: &impl GenericClient, found: &Unbalanced) -> Result<(), Error> {
    let missing = i32::try_from(found.missing.len()).unwrap_or(i32::MAX);
    let sql = "SELECT musterd.record_unbalanced($1, $2, $3, $4)";
    client.query(sql, &[&found.id, &missing, &found.doubled, &found.outside]).await.map(|_| ())
}
