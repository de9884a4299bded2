//! What the database knows about why something is, or is not, moving. Facts only; [`crate::why`] puts them into words.

mod batch;

pub use batch::{Audit, BatchFacts, audit, batch, is_uploading};

use tokio_postgres::{Error, GenericClient, Row};

/// A worker that may hold work and has beaten in the last minutes.
macro_rules! beating {
    () => {
        "musterd.is_alive(w.state) AND w.seen_at > pg_catalog.now() - interval '120 seconds'"
    };
}
pub(super) use beating;

/// What concerns a queue and a command, whatever waits in it.
#[derive(Clone, Debug)]
pub struct Lane {
    pub queue: String,
    pub paused: bool,
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

pub async fn lane(client: &impl GenericClient, queue: &str, command: Option<&str>) -> Result<Lane, Error> {
    const SQL: &str = concat!(
        "WITH w AS (SELECT w.queues, w.commands FROM musterd.workers w WHERE ",
        beating!(),
        ")
        SELECT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = $1) AS paused,
               (SELECT pg_catalog.count(*) FROM w) AS workers,
               (SELECT pg_catalog.count(*) FROM w WHERE $1 = ANY (w.queues)) AS serving,
               (SELECT pg_catalog.count(*) FROM w
                 WHERE $1 = ANY (w.queues) AND ($2::text IS NULL OR $2 = ANY (w.commands))) AS capable,
               (SELECT musterd.focus($1, c.all, c.all)
                  FROM musterd.queues q
                 CROSS JOIN (SELECT COALESCE(pg_catalog.array_agg(DISTINCT c), '{}') AS all
                               FROM w, pg_catalog.unnest(w.commands) c WHERE $1 = ANY (w.queues)) c
                 WHERE q.name = $1 AND q.mode = 'structured') AS focus"
    );
    const TROUBLED: &str = concat!(
        "SELECT w.id, w.trouble FROM musterd.workers w WHERE $1 = ANY (w.queues) AND w.trouble IS NOT NULL AND ",
        beating!(),
        " ORDER BY w.id"
    );
    let row = client.query_one(SQL, &[&queue, &command]).await?;
    let troubled = client.query(TROUBLED, &[&queue]).await?;
    let troubled = troubled.iter().map(|row| Troubled { worker: row.get(0), trouble: row.get(1) }).collect();
    Ok(Lane {
        queue: queue.to_owned(),
        paused: row.get("paused"),
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

/// What waits in a queue and no live worker handles, the most first. Held work does not wait.
pub async fn unhandled(client: &impl GenericClient, queue: &str) -> Result<Vec<Unhandled>, Error> {
    const SQL: &str = concat!(
        "WITH waiting AS (
            SELECT t.command, 1::bigint AS tasks, 0::bigint AS rows FROM musterd.task_records t
             WHERE t.queue = $1 AND musterd.is_open(t.state) AND t.run_at <= pg_catalog.now()
               AND NOT EXISTS (SELECT FROM musterd.task_claims c WHERE c.tasks @> t.id AND c.number = t.ticket)
            UNION ALL
            SELECT b.command, 0, b.rows - b.next_line + 1 FROM musterd.batches b
             WHERE b.queue = $1 AND b.open AND b.next_line <= b.rows AND NOT b.canary_only
            UNION ALL
            SELECT k.command, 0, k.rows
              FROM musterd.blocks k JOIN musterd.batches b ON b.id = k.batch_id AND b.open
             WHERE k.queue = $1 AND k.worker IS NULL)
        SELECT a.command, pg_catalog.sum(a.tasks)::bigint AS tasks, pg_catalog.sum(a.rows)::bigint AS rows
          FROM waiting a
         WHERE NOT EXISTS (SELECT FROM musterd.workers w
                            WHERE $1 = ANY (w.queues) AND a.command = ANY (w.commands) AND ",
        beating!(),
        ")
         GROUP BY a.command
         ORDER BY pg_catalog.sum(a.tasks + a.rows) DESC, a.command"
    );
    let found = client.query(SQL, &[&queue]).await?;
    let unhandled = |row: &Row| Unhandled { command: row.get(0), tasks: row.get(1), rows: row.get(2) };
    Ok(found.iter().map(unhandled).collect())
}

/// How many blocks and tasks of a queue workers hold, beside those of one batch.
pub async fn busy(client: &impl GenericClient, queue: &str, beside: Option<i64>) -> Result<i64, Error> {
    const SQL: &str = "SELECT (SELECT pg_catalog.count(*) FROM musterd.blocks k
                WHERE k.worker IS NOT NULL AND k.queue = $1 AND k.batch_id IS DISTINCT FROM $2::bigint)
            + (SELECT COALESCE(pg_catalog.sum(c.open), 0) FROM musterd.task_claims c WHERE c.queue = $1)::bigint";
    Ok(client.query_one(SQL, &[&queue, &beside]).await?.get(0))
}

/// Whether a queued task has what lets workers claim it.
pub async fn has_ticket(client: &impl GenericClient, id: i64) -> Result<bool, Error> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.task_records t WHERE t.id = $1
           AND (EXISTS (SELECT FROM musterd.task_tickets k WHERE k.tasks @> t.id AND k.number = t.ticket)
                OR EXISTS (SELECT FROM musterd.task_claims c WHERE c.tasks @> t.id AND c.number = t.ticket)))";
    Ok(client.query_one(SQL, &[&id]).await?.get(0))
}

/// Seconds since a worker was heard of last, if it may not be alive; `None` when it beats.
pub async fn silent_for(client: &impl GenericClient, worker: &str) -> Result<Option<f64>, Error> {
    const SQL: &str = concat!(
        "SELECT ",
        beating!(),
        ", EXTRACT(EPOCH FROM pg_catalog.now() - w.seen_at)::float8 FROM musterd.workers w WHERE w.id = $1"
    );
    let row = client.query_opt(SQL, &[&worker]).await?;
    Ok(match row.map(|row| (row.get(0), row.get(1))) {
        Some((true, _)) => None,
        Some((false, seconds)) => Some(seconds),
        // A worker that the list does not know counts as dead.
        None => Some(f64::INFINITY),
    })
}

/// The first batches of a queue that have nothing left to run and have not ended, and that are not new.
pub async fn unended(client: &impl GenericClient, queue: &str) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT b.id FROM musterd.batches_over b JOIN musterd.task_records t ON t.id = b.id
         WHERE b.queue = $1 AND t.run_at < pg_catalog.now() - interval '30 seconds'
         ORDER BY b.id LIMIT 100";
    Ok(client.query(SQL, &[&queue]).await?.iter().map(|row| row.get(0)).collect())
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
         WHERE c.parent_id = $1 AND musterd.is_unfinished(c.state) ORDER BY c.id LIMIT 5";
    let rows = client.query(SQL, &[&id]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect())
}

/// Tasks of a queue that are due and have a better priority or came earlier.
pub async fn tasks_ahead(client: &impl GenericClient, id: i64) -> Result<i64, Error> {
    const SQL: &str = "SELECT pg_catalog.count(*) FROM musterd.task_records me JOIN musterd.task_records o
            ON o.queue = me.queue AND musterd.is_open(o.state) AND o.run_at <= pg_catalog.now()
               AND (o.priority, o.id) < (me.priority, me.id)
         WHERE me.id = $1
           AND NOT EXISTS (SELECT FROM musterd.task_claims c WHERE c.tasks @> o.id AND c.number = o.ticket)";
    Ok(client.query_one(SQL, &[&id]).await?.get(0))
}
