//! The list of workers: which there are, what their configurations declare, and which of them still beat.

use super::{
    moment,
    trip::{self, COMMIT},
};
use crate::{queue, state::WorkerState, worker_id::WorkerId};
use deadpool_postgres::Object;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use tokio_postgres::{
    Client, Error,
    types::{ToSql, Type},
};

/// Makes a worker known, with its queues and commands.
pub async fn register(
    client: &Client,
    worker: &WorkerId,
    enlisted: &Enlisted,
    declared: &Declared,
) -> Result<(), Error> {
    enlist(client, worker, enlisted).await?;
    declared.declare(client).await
}

/// What the configuration of a worker declares of commands and queues.
#[derive(Clone, Debug)]
pub struct Declared {
    commands: Vec<DeclaredCommand>,
    queues: Vec<DeclaredQueue>,
}

#[derive(Clone, Debug)]
pub struct DeclaredCommand {
    pub name: String,
    pub queue: String,
    pub kind: &'static str,
    pub procedure: Option<String>,
}

#[derive(Clone, Debug)]
struct DeclaredQueue {
    name: String,
    mode: &'static str,
    fibers: i32,
    block_size: i32,
}

impl Declared {
    pub fn new(commands: Vec<DeclaredCommand>, queues: &BTreeMap<String, queue::Config>) -> Self {
        let queue = |(name, queue): (&String, &queue::Config)| DeclaredQueue {
            name: name.clone(),
            mode: match queue.mode {
                queue::Mode::Parallel => "parallel",
                queue::Mode::Structured => "structured",
            },
            fibers: queue.fibers.get() as i32,
            block_size: queue.block_size.get() as i32,
        };
        Self { commands, queues: queues.iter().map(queue).collect() }
    }

    async fn declare(&self, client: &Client) -> Result<(), Error> {
        const COMMAND: &str = "SELECT musterd.register_command($1, $2, $3, $4)";
        const QUEUE: &str =
            "INSERT INTO musterd.queues (name, mode, fibers, block_size) VALUES ($1, $2, $3, $4)
             ON CONFLICT (name) DO UPDATE
                SET mode = EXCLUDED.mode, fibers = EXCLUDED.fibers, block_size = EXCLUDED.block_size,
                    updated_at = pg_catalog.now()";
        for DeclaredCommand { name, queue, kind, procedure } in &self.commands {
            client.query(COMMAND, &[name, queue, kind, procedure]).await?;
        }
        for DeclaredQueue { name, mode, fibers, block_size } in &self.queues {
            client.execute(QUEUE, &[name, mode, fibers, block_size]).await?;
        }
        Ok(())
    }

    /// Writes what is not there any more, because it was deleted by hand; how much that was. What other workers have declared in another
    /// way stays.
    pub async fn declare_missing(&self, client: &Object) -> Result<u64, Error> {
        const COMMAND: &str = "INSERT INTO musterd.commands (name, queue, kind, procedure) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        const QUEUE: &str = "INSERT INTO musterd.queues (name, mode, fibers, block_size) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        const KNOWN: &str = "SELECT 'command', c.name FROM musterd.commands c UNION ALL SELECT 'queue', q.name FROM musterd.queues q";
        let known = client.query(KNOWN, &[]).await?;
        let known: HashSet<(&str, &str)> = known.iter().map(|row| (row.get(0), row.get(1))).collect();
        let mut declared = 0;
        for DeclaredCommand { name, queue, kind, procedure } in &self.commands {
            if !known.contains(&("command", name)) {
                declared += client.execute(COMMAND, &[name, queue, kind, procedure]).await?;
            }
        }
        for DeclaredQueue { name, mode, fibers, block_size } in &self.queues {
            if !known.contains(&("queue", name)) {
                declared += client.execute(QUEUE, &[name, mode, fibers, block_size]).await?;
            }
        }
        Ok(declared)
    }
}

/// What the list says of a worker beside its name.
#[derive(Clone, Debug)]
pub struct Enlisted {
    pub queues: Vec<String>,
    pub commands: Vec<String>,
}

/// Writes a worker into the list. Before its first claim: an owner that is not in the list counts as dead.
pub async fn enlist(client: &Client, worker: &WorkerId, enlisted: &Enlisted) -> Result<(), Error> {
    const SQL: &str = "INSERT INTO musterd.workers (id, host, pid, version, queues, commands)
                       VALUES ($1, $2, $3, $4, $5, $6)";
    let pid = i32::try_from(std::process::id()).unwrap_or_default();
    let host = crate::worker_id::host();
    client
        .query_typed(
            SQL,
            &[
                (&worker.as_str(), Type::TEXT),
                (&host, Type::TEXT),
                (&pid, Type::INT4),
                (&env!("CARGO_PKG_VERSION"), Type::TEXT),
                (&enlisted.queues, Type::TEXT_ARRAY),
                (&enlisted.commands, Type::TEXT_ARRAY),
            ],
        )
        .await
        .map(|_| ())
}

/// What became of a beat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Beat {
    /// Written; so many seconds after the one before, by the server's clock.
    Taken { gap: f64 },
    /// The list says that this worker is dead, or does not know it: the name is lost.
    Refused,
}

/// Renews `seen_at` of a worker that is not dead. Sent in one go: a worker that is stopped after that leaves no open transaction,
/// whose lock on its row would keep the others from declaring it dead.
pub async fn beat_if_living(
    client: &Client,
    worker: &WorkerId,
    state: WorkerState,
    trouble: Option<&str>,
) -> Result<Beat, Error> {
    const SQL: &str = "UPDATE musterd.workers w
           SET seen_at = pg_catalog.clock_timestamp(), state = $2, trouble = $3
          FROM (SELECT o.id, o.seen_at FROM musterd.workers o WHERE o.id = $1) o
         WHERE w.id = o.id AND musterd.is_alive(w.state)
        RETURNING EXTRACT(EPOCH FROM w.seen_at - o.seen_at)::float8";
    let (id, state) = (worker.as_str(), state.as_str());
    let said = [(&id as &(dyn ToSql + Sync), Type::TEXT), (&state, Type::TEXT), (&trouble, Type::TEXT)];
    // Said, not assumed: a role may have another isolation by default. Typed: a pooler loses named statements.
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
    let rows = trip::run(client, BEGIN, client.query_typed(SQL, &said), client.batch_execute(COMMIT)).await?;
    Ok(rows.first().map_or(Beat::Refused, |row| Beat::Taken { gap: row.get(0) }))
}

/// Takes a session lock with a key that no session has had. The list learns of it afterwards, when a lock can be missed.
pub async fn take_session_lock(client: &Client, key: i64) -> Result<(), Error> {
    client.query_typed("SELECT pg_catalog.pg_advisory_lock($1)", &[(&key, Type::INT8)]).await.map(|_| ())
}

/// Says by which lock this worker's life can be seen.
pub async fn publish_session_lock(client: &Client, worker: &WorkerId, key: i64) -> Result<(), Error> {
    const SQL: &str =
        "UPDATE musterd.workers w SET lock_key = $2 WHERE w.id = $1 AND musterd.is_alive(w.state)";
    client.query_typed(SQL, &[(&worker.as_str(), Type::TEXT), (&key, Type::INT8)]).await.map(|_| ())
}

/// The worker has ended in good order. Answers what it still owned: blocks and tasks that others will free.
pub async fn deregister(client: &Client, worker: &WorkerId) -> Result<i64, Error> {
    const END: &str = "UPDATE musterd.workers w
           SET state = 'stopped', trouble = NULL, seen_at = pg_catalog.now(), ended_at = pg_catalog.now()
         WHERE w.id = $1 AND musterd.is_alive(w.state)";
    const OWNED: &str = "SELECT (SELECT pg_catalog.count(*) FROM musterd.blocks b WHERE b.worker = $1)
              + (SELECT pg_catalog.count(t.id) FROM musterd.task_claims c
                        CROSS JOIN LATERAL musterd.task_ids(c.tasks) i (id)
                         JOIN musterd.task_records t ON t.id = i.id AND t.state = 'queued' AND t.ticket = c.number
                        WHERE c.worker = $1)";
    let id = worker.as_str();
    client.execute(END, &[&id]).await?;
    Ok(client.query_one(OWNED, &[&id]).await?.get(0))
}

/// One worker, for people.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    pub id: String,
    pub state: WorkerState,
    pub host: String,
    pub pid: i32,
    pub version: String,
    pub queues: Vec<String>,
    pub commands: Vec<String>,
    pub blocks: i64,
    pub rows: i64,
    pub tasks: i64,
    /// Why it cannot write outcomes.
    pub trouble: Option<String>,
    /// Seconds since its last beat, by the server's clock.
    pub last_beat_seconds: f64,
    pub started_at: jiff::Timestamp,
    pub seen_at: jiff::Timestamp,
    pub ended_at: Option<jiff::Timestamp>,
}

/// All workers the list knows, or the one with this id; the living first.
pub async fn list(client: &Client, id: Option<&str>) -> Result<Vec<Listed>, Error> {
    const SQL: &str = "SELECT w.id, w.state, w.host, w.pid, w.version, w.queues, w.commands, h.blocks, h.rows,
               (SELECT pg_catalog.count(t.id) FROM musterd.task_claims c
                        CROSS JOIN LATERAL musterd.task_ids(c.tasks) i (id)
                         JOIN musterd.task_records t ON t.id = i.id AND t.state = 'queued' AND t.ticket = c.number
                        WHERE c.worker = w.id) AS tasks,
               EXTRACT(EPOCH FROM pg_catalog.now() - w.seen_at)::float8 AS age, w.started_at, w.seen_at, w.ended_at,
               CASE WHEN musterd.is_alive(w.state) THEN w.trouble END AS trouble
          FROM musterd.workers w
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(*) AS blocks, COALESCE(pg_catalog.sum(b.rows), 0)::bigint AS rows
                 FROM musterd.blocks b WHERE b.worker = w.id) h
         WHERE $1::text IS NULL OR w.id = $1
         ORDER BY NOT musterd.is_alive(w.state), w.seen_at DESC, w.id";
    let rows = client.query(SQL, &[&id]).await?;
    Ok(rows.iter().map(Listed::read).collect())
}

impl Listed {
    fn read(row: &tokio_postgres::Row) -> Self {
        Self {
            id: row.get("id"),
            state: row.get("state"),
            host: row.get("host"),
            pid: row.get("pid"),
            version: row.get("version"),
            queues: row.get("queues"),
            commands: row.get("commands"),
            blocks: row.get("blocks"),
            rows: row.get("rows"),
            tasks: row.get("tasks"),
            trouble: row.get("trouble"),
            last_beat_seconds: row.get::<_, f64>("age").max(0.0),
            started_at: moment::of(row, "started_at"),
            seen_at: moment::of(row, "seen_at"),
            ended_at: moment::maybe(row, "ended_at"),
        }
    }
}

/// A command as people see it.
#[derive(Clone, Debug, Serialize)]
pub struct Command {
    pub name: String,
    pub kind: String,
    pub queue: String,
    pub procedure: Option<String>,
    /// Workers alive that handle it.
    pub workers: i64,
}

/// Every command that was declared or that a living worker handles.
pub async fn commands(client: &Client) -> Result<Vec<Command>, Error> {
    const SQL: &str = "SELECT c.name, c.kind, c.queue, c.procedure,
               (SELECT pg_catalog.count(*) FROM musterd.workers w
                 WHERE musterd.is_alive(w.state) AND c.name = ANY (w.commands)) AS workers
          FROM musterd.commands c ORDER BY c.name";
    let shown = |row: &tokio_postgres::Row| Command {
        name: row.get("name"),
        kind: row.get("kind"),
        queue: row.get("queue"),
        procedure: row.get("procedure"),
        workers: row.get("workers"),
    };
    Ok(client.query(SQL, &[]).await?.iter().map(shown).collect())
}
