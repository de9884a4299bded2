//! Judging the dead and freeing what they held. Every decision is the server's: its clock, its locks, its rows.

use super::blocks::BlockRef;
use crate::{error_group::ErrorGroup, failpoint, failpoint::patched};
use deadpool_postgres::Object;
use std::time::Duration;
use tokio_postgres::{Error, IsolationLevel};
use uuid::Uuid;

/// A worker that says it lives and whose session lock is gone.
#[derive(Clone, Debug, PartialEq)]
pub struct Lockless {
    pub id: String,
    /// Both change when it lives after all.
    pub lock_key: i64,
    pub seen_us: i64,
}

/// Workers whose lock could be taken now. None, when PostgreSQL itself has only just started.
///
/// Asked with a shared lock for the length of the statement: judges are not in each other's way, and the list of all
/// locks, which stops the whole server for a moment, is not read.
pub async fn lockless(client: &Object, me: &str, settle: Duration) -> Result<Vec<Lockless>, Error> {
    const SQL: &str = "WITH living AS MATERIALIZED (
            SELECT w.id, w.lock_key, (EXTRACT(EPOCH FROM w.seen_at) * 1000000)::bigint AS seen_us
              FROM musterd.workers w
             WHERE w.state IN ('alive', 'draining') AND w.lock_key IS NOT NULL AND w.id <> $1
               AND pg_catalog.clock_timestamp() - pg_catalog.pg_postmaster_start_time()
                   > pg_catalog.make_interval(secs => $2)),
        tried AS MATERIALIZED (
            SELECT l.*, pg_catalog.pg_try_advisory_xact_lock_shared(l.lock_key) AS gone FROM living l)
        SELECT t.id, t.lock_key, t.seen_us FROM tried t WHERE t.gone";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&me, &settle.as_secs_f64()]).await?;
    let read =
        |row: &tokio_postgres::Row| Lockless { id: row.get(0), lock_key: row.get(1), seen_us: row.get(2) };
    Ok(rows.iter().map(read).collect())
}

/// Declares a worker dead whose lock is still gone and who has not beaten since it was looked at. Not while its row is locked: that
/// may be a beat, and the judgement of the others does not wait for it.
pub async fn declare_dead_if_lockless(client: &Object, suspect: &Lockless) -> Result<bool, Error> {
    const SQL: &str = "UPDATE musterd.workers w
           SET state = 'dead', ended_at = pg_catalog.clock_timestamp()
          FROM (SELECT s.id FROM musterd.workers s
                 WHERE s.id = $1 AND s.state IN ('alive', 'draining') AND s.lock_key = $2
                   AND (EXTRACT(EPOCH FROM s.seen_at) * 1000000)::bigint = $3
                   AND pg_catalog.pg_try_advisory_xact_lock_shared($2)
                   FOR NO KEY UPDATE SKIP LOCKED) s
         WHERE w.id = s.id";
    let statement = client.prepare_cached(SQL).await?;
    let declared = client.execute(&statement, &[&suspect.id, &suspect.lock_key, &suspect.seen_us]).await?;
    Ok(declared == 1)
}

/// Workers that have not beaten for longer than `ttl`. None, when PostgreSQL itself has only just started: it kept the living
/// from beating. None either, when the judge's own beat is older than `own`, by the server's clock: that clock was set forward, and
/// everybody looks silent.
pub async fn silent(
    client: &Object,
    me: &str,
    ttl: Duration,
    settle: Duration,
    own: Duration,
) -> Result<Vec<String>, Error> {
    const SQL: &str = "SELECT w.id FROM musterd.workers w
         WHERE w.state IN ('alive', 'draining') AND w.id <> $1
           AND w.seen_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $2)
           AND pg_catalog.clock_timestamp() - pg_catalog.pg_postmaster_start_time()
               > pg_catalog.make_interval(secs => $3)
           AND EXISTS (SELECT FROM musterd.workers j WHERE j.id = $1
                          AND j.seen_at > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $4))";
    let statement = client.prepare_cached(patched(SQL)).await?;
    let (ttl, settle, own) = (ttl.as_secs_f64(), settle.as_secs_f64(), own.as_secs_f64());
    let rows = client.query(&statement, &[&me, &ttl, &settle, &own]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Declares a worker dead that is still silent, while the judge's own beat is not older than `own`. Not while its row is locked: that may
/// be a beat, and the judgement of the others does not wait for it.
pub async fn declare_dead_if_silent(
    client: &Object,
    me: &str,
    id: &str,
    ttl: Duration,
    own: Duration,
) -> Result<bool, Error> {
    const SQL: &str = "UPDATE musterd.workers w
           SET state = 'dead', ended_at = pg_catalog.clock_timestamp()
          FROM (SELECT s.id FROM musterd.workers s
                 WHERE s.id = $1 AND s.state IN ('alive', 'draining')
                   AND s.seen_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $2)
                   AND EXISTS (SELECT FROM musterd.workers j WHERE j.id = $3
                                  AND j.seen_at > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $4))
                   FOR NO KEY UPDATE SKIP LOCKED) s
         WHERE w.id = s.id";
    let statement = client.prepare_cached(patched(SQL)).await?;
    let (ttl, own) = (ttl.as_secs_f64(), own.as_secs_f64());
    Ok(client.execute(&statement, &[&id, &ttl, &me, &own]).await? == 1)
}

/// Of these names, those of workers that may hold something.
pub async fn living(client: &Object, ids: &[String]) -> Result<Vec<String>, Error> {
    const SQL: &str =
        "SELECT w.id FROM musterd.workers w WHERE w.id = ANY ($1) AND w.state IN ('alive', 'draining')";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query(&statement, &[&ids]).await?.iter().map(|row| row.get(0)).collect())
}

/// What was freed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    pub blocks: u64,
    pub lines: u64,
    /// Rows and tasks that killed their process once too often.
    pub failed: u64,
    pub tasks: u64,
    pub batches: Vec<i64>,
}

impl Freed {
    /// Without the batches.
    pub fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.lines += other.lines;
        self.failed += other.failed;
        self.tasks += other.tasks;
    }
}

/// What dead workers are said to have been running. It decides nothing but what comes first.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Of blocks.
    pub tokens: Vec<Uuid>,
    pub tasks: Vec<i64>,
}

/// Blocks freed in one transaction.
const PAGE: i64 = 500;

/// Whether there are blocks or tasks whose owner does not live.
pub async fn has_orphans(client: &Object) -> Result<bool, Error> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.blocks b WHERE b.worker IS NOT NULL
                   AND NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = b.worker AND musterd.is_alive(w.state)))
            OR EXISTS (SELECT FROM musterd.task_claims c
                WHERE NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = c.worker AND musterd.is_alive(w.state)))";
    let statement = client.prepare_cached(patched(SQL)).await?;
    Ok(client.query_one(&statement, &[]).await?.get(0))
}

/// Blocks whose owner does not live: dead, stopped, or unknown to the list. A claim of theirs may have been under way
/// when they were declared dead.
pub async fn orphans(client: &Object) -> Result<Vec<(i64, Uuid)>, Error> {
    const SQL: &str = "SELECT b.id, b.token FROM musterd.blocks b
         WHERE b.worker IS NOT NULL
           AND NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = b.worker AND w.state IN ('alive', 'draining'))
         ORDER BY b.id LIMIT $1";
    let statement = client.prepare_cached(patched(SQL)).await?;
    let rows = client.query(&statement, &[&PAGE]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Frees those of `orphans` that no other worker has freed, or is freeing, meanwhile.
pub async fn free_if_held(
    client: &mut Object,
    orphans: &[(i64, Uuid)],
    max_crashes: u32,
    ran: &Ran,
) -> Result<Freed, Error> {
    // A statement of its own: what follows must see what was committed while it was taken. Locked ones wait for the
    // next tick, one of them must not stop the others.
    const LOCK: &str = "SELECT b.id, b.token
          FROM musterd.blocks b
          JOIN ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) AS u (id, token)
            ON u.id = b.id AND u.token = b.token
         ORDER BY b.id
           FOR UPDATE OF b SKIP LOCKED";
    const WAKE: &str = "SELECT pg_catalog.pg_notify('musterd_wake', q) FROM pg_catalog.unnest($1::text[]) q";
    failpoint!("recovery.listed", client);
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) = orphans.iter().copied().unzip();
    let transaction =
        client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    let lock = transaction.prepare_cached(LOCK).await?;
    let locked = transaction.query(&lock, &[&ids, &tokens]).await?;
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) =
        locked.iter().map(|r| (r.get::<_, i64>(0), r.get::<_, Uuid>(1))).unzip();
    let free = transaction.prepare_cached(include_str!("sql/free_blocks.sql")).await?;
    let most = i32::try_from(max_crashes).unwrap_or(i32::MAX);
    // Of every row that is failed here, whatever the number of deaths.
    let group = ErrorGroup::of("the worker process died", Some("worker_died")).0;
    let mut freed = Freed::default();
    let mut queues: Vec<String> = Vec::new();
    for row in transaction.query(&free, &[&ids, &tokens, &most, &ran.tokens, &group]).await? {
        freed.blocks += 1;
        freed.lines += row.get::<_, i64>("lines") as u64;
        freed.failed += row.get::<_, i64>("failed") as u64;
        freed.batches.push(row.get("batch_id"));
        queues.push(row.get("queue"));
    }
    queues.sort_unstable();
    queues.dedup();
    transaction.execute(WAKE, &[&queues]).await?;
    transaction.commit().await?;
    freed.batches.sort_unstable();
    freed.batches.dedup();
    Ok(freed)
}

/// What was freed of tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreedTasks {
    pub freed: u64,
    /// Tasks that killed their process once too often.
    pub failed: u64,
    /// Scopes that may be over now.
    pub scopes: Vec<i64>,
}

/// Puts tasks of owners that do not live back into their queues; what had started has one more crash on its record. One whose
/// processes died `max_crashes` times while they ran it and nothing else is failed.
pub async fn free_tasks(client: &Object, max_crashes: u32, ran: &Ran) -> Result<FreedTasks, Error> {
    let most = i32::try_from(max_crashes).unwrap_or(i32::MAX);
    free_claims(client, "", None, most, &ran.tasks).await
}

/// Frees claims of tasks that a living worker owns and does not know. Nothing was started, so nothing is charged.
pub async fn give_back_tasks_if_owned(
    client: &Object,
    worker: &str,
    tokens: &[Uuid],
) -> Result<FreedTasks, Error> {
    free_claims(client, worker, Some(tokens), i32::MAX, &[]).await
}

async fn free_claims(
    client: &Object,
    worker: &str,
    tokens: Option<&[Uuid]>,
    max_crashes: i32,
    ran: &[i64],
) -> Result<FreedTasks, Error> {
    const SQL: &str = "SELECT f.freed, f.failed, f.scopes FROM musterd.free_claims($1, $2, $3, $4) f";
    let statement = client.prepare_cached(SQL).await?;
    let row = client.query_one(&statement, &[&worker, &tokens, &max_crashes, &ran]).await?;
    Ok(FreedTasks {
        freed: row.get::<_, i32>(0) as u64,
        failed: row.get::<_, i32>(1) as u64,
        scopes: row.get(2),
    })
}

/// Workers that ended long ago and own nothing are taken off the list.
pub async fn strike_off(client: &Object, after: Duration) -> Result<u64, Error> {
    const SQL: &str = "DELETE FROM musterd.workers w
         WHERE w.state IN ('dead', 'stopped')
           AND w.ended_at < pg_catalog.now() - pg_catalog.make_interval(secs => $1)
           AND NOT EXISTS (SELECT FROM musterd.blocks b WHERE b.worker = w.id)
           AND NOT EXISTS (SELECT FROM musterd.task_claims c WHERE c.worker = w.id)";
    let statement = client.prepare_cached(SQL).await?;
    client.execute(&statement, &[&after.as_secs_f64()]).await
}

/// What the database says a worker holds: blocks, and the tokens of claims of tasks.
pub async fn owned(client: &Object, worker: &str) -> Result<(Vec<BlockRef>, Vec<Uuid>), Error> {
    const SQL: &str = "SELECT b.id, b.token, b.batch_id FROM musterd.blocks b WHERE b.worker = $1
        UNION ALL SELECT NULL, c.token, NULL FROM musterd.task_claims c WHERE c.worker = $1";
    let statement = client.prepare_cached(SQL).await?;
    let (mut blocks, mut claims) = (Vec::new(), Vec::new());
    for row in client.query(&statement, &[&worker]).await? {
        let token = row.get(1);
        match (row.get(0), row.get(2)) {
            (Some(id), Some(batch)) => blocks.push(BlockRef { id, token, batch }),
            _ => claims.push(token),
        }
    }
    Ok((blocks, claims))
}

/// Frees blocks that a living worker owns and does not hold. Nothing was started, so nothing is charged.
pub async fn give_back_if_owned(client: &Object, worker: &str, blocks: &[BlockRef]) -> Result<u64, Error> {
    const SQL: &str = "WITH lost AS MATERIALIZED (
            SELECT b.id, b.queue, pg_catalog.isempty(b.lines) AS is_empty
              FROM musterd.blocks b
              JOIN ROWS FROM (pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::uuid[])) AS u (id, token)
                ON u.id = b.id AND u.token = b.token
             WHERE b.worker = $1
             ORDER BY b.id FOR UPDATE OF b SKIP LOCKED),
        freed AS (
            UPDATE musterd.blocks b
               SET worker = NULL, token = NULL, alone_at = NULL, available_at = pg_catalog.now()
              FROM lost l WHERE b.id = l.id AND NOT l.is_empty
            RETURNING b.queue),
        -- All its lines are done; only its close was lost.
        gone AS (DELETE FROM musterd.blocks b USING lost l WHERE b.id = l.id AND l.is_empty RETURNING b.queue),
        woken AS (SELECT pg_catalog.pg_notify('musterd_wake', f.queue) FROM (SELECT DISTINCT queue FROM freed) f)
        SELECT (SELECT pg_catalog.count(*) FROM freed) + (SELECT pg_catalog.count(*) FROM gone), (SELECT pg_catalog.count(*) FROM woken)";
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) = blocks.iter().map(|block| (block.id, block.token)).unzip();
    let statement = client.prepare_cached(SQL).await?;
    let freed: i64 = client.query_one(&statement, &[&worker, &ids, &tokens]).await?.get(0);
    Ok(freed as u64)
}
