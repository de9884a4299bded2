//! Tasks as people see them.

use crate::state::State;
use crate::{
    json::Json,
    store::{
        moment,
        page::{self, Page},
    },
};
use serde::Serialize;
use std::collections::BTreeMap;
use tokio_postgres::{Error, GenericClient, Row, types::ToSql};

/// A task as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    pub id: i64,
    pub state: State,
    pub parent_id: Option<i64>,
    pub queue: String,
    pub command: String,
    pub priority: i32,
    pub attempt: i32,
    pub max_attempts: Option<i32>,
    pub crashes: i32,
    pub run_at: Option<jiff::Timestamp>,
    pub created_at: jiff::Timestamp,
    pub finished_at: Option<jiff::Timestamp>,
    pub worker: Option<String>,
    pub dedup_key: Option<String>,
    pub idempotency_key: Option<String>,
    pub children: i64,
    pub open_children: i64,
    /// States that no child is in are left out.
    pub children_by_state: BTreeMap<String, i64>,
    /// Ids this task waits for.
    pub after: Vec<i64>,
    pub payload: Json,
    pub result: Option<Json>,
    pub error: Option<String>,
    /// When retention emptied payload, result and error.
    pub data_gone_at: Option<jiff::Timestamp>,
}

impl Shown {
    fn read(row: &Row) -> Self {
        let states: Vec<String> = row.get("child_states");
        let children_by_state: BTreeMap<_, i64> =
            states.into_iter().zip(row.get::<_, Vec<i64>>("child_counts")).collect();
        let is_open = |state: &str| !state.parse::<State>().is_ok_and(State::is_final);
        Self {
            id: row.get("id"),
            state: row.get("state"),
            parent_id: row.get("parent_id"),
            queue: row.get("queue"),
            command: row.get("command"),
            priority: row.get("priority"),
            attempt: row.get("attempt"),
            max_attempts: row.get("max_attempts"),
            crashes: row.get("crashes"),
            run_at: moment::maybe(row, "run_at"),
            created_at: moment::of(row, "created_at"),
            finished_at: moment::maybe(row, "finished_at"),
            worker: row.get("worker"),
            dedup_key: row.get("dedup_key"),
            idempotency_key: row.get("idempotency_key"),
            children: children_by_state.values().sum(),
            open_children: children_by_state.iter().filter(|(state, _)| is_open(state)).map(|(_, n)| n).sum(),
            children_by_state,
            after: row.get("after"),
            payload: row.get("payload"),
            result: row.get("result"),
            error: row.get("error"),
            data_gone_at: moment::maybe(row, "data_gone_at"),
        }
    }

    pub fn is_over(&self) -> bool {
        self.state.is_final()
    }

    /// Roughly what it takes in memory.
    fn weight(&self) -> usize {
        let error = self.error.as_ref().map_or(0, String::len);
        self.payload.len() + self.result.as_ref().map_or(0, Json::len) + error
    }
}

const SHOWN: &str = "SELECT t.id, t.state::text AS state, t.parent_id, t.queue, t.command, t.priority, t.attempt, t.max_attempts,
           t.crashes, NULLIF(t.run_at, 'infinity') AS run_at, t.created_at, t.finished_at, t.worker, t.dedup_key,
           t.idempotency_key, t.payload, t.result, t.error, t.data_gone_at,
           c.states AS child_states, c.counts AS child_counts,
           ARRAY (SELECT w.after_id FROM musterd.task_waits w WHERE w.task_id = t.id ORDER BY w.after_id) AS after
      FROM musterd.tasks t
     CROSS JOIN LATERAL (
           SELECT ARRAY (SELECT e.key FROM pg_catalog.jsonb_each_text(j.children) e) AS states,
                  ARRAY (SELECT e.value::bigint FROM pg_catalog.jsonb_each_text(j.children) e) AS counts
             FROM (SELECT musterd.children_by_state(t.id) AS children OFFSET 0) j) c";

pub async fn show(client: &impl GenericClient, id: i64) -> Result<Option<Shown>, Error> {
    let row = client.query_opt(&format!("{SHOWN} WHERE t.id = $1"), &[&id]).await?;
    Ok(row.map(|row| Shown::read(&row)))
}

/// Which tasks a list shows.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub state: Option<String>,
    pub command: Option<String>,
    pub queue: Option<String>,
    pub parent: Option<i64>,
    /// Only ids below this one: the next page.
    pub before: Option<i64>,
    pub limit: i64,
}

/// Newest first; a page costs the same wherever it is. At most `most_bytes` of payloads, but one task at least.
pub async fn list(
    client: &impl GenericClient,
    filter: &Filter,
    most_bytes: usize,
) -> Result<Page<Shown>, Error> {
    let sql = format!(
        "{SHOWN} WHERE ($1::text IS NULL OR t.state = $1::musterd.state) AND ($2::text IS NULL OR t.command = $2)
           AND ($3::text IS NULL OR t.queue = $3) AND ($4::bigint IS NULL OR t.parent_id = $4)
           AND ($5::bigint IS NULL OR t.id < $5)
           AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)
         ORDER BY t.id DESC LIMIT $6"
    );
    let parameters: [&(dyn ToSql + Sync); 6] =
        [&filter.state, &filter.command, &filter.queue, &filter.parent, &filter.before, &filter.limit];
    let found = client.query_raw(&sql, parameters).await?;
    page::gather(found, most_bytes, Shown::read, Shown::weight).await
}
