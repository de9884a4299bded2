//! Queues: what is in them, and whether they are paused.

use super::events;
use serde::Serialize;
use tokio_postgres::{Error, GenericClient};

/// A queue as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    pub name: String,
    pub paused: bool,
    pub mode: String,
    pub fibers: Option<i32>,
    pub block_size: Option<i32>,
    pub tasks_queued: i64,
    pub tasks_scheduled: i64,
    pub tasks_running: i64,
    pub batches_open: i64,
    /// Rows that wait to be run, or to be tried again; those of held batches do not wait.
    pub rows_queued: i64,
    pub rows_held: i64,
    /// Workers alive that serve it.
    pub workers: i64,
}

/// Every queue that is declared or has work.
pub async fn list(client: &impl GenericClient) -> Result<Vec<Shown>, Error> {
    // By the partial indexes of what waits, runs or is scheduled: tasks that have ended are never read.
    const SQL: &str = "WITH names AS (
            SELECT q.name FROM musterd.queues q
            UNION SELECT t.queue FROM musterd.task_records t WHERE musterd.is_open(t.state)
            UNION SELECT t.queue FROM musterd.task_records t WHERE t.state = 'waiting'
            UNION SELECT b.queue FROM musterd.batches b WHERE b.summarized_at IS NULL)
        SELECT n.name, EXISTS (SELECT FROM musterd.paused_queues p WHERE p.name = n.name) AS paused,
               COALESCE(q.mode, 'parallel') AS mode, q.fibers, q.block_size,
               o.due - h.held AS tasks_queued, o.later AS tasks_scheduled, h.held AS tasks_running,
               (SELECT pg_catalog.count(*) FROM musterd.batches b WHERE b.queue = n.name AND b.summarized_at IS NULL)
                   AS batches_open,
               w.rows_queued, w.rows_held,
               (SELECT pg_catalog.count(*) FROM musterd.workers w
                 WHERE musterd.is_alive(w.state) AND n.name = ANY (w.queues)) AS workers
          FROM names n LEFT JOIN musterd.queues q ON q.name = n.name
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(*) FILTER (WHERE t.run_at <= pg_catalog.now()) AS due,
                      pg_catalog.count(*) FILTER (WHERE t.run_at > pg_catalog.now()) AS later
                 FROM musterd.task_records t WHERE t.queue = n.name AND musterd.is_open(t.state)) o
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(t.id) AS held
                 FROM musterd.task_claims c
                CROSS JOIN LATERAL musterd.task_ids(c.tasks) i (id)
                 JOIN musterd.task_records t ON t.id = i.id AND t.state = 'queued' AND t.ticket = c.number
                WHERE c.queue = n.name) h
         CROSS JOIN LATERAL (
               SELECT COALESCE(pg_catalog.sum(r.rows) FILTER (WHERE r.open), 0)::bigint AS rows_queued,
                      COALESCE(pg_catalog.sum(r.rows) FILTER (WHERE NOT r.open), 0)::bigint AS rows_held
                 FROM (SELECT b.open, b.rows - b.next_line + 1 AS rows FROM musterd.batches b
                        WHERE b.queue = n.name AND b.summarized_at IS NULL AND NOT b.aborting AND b.next_line <= b.rows
                       UNION ALL
                       SELECT b.open, k.rows
                         FROM musterd.blocks k JOIN musterd.batches b ON b.id = k.batch_id AND NOT b.aborting
                        WHERE k.queue = n.name AND k.worker IS NULL) r) w
         ORDER BY n.name";
    let shown = |row: &tokio_postgres::Row| Shown {
        name: row.get("name"),
        paused: row.get("paused"),
        mode: row.get("mode"),
        fibers: row.get("fibers"),
        block_size: row.get("block_size"),
        tasks_queued: row.get("tasks_queued"),
        tasks_scheduled: row.get("tasks_scheduled"),
        tasks_running: row.get("tasks_running"),
        batches_open: row.get("batches_open"),
        rows_queued: row.get("rows_queued"),
        rows_held: row.get("rows_held"),
        workers: row.get("workers"),
    };
    Ok(client.query(SQL, &[]).await?.iter().map(shown).collect())
}

/// Whether a worker, a command or open work has ever named this queue: pausing another one may be a slip.
pub async fn is_known(client: &impl GenericClient, name: &str) -> Result<bool, Error> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.queues q WHERE q.name = $1)
            OR EXISTS (SELECT FROM musterd.commands c WHERE c.queue = $1)
            OR EXISTS (SELECT FROM musterd.task_records t WHERE t.queue = $1 AND musterd.is_open(t.state))
            OR EXISTS (SELECT FROM musterd.batches b WHERE b.queue = $1 AND b.summarized_at IS NULL)";
    Ok(client.query_one(SQL, &[&name]).await?.get(0))
}

/// Nothing new starts in this queue until it is resumed, on any replica, whatever restarts meanwhile. `by`: the name of the
/// client that asks for it, for the event.
pub async fn pause(client: &impl GenericClient, name: &str, by: Option<&str>) -> Result<(), Error> {
    let sql = format!("SELECT musterd.pause_queue($1) WHERE {}", events::client_is(2));
    client.query(&sql, &[&name, &by]).await.map(|_| ())
}

pub async fn resume(client: &impl GenericClient, name: &str, by: Option<&str>) -> Result<(), Error> {
    let sql = format!("SELECT musterd.resume_queue($1) WHERE {}", events::client_is(2));
    client.query(&sql, &[&name, &by]).await.map(|_| ())
}
