//! What the database knows about why something is, or is not, moving. Facts only; [`crate::why`] puts them into words.

use super::moment;
use jiff::Timestamp;
use tokio_postgres::{Error, GenericClient};

/// What concerns a queue and a command, whatever waits in it.
#[derive(Clone, Debug)]
pub struct Lane {
    pub queue: String,
    pub paused: bool,
    pub mode: String,
    /// Workers alive at all.
    pub workers: i64,
    /// Of those, the ones that serve the queue.
    pub serving: i64,
    /// Of those, the ones that handle the command.
    pub capable: i64,
    /// The scope a structured queue is working on.
    pub focus: Option<i64>,
    /// Of those that serve the queue, the ones that cannot write outcomes, and why not.
    pub troubled: Vec<Troubled>,
}

/// A live worker that cannot write what it has done.
#[derive(Clone, Debug)]
pub struct Troubled {
    pub worker: String,
    pub trouble: String,
}

/// Seconds without a beat after which a worker is not counted here.
const SILENT_SECONDS: f64 = 120.0;

pub async fn lane(client: &impl GenericClient, queue: &str, command: Option<&str>) -> Result<Lane, Error> {
    const SQL: &str = "WITH w AS (
            SELECT w.queues, w.commands FROM musterd.workers w
             WHERE w.state IN ('alive', 'draining')
               AND w.seen_at > pg_catalog.now() - pg_catalog.make_interval(secs => $3))
        SELECT COALESCE((SELECT q.paused FROM musterd.queues q WHERE q.name = $1), false) AS paused,
               COALESCE((SELECT q.mode FROM musterd.queues q WHERE q.name = $1), 'parallel') AS mode,
               (SELECT pg_catalog.count(*) FROM w) AS workers,
               (SELECT pg_catalog.count(*) FROM w WHERE $1 = ANY (w.queues)) AS serving,
               (SELECT pg_catalog.count(*) FROM w
                 WHERE $1 = ANY (w.queues) AND ($2::text IS NULL OR $2 = ANY (w.commands))) AS capable,
               (SELECT musterd.focus($1, c.all, c.all)
                  FROM musterd.queues q
                 CROSS JOIN (SELECT COALESCE(pg_catalog.array_agg(DISTINCT c), '{}') AS all
                               FROM w, pg_catalog.unnest(w.commands) c WHERE $1 = ANY (w.queues)) c
                 WHERE q.name = $1 AND q.mode = 'structured') AS focus";
    const TROUBLED: &str = "SELECT w.id, w.trouble FROM musterd.workers w
         WHERE w.state IN ('alive', 'draining') AND $1 = ANY (w.queues) AND w.trouble IS NOT NULL
           AND w.seen_at > pg_catalog.now() - pg_catalog.make_interval(secs => $2) ORDER BY w.id";
    let row = client.query_one(SQL, &[&queue, &command, &SILENT_SECONDS]).await?;
    let troubled = client.query(TROUBLED, &[&queue, &SILENT_SECONDS]).await?;
    let troubled = troubled.iter().map(|row| Troubled { worker: row.get(0), trouble: row.get(1) }).collect();
    Ok(Lane {
        queue: queue.to_owned(),
        paused: row.get("paused"),
        mode: row.get("mode"),
        workers: row.get("workers"),
        serving: row.get("serving"),
        capable: row.get("capable"),
        focus: row.get("focus"),
        troubled,
    })
}

/// Work of a command that no live worker of its queue handles.
#[derive(Clone, Debug)]
pub struct Unhandled {
    pub command: String,
    pub tasks: i64,
    pub rows: i64,
}

/// What waits in a queue and is nobody's, the most first. Held work does not wait.
pub async fn unhandled(client: &impl GenericClient, queue: &str) -> Result<Vec<Unhandled>, Error> {
    const SQL: &str = "WITH waiting AS (
            SELECT t.command, 1::bigint AS tasks, 0::bigint AS rows FROM musterd.tasks t
             WHERE t.queue = $1 AND t.state = 'queued'
            UNION ALL
            SELECT b.command, 0, b.rows - b.next_line + 1 FROM musterd.batches b
             WHERE b.queue = $1 AND b.open AND b.next_line <= b.rows
            UNION ALL
            SELECT k.command, 0, COALESCE(pg_catalog.cardinality(k.lines), k.last_line - k.first_line + 1)
              FROM musterd.blocks k JOIN musterd.batches b ON b.id = k.batch_id AND b.open
             WHERE k.queue = $1 AND k.worker IS NULL)
        SELECT a.command, pg_catalog.sum(a.tasks)::bigint AS tasks, pg_catalog.sum(a.rows)::bigint AS rows
          FROM waiting a
         WHERE NOT EXISTS (
               SELECT FROM musterd.workers w
                WHERE w.state IN ('alive', 'draining') AND $1 = ANY (w.queues) AND a.command = ANY (w.commands)
                  AND w.seen_at > pg_catalog.now() - pg_catalog.make_interval(secs => $2))
         GROUP BY a.command
         ORDER BY pg_catalog.sum(a.tasks + a.rows) DESC, a.command";
    let found = client.query(SQL, &[&queue, &SILENT_SECONDS]).await?;
    let unhandled =
        |row: &tokio_postgres::Row| Unhandled { command: row.get(0), tasks: row.get(1), rows: row.get(2) };
    Ok(found.iter().map(unhandled).collect())
}

/// What concerns one batch.
#[derive(Clone, Debug)]
pub struct BatchFacts {
    pub state: String,
    pub queue: String,
    pub command: String,
    pub priority: i32,
    pub parent: Option<i64>,
    pub open: bool,
    pub aborting: bool,
    pub rows: i32,
    pub carved: i32,
    pub done: i64,
    pub failed: i64,
    pub allowed: i64,
    pub on_budget: Option<String>,
    pub blocks_owned: i64,
    pub blocks_due: i64,
    pub next_due: Option<Timestamp>,
    /// Rows that wait for another try, the try they wait for, and what one of them failed with.
    pub retrying: i64,
    pub next_attempt: Option<i32>,
    pub last_error: Option<String>,
    /// Rows of the last minute.
    pub recent: i64,
    pub last_tally: Option<Timestamp>,
    pub error: Option<String>,
    /// Open batches of the same queue with a better priority.
    pub ahead: i64,
}

pub async fn batch(client: &impl GenericClient, id: i64) -> Result<Option<BatchFacts>, Error> {
    const SQL: &str = "SELECT p.state::text AS state, b.queue, b.command, b.priority, t.parent_id, b.open, b.aborting, b.rows,
               b.next_line - 1 AS carved, (p.succeeded + p.failed + p.aborted)::bigint AS done, p.failed::bigint AS failed,
               COALESCE(pg_catalog.floor(b.rows * b.max_failed_percent::numeric / 100)::bigint, b.max_failed) AS allowed,
               b.on_budget, t.error,
               (SELECT pg_catalog.count(*) FROM musterd.blocks k WHERE k.batch_id = b.id AND k.worker IS NOT NULL)
                   AS blocks_owned,
               (SELECT pg_catalog.count(*) FROM musterd.blocks k
                 WHERE k.batch_id = b.id AND k.worker IS NULL AND k.available_at <= pg_catalog.now()) AS blocks_due,
               (SELECT NULLIF(pg_catalog.min(k.available_at), 'infinity') FROM musterd.blocks k
                 WHERE k.batch_id = b.id AND k.worker IS NULL AND k.available_at > pg_catalog.now()) AS next_due,
               r.retrying, r.next_attempt, r.last_error,
               (SELECT COALESCE(pg_catalog.sum(GREATEST(y.succeeded + y.failed, 0)), 0)::bigint FROM musterd.tallies y
                 WHERE y.batch_id = b.id AND y.at > pg_catalog.now() - interval '1 minute') AS recent,
               (SELECT pg_catalog.max(y.at) FROM musterd.tallies y WHERE y.batch_id = b.id) AS last_tally,
               (SELECT pg_catalog.count(*) FROM musterd.batches o
                 WHERE o.queue = b.queue AND o.open AND o.next_line <= o.rows AND o.priority < b.priority) AS ahead
          FROM musterd.batches b
          JOIN musterd.tasks t ON t.id = b.id
          JOIN musterd.batch_progress p ON p.id = b.id
         CROSS JOIN LATERAL (
               SELECT COALESCE(pg_catalog.sum(COALESCE(pg_catalog.cardinality(k.lines), k.last_line - k.first_line + 1)), 0)::bigint
                          AS retrying,
                      pg_catalog.max(k.attempt) AS next_attempt,
                      (pg_catalog.array_agg(k.error ORDER BY k.id DESC) FILTER (WHERE k.error IS NOT NULL))[1] AS last_error
                 FROM musterd.blocks k WHERE k.batch_id = b.id AND k.worker IS NULL AND k.attempt > 1) r
         WHERE b.id = $1";
    let Some(row) = client.query_opt(SQL, &[&id]).await? else { return Ok(None) };
    let mut facts = BatchFacts {
        state: row.get("state"),
        queue: row.get("queue"),
        command: row.get("command"),
        priority: row.get("priority"),
        parent: row.get("parent_id"),
        open: row.get("open"),
        aborting: row.get("aborting"),
        rows: row.get("rows"),
        carved: row.get("carved"),
        done: row.get("done"),
        failed: row.get("failed"),
        allowed: row.get("allowed"),
        on_budget: row.get("on_budget"),
        blocks_owned: row.get("blocks_owned"),
        blocks_due: row.get("blocks_due"),
        next_due: moment::maybe(&row, "next_due"),
        retrying: row.get("retrying"),
        next_attempt: row.get("next_attempt"),
        last_error: row.get("last_error"),
        recent: row.get("recent"),
        last_tally: moment::maybe(&row, "last_tally"),
        error: row.get("error"),
        ahead: row.get("ahead"),
    };
    if facts.failed > 0 && facts.error.is_none() {
        facts.error = sample_error(client, id).await?;
    }
    Ok(Some(facts))
}

/// The error of one failed row among the latest lines; looking through millions for it is not worth the wait.
async fn sample_error(client: &impl GenericClient, id: i64) -> Result<Option<String>, Error> {
    const SQL: &str = "SELECT r.error
          FROM (SELECT r.state, r.error FROM musterd.results r WHERE r.batch_id = $1 ORDER BY r.line DESC LIMIT 10000) r
         WHERE r.state = 'failed' LIMIT 1";
    Ok(client.query_opt(SQL, &[&id]).await?.and_then(|row| row.get(0)))
}

/// The oldest transaction that keeps dead rows from being cleaned up.
#[derive(Clone, Debug)]
pub struct Horizon {
    pub pid: i32,
    pub seconds: f64,
    pub application: String,
    pub state: String,
    /// The statement that runs, or that ran last.
    pub query: String,
}

/// The oldest of this database's transactions that are older than `old` seconds and hold the horizon.
pub async fn horizon(client: &impl GenericClient, old: f64) -> Result<Option<Horizon>, Error> {
    const SQL: &str = "SELECT a.pid, EXTRACT(EPOCH FROM pg_catalog.now() - a.xact_start)::float8 AS seconds,
               COALESCE(a.application_name, '') AS application, COALESCE(a.state, '') AS state,
               COALESCE(a.query, '') AS query
          FROM pg_catalog.pg_stat_activity a
         WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
           AND (a.datname = pg_catalog.current_database() OR a.backend_type = 'walsender')
           AND a.xact_start <= pg_catalog.now() - pg_catalog.make_interval(secs => $1)
         ORDER BY pg_catalog.age(a.backend_xmin) DESC, a.xact_start LIMIT 1";
    let row = client.query_opt(SQL, &[&old]).await?;
    Ok(row.map(|row| Horizon {
        pid: row.get("pid"),
        seconds: row.get("seconds"),
        application: row.get("application"),
        state: row.get("state"),
        query: row.get("query"),
    }))
}

/// Children of a task that have not ended, the first few by name.
pub async fn open_children(
    client: &impl GenericClient,
    id: i64,
) -> Result<Vec<(i64, String, String)>, Error> {
    const SQL: &str = "SELECT c.id, c.command, c.state::text FROM musterd.tasks c
         WHERE c.parent_id = $1 AND c.state NOT IN ('succeeded', 'failed', 'aborted') ORDER BY c.id LIMIT 5";
    let rows = client.query(SQL, &[&id]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect())
}

/// Tasks of a queue that are due and have a better priority or came earlier.
pub async fn tasks_ahead(client: &impl GenericClient, id: i64) -> Result<i64, Error> {
    const SQL: &str = "SELECT pg_catalog.count(*) FROM musterd.tasks me JOIN musterd.tasks o
            ON o.queue = me.queue AND o.state = 'queued' AND (o.priority, o.id) < (me.priority, me.id)
         WHERE me.id = $1";
    Ok(client.query_one(SQL, &[&id]).await?.get(0))
}
