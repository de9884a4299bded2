//! Judging the dead and freeing what they held. Every decision is the server's: its clock, its locks, its rows.

use super::{
    blocks::BlockRef,
    tasks::{self, TaskEnd, TaskRef, TaskWrite},
};
use crate::failpoint;
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

/// Workers whose lock anybody could take now. Nobody, when PostgreSQL itself has only just started.
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

/// Declares a worker dead whose lock is still gone and who has not beaten since it was looked at.
pub async fn bury_if_lockless(client: &Object, suspect: &Lockless) -> Result<bool, Error> {
    const SQL: &str = "UPDATE musterd.workers w
           SET state = 'dead', ended_at = pg_catalog.clock_timestamp()
         WHERE w.id = $1 AND w.state IN ('alive', 'draining') AND w.lock_key = $2
           AND (EXTRACT(EPOCH FROM w.seen_at) * 1000000)::bigint = $3
           AND pg_catalog.pg_try_advisory_xact_lock_shared($2)";
    let statement = client.prepare_cached(SQL).await?;
    let buried = client.execute(&statement, &[&suspect.id, &suspect.lock_key, &suspect.seen_us]).await?;
    Ok(buried == 1)
}

/// Workers that have not beaten for longer than `ttl`. Nobody, when PostgreSQL itself has only just started: it kept
/// the living from beating.
pub async fn silent(
    client: &Object,
    me: &str,
    ttl: Duration,
    settle: Duration,
) -> Result<Vec<String>, Error> {
    const SQL: &str = "SELECT w.id FROM musterd.workers w
         WHERE w.state IN ('alive', 'draining') AND w.id <> $1
           AND w.seen_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $2)
           AND pg_catalog.clock_timestamp() - pg_catalog.pg_postmaster_start_time()
               > pg_catalog.make_interval(secs => $3)";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&me, &ttl.as_secs_f64(), &settle.as_secs_f64()]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Declares a worker dead that is still silent.
pub async fn bury_if_silent(client: &Object, id: &str, ttl: Duration) -> Result<bool, Error> {
    const SQL: &str = "UPDATE musterd.workers w
           SET state = 'dead', ended_at = pg_catalog.clock_timestamp()
         WHERE w.id = $1 AND w.state IN ('alive', 'draining')
           AND w.seen_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $2)";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.execute(&statement, &[&id, &ttl.as_secs_f64()]).await? == 1)
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

/// Blocks freed in one transaction.
const PAGE: i64 = 500;

/// Blocks whose owner does not live: dead, stopped, or nobody the list knows. A claim of theirs may have been under way
/// when they were declared dead.
pub async fn orphans(client: &Object) -> Result<Vec<(i64, Uuid)>, Error> {
    const SQL: &str = "SELECT b.id, b.token FROM musterd.blocks b
         WHERE b.worker IS NOT NULL
           AND NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = b.worker AND w.state IN ('alive', 'draining'))
         ORDER BY b.id LIMIT $1";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&PAGE]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Frees those of `orphans` that nobody else has freed, or is freeing, meanwhile.
pub async fn free_if_held(
    client: &mut Object,
    orphans: &[(i64, Uuid)],
    max_crashes: u32,
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
    failpoint!("recovery.listed");
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) = orphans.iter().copied().unzip();
    let transaction =
        client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    let lock = transaction.prepare_cached(LOCK).await?;
    let locked = transaction.query(&lock, &[&ids, &tokens]).await?;
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) =
        locked.iter().map(|r| (r.get::<_, i64>(0), r.get::<_, Uuid>(1))).unzip();
    let free = transaction.prepare_cached(include_str!("sql/free_blocks.sql")).await?;
    let most = i32::try_from(max_crashes).unwrap_or(i32::MAX);
    let mut freed = Freed::default();
    let mut queues: Vec<String> = Vec::new();
    for row in transaction.query(&free, &[&ids, &tokens, &most]).await? {
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
pub async fn free_tasks(client: &mut Object, max_crashes: u32) -> Result<FreedTasks, Error> {
    // A statement of its own, as for blocks. Locked ones wait for the next tick.
    const LOCK: &str = "SELECT t.id, t.token, t.parent_id, t.solo_crashes + 1 AS deaths,
               -- A zombie may claim after its end was declared; what it claimed then has harmed nobody.
               NOT COALESCE(t.claimed_at > w.ended_at, false) AS started, t.alone_at IS NOT NULL AS alone
          FROM musterd.tasks t
          LEFT JOIN musterd.workers w ON w.id = t.worker
         WHERE t.worker IS NOT NULL AND t.state = 'running'
           AND (w.id IS NULL OR w.state NOT IN ('alive', 'draining'))
         ORDER BY t.id LIMIT 500
           FOR NO KEY UPDATE OF t SKIP LOCKED";
    const FREE: &str = "WITH freed AS (
            UPDATE musterd.tasks t
               SET state = 'queued', worker = NULL, token = NULL, run_at = pg_catalog.now(), crashes = t.crashes + u.started::int,
                   solo_crashes = t.solo_crashes + (u.started AND t.alone_at IS NOT NULL)::int
              FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bool[])) AS u (id, started)
             WHERE t.id = u.id
            RETURNING t.queue)
        SELECT pg_catalog.pg_notify('musterd_wake', f.queue) FROM (SELECT DISTINCT queue FROM freed) f";
    let most = i32::try_from(max_crashes).unwrap_or(i32::MAX);
    let transaction =
        client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    let lock = transaction.prepare_cached(LOCK).await?;
    let (mut ids, mut started, mut killers) = (Vec::<i64>::new(), Vec::<bool>::new(), Vec::new());
    for row in transaction.query(&lock, &[]).await? {
        let (id, deaths): (i64, i32) = (row.get("id"), row.get("deaths"));
        if row.get("started") && row.get("alone") && deaths >= most {
            let error = format!(
                "the worker process died {deaths} times while it ran this task and nothing else (liveness.max_crashes)"
            );
            let task = TaskRef { id, token: row.get("token") };
            killers.push(TaskWrite { task, parent: row.get("parent_id"), end: TaskEnd::Failed(error) });
        } else {
            ids.push(id);
            started.push(row.get("started"));
        }
    }
    let mut freed = FreedTasks { freed: ids.len() as u64, ..FreedTasks::default() };
    if !ids.is_empty() {
        let free = transaction.prepare_cached(FREE).await?;
        transaction.query(&free, &[&ids, &started]).await?;
    }
    if !killers.is_empty() {
        let failed = tasks::finish_if_held(&*transaction, &killers).await?;
        freed.failed = failed.len() as u64;
        freed.scopes = failed.into_values().filter_map(|finished| finished.scope).collect();
    }
    transaction.commit().await?;
    Ok(freed)
}

/// Workers that ended long ago and own nothing are taken off the list.
pub async fn strike_off(client: &Object, after: Duration) -> Result<u64, Error> {
    const SQL: &str = "DELETE FROM musterd.workers w
         WHERE w.state IN ('dead', 'stopped')
           AND w.ended_at < pg_catalog.now() - pg_catalog.make_interval(secs => $1)
           AND NOT EXISTS (SELECT FROM musterd.blocks b WHERE b.worker = w.id)
           AND NOT EXISTS (SELECT FROM musterd.tasks t WHERE t.worker = w.id)";
    let statement = client.prepare_cached(SQL).await?;
    client.execute(&statement, &[&after.as_secs_f64()]).await
}

/// What the list says a worker holds.
pub async fn owned(client: &Object, worker: &str) -> Result<Vec<BlockRef>, Error> {
    const SQL: &str = "SELECT b.id, b.token, b.batch_id FROM musterd.blocks b WHERE b.worker = $1";
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&worker]).await?;
    let read = |row: &tokio_postgres::Row| BlockRef { id: row.get(0), token: row.get(1), batch: row.get(2) };
    Ok(rows.iter().map(read).collect())
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
        told AS (SELECT pg_catalog.pg_notify('musterd_wake', f.queue) FROM (SELECT DISTINCT queue FROM freed) f)
        SELECT (SELECT pg_catalog.count(*) FROM freed) + (SELECT pg_catalog.count(*) FROM gone), (SELECT pg_catalog.count(*) FROM told)";
    let (ids, tokens): (Vec<i64>, Vec<Uuid>) = blocks.iter().map(|block| (block.id, block.token)).unzip();
    let statement = client.prepare_cached(SQL).await?;
    let freed: i64 = client.query_one(&statement, &[&worker, &ids, &tokens]).await?.get(0);
    Ok(freed as u64)
}
