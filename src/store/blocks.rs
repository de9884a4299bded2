//! Blocks: claimed here. They are the only queue of rows.

use super::{
    query::{QueryError, failed},
    tasks::Scope,
};
use crate::lines::Lines;
use deadpool_postgres::Object;
use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicI32, Ordering},
};
use tokio_postgres::{Row, error::SqlState};
use uuid::Uuid;

/// How a worker names the block it holds. The id alone proves nothing: after a crash of PostgreSQL ids are handed
/// out again. The token was made for this one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRef {
    pub id: i64,
    pub token: Uuid,
    pub batch: i64,
}

/// Numbers the writes of one token. One number stands for one content for ever: after a lost reply it tells whether that
/// very write was applied.
#[derive(Clone, Debug, Default)]
pub struct Parts(Arc<AtomicI32>);

impl Parts {
    pub fn next(&self) -> i32 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// A block this worker holds.
#[derive(Clone, Debug)]
pub struct Block {
    pub reference: BlockRef,
    pub parts: Parts,
    /// Of its batch alone, for ever: ids of batches may be handed out again.
    pub uid: Uuid,
    /// The lines that were open when it was claimed.
    pub lines: Lines,
    pub generation: i32,
    pub command: String,
    /// The attempt that begins with this claim, from 1.
    pub attempt: i32,
    /// A line that some process died with: it runs with nothing beside it.
    pub solo: bool,
    /// Processes that died with it.
    pub crashes: i32,
    /// Seconds from the submit of the batch, or from being due, to this claim. `None`: there was work before it.
    pub waited: Option<f64>,
}

/// What a claim wants.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub queue: &'a str,
    pub worker: &'a str,
    /// One for every block, made before the statement is sent: a lost reply can be found again by them.
    pub tokens: &'a [Uuid],
    pub commands: &'a [String],
    /// Those of them whose claims must outlive a crash of the server; the others are not waited for.
    pub durable: &'a [String],
    pub sizes: &'a [Size],
    pub fibers: i32,
    /// Only rows of this scope.
    pub scope: Scope,
    /// No rows that are behind queued tasks of these commands.
    pub behind_tasks: Option<&'a [String]>,
}

/// The bounds of a block's number of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// What takes the target time.
    pub most: i32,
    /// Fewer than this are not worth a block of their own.
    pub least: i32,
}

impl Size {
    /// The same, but no block of fewer than `lines` while there are as many.
    pub fn at_least(self, lines: i32) -> Self {
        Self { most: self.most.max(lines), least: self.least.max(lines) }
    }
}

/// What priorities a claim looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priorities {
    /// The best there is.
    Best,
    /// The best there is, unless the other kind of work (free blocks, or fresh lines) has better.
    NotBehindTheOther,
    /// None: who has waited longest.
    Ignored,
}

/// A statement in its variants; each is one text, so that each is prepared once.
struct Variants {
    best: String,
    not_behind: String,
    ignored: String,
}

impl Variants {
    fn of(template: &str, order: &str, not_behind: &str) -> Self {
        let fill =
            |order: &str, limit: &str| template.replace("/*order*/", order).replace("/*limit*/", limit);
        Self { best: fill(order, ""), not_behind: fill(order, not_behind), ignored: fill("", "") }
    }

    fn get(&self, priorities: Priorities) -> &str {
        match priorities {
            Priorities::Best => &self.best,
            Priorities::NotBehindTheOther => &self.not_behind,
            Priorities::Ignored => &self.ignored,
        }
    }
}

const CARVE: &str = include_str!("sql/carve.sql");
const TAKE: &str = include_str!("sql/take.sql");
const TAKE_SOLO: &str = include_str!("sql/take_solo.sql");

const NOT_BEHIND_FREE: &str = "AND b.priority <= COALESCE((
    SELECT f.priority FROM musterd.blocks f
     WHERE f.worker IS NULL AND f.queue = $1 AND f.available_at <= pg_catalog.now() AND f.command = ANY ($4)
       AND f.crashes = 0
     ORDER BY f.priority LIMIT 1), 2147483647)";
const NOT_BEHIND_FRESH: &str = "AND f.priority <= COALESCE((
    SELECT c.priority FROM musterd.batches c
     WHERE c.queue = $1 AND c.open AND c.next_line <= c.rows AND NOT c.canary_only AND c.command = ANY ($4)
     ORDER BY c.priority LIMIT 1), 2147483647)";

static CARVE_SKIPPING: LazyLock<Variants> =
    LazyLock::new(|| Variants::of(&CARVE.replace("/*skip*/", "SKIP LOCKED"), "b.priority,", NOT_BEHIND_FREE));
static CARVE_WAITING: LazyLock<Variants> =
    LazyLock::new(|| Variants::of(&CARVE.replace("/*skip*/", ""), "b.priority,", NOT_BEHIND_FREE));
static TAKE_FREE: LazyLock<Variants> = LazyLock::new(|| Variants::of(TAKE, "f.priority,", NOT_BEHIND_FRESH));

/// Carves fresh blocks. Batches locked by others are left out; when that leaves none, waits for them a little:
/// waiting alone lets a user's open transaction stop the queue, skipping alone leaves most claims empty.
pub async fn carve(
    client: &Object,
    wanted: &Wanted<'_>,
    priorities: Priorities,
) -> Result<Vec<Block>, QueryError> {
    let carved = carve_with(client, wanted, CARVE_SKIPPING.get(priorities)).await?;
    if !carved.is_empty() {
        return Ok(carved);
    }
    match carve_with(client, wanted, CARVE_WAITING.get(priorities)).await {
        Err(QueryError::Query { source, .. }) if source.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
            Ok(vec![])
        }
        carved => carved,
    }
}

async fn carve_with(client: &Object, wanted: &Wanted<'_>, sql: &str) -> Result<Vec<Block>, QueryError> {
    let most: Vec<i32> = wanted.sizes.iter().map(|size| size.most).collect();
    let least: Vec<i32> = wanted.sizes.iter().map(|size| size.least).collect();
    let statement = client.prepare_cached(sql).await.map_err(failed("prepare the carve"))?;
    let rows = client
        .query(
            &statement,
            &[
                &wanted.queue,
                &wanted.worker,
                &wanted.tokens,
                &wanted.commands,
                &most,
                &least,
                &f64::from(wanted.fibers),
                &wanted.scope.parameter(),
                &wanted.behind_tasks,
                &wanted.durable,
            ],
        )
        .await
        .map_err(failed("carve blocks"))?;
    Ok(rows.iter().map(Block::read).collect())
}

/// Takes free blocks that are due.
pub async fn take(
    client: &Object,
    wanted: &Wanted<'_>,
    priorities: Priorities,
) -> Result<Vec<Block>, QueryError> {
    let statement =
        client.prepare_cached(TAKE_FREE.get(priorities)).await.map_err(failed("prepare taking blocks"))?;
    let rows = client
        .query(
            &statement,
            &[
                &wanted.queue,
                &wanted.worker,
                &wanted.tokens,
                &wanted.commands,
                &wanted.scope.parameter(),
                &wanted.behind_tasks,
                &wanted.durable,
            ],
        )
        .await
        .map_err(failed("take free blocks"))?;
    Ok(rows.iter().map(Block::read).collect())
}

/// Takes a block that is to run alone, if there is one and this worker has none yet.
pub async fn take_solo(client: &Object, wanted: &Wanted<'_>) -> Result<Option<Block>, QueryError> {
    let Some(token) = wanted.tokens.first() else { return Ok(None) };
    let statement =
        client.prepare_cached(TAKE_SOLO).await.map_err(failed("prepare taking a solitary block"))?;
    let row = client
        .query_opt(&statement, &[&wanted.queue, &wanted.worker, token, &wanted.commands, &wanted.durable])
        .await
        .map_err(failed("take a solitary block"))?;
    Ok(row.as_ref().map(Block::read))
}

/// Seconds until the next free block of a queue is due that is not due now.
pub async fn next_due(client: &Object, queue: &str) -> Result<Option<f64>, QueryError> {
    const SQL: &str =
        "SELECT EXTRACT(EPOCH FROM pg_catalog.min(f.available_at) - pg_catalog.clock_timestamp())::float8
          FROM musterd.blocks f
         WHERE f.worker IS NULL AND f.queue = $1 AND f.available_at > pg_catalog.clock_timestamp()";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare asking when a block is due"))?;
    Ok(client.query_one(&statement, &[&queue]).await.map_err(failed("ask when a block is due"))?.get(0))
}

/// From now on a death of this process is the block's doing. False: another worker has it.
pub async fn mark_alone_if_held(client: &Object, block: BlockRef) -> Result<bool, QueryError> {
    const SQL: &str =
        "UPDATE musterd.blocks SET alone_at = pg_catalog.clock_timestamp() WHERE id = $1 AND token = $2";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare marking a block"))?;
    let marked = client.execute(&statement, &[&block.id, &block.token]).await;
    Ok(marked.map_err(failed("mark a block as alone"))? == 1)
}

/// Others run beside it from now on. False: another worker has it.
pub async fn unmark_alone(client: &Object, block: BlockRef) -> Result<bool, QueryError> {
    const SQL: &str = "UPDATE musterd.blocks SET alone_at = NULL WHERE id = $1 AND token = $2";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare unmarking a block"))?;
    let unmarked = client.execute(&statement, &[&block.id, &block.token]).await;
    Ok(unmarked.map_err(failed("unmark a block as alone"))? == 1)
}

/// The blocks that hold these tokens.
pub async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Block>, QueryError> {
    const SQL: &str =
        "SELECT k.id, k.token, k.batch_id, b.uid, k.lines, k.generation, k.command, k.attempt, k.solo, k.crashes,
               NULL::float8 AS waited
          FROM musterd.blocks k JOIN musterd.batches b ON b.id = k.batch_id
         WHERE k.worker IS NOT NULL AND k.token = ANY ($1)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding blocks"))?;
    let rows = client.query(&statement, &[&tokens]).await.map_err(failed("find blocks by token"))?;
    Ok(rows.iter().map(Block::read).collect())
}

impl Block {
    fn read(row: &Row) -> Self {
        Self {
            reference: BlockRef { id: row.get("id"), token: row.get("token"), batch: row.get("batch_id") },
            parts: Parts::default(),
            uid: row.get("uid"),
            lines: row.get("lines"),
            generation: row.get("generation"),
            command: row.get("command"),
            attempt: row.get("attempt"),
            solo: row.get("solo"),
            crashes: row.get("crashes"),
            waited: row.get("waited"),
        }
    }
}
