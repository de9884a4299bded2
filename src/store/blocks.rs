//! Blocks: claimed here, read here. They are the only queue of rows.

use super::{
    query::{QueryError, failed},
    tasks::Scope,
};
use crate::json::Json;
use deadpool_postgres::Object;
use futures::{StreamExt, pin_mut};
use std::sync::LazyLock;
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

/// A block this worker holds.
#[derive(Clone, Debug)]
pub struct Block {
    pub reference: BlockRef,
    pub first: i32,
    pub last: i32,
    /// `None`: every open line of the range.
    pub lines: Option<Vec<i32>>,
    pub command: String,
    /// The try that begins with this claim, from 1.
    pub attempt: i32,
    /// Never claimed before: none of its lines can have a result.
    pub fresh: bool,
    /// A line that some process died with: it runs with nothing beside it.
    pub solo: bool,
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
     WHERE c.queue = $1 AND c.open AND c.next_line <= c.rows AND c.command = ANY ($4)
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
    Ok(rows.iter().map(|row| Block::read(row, true)).collect())
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
    Ok(rows.iter().map(|row| Block::read(row, false)).collect())
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
    Ok(row.map(|row| Block::read(&row, false)))
}

/// From now on a death of this process is the block's doing. False: somebody else has it.
pub async fn mark_alone_if_held(client: &Object, block: BlockRef) -> Result<bool, QueryError> {
    const SQL: &str =
        "UPDATE musterd.blocks SET alone_at = pg_catalog.clock_timestamp() WHERE id = $1 AND token = $2";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare marking a block"))?;
    let marked = client.execute(&statement, &[&block.id, &block.token]).await;
    Ok(marked.map_err(failed("mark a block as alone"))? == 1)
}

/// The blocks that hold these tokens.
pub async fn find(client: &Object, tokens: &[Uuid]) -> Result<Vec<Block>, QueryError> {
    const SQL: &str = "SELECT id, token, batch_id, first_line, last_line, lines, command, attempt, solo, NULL::float8 AS waited
                         FROM musterd.blocks WHERE worker IS NOT NULL AND token = ANY ($1)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding blocks"))?;
    let rows = client.query(&statement, &[&tokens]).await.map_err(failed("find blocks by token"))?;
    Ok(rows.iter().map(|row| Block::read(row, false)).collect())
}

impl Block {
    fn read(row: &Row, fresh: bool) -> Self {
        Self {
            reference: BlockRef { id: row.get("id"), token: row.get("token"), batch: row.get("batch_id") },
            first: row.get("first_line"),
            last: row.get("last_line"),
            lines: row.get("lines"),
            command: row.get("command"),
            attempt: row.get("attempt"),
            fresh,
            solo: row.get("solo"),
            waited: row.get("waited"),
        }
    }

    /// How many lines it covers, finished ones included.
    pub fn len(&self) -> usize {
        match &self.lines {
            Some(lines) => lines.len(),
            None => (self.last - self.first + 1).max(0) as usize,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its lines from `from` on; those that have a result already are among them.
    pub fn open_lines(&self, from: i32) -> Vec<i32> {
        match &self.lines {
            Some(lines) => lines.iter().copied().filter(|line| *line >= from).collect(),
            None => (from..=self.last).collect(),
        }
    }
}

/// One row to run.
#[derive(Debug)]
pub struct InputRow {
    pub line: i32,
    pub input: Json,
}

/// Rows of a block from `from` on: as many as fit in `bytes`, at most `limit`, at least one if there is one.
///
/// A fresh block's lines cannot have results; of any other, those with a result are left out.
pub async fn read_rows(
    client: &Object,
    block: &Block,
    from: i32,
    limit: usize,
    bytes: usize,
) -> Result<Vec<InputRow>, QueryError> {
    const FRESH: &str = include_str!("sql/read.sql");
    const OPEN: &str = "SELECT i.line, i.input FROM musterd.rows i
         WHERE i.batch_id = $1 AND i.line BETWEEN $2 AND $3 AND ($5::int[] IS NULL OR i.line = ANY ($5))
           AND NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = i.batch_id AND r.line = i.line)
         ORDER BY i.line LIMIT $4";
    let sql = if block.fresh { FRESH } else { OPEN };
    let statement = client.prepare_cached(sql).await.map_err(failed("prepare reading rows"))?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (batch, last) = (block.reference.batch, block.last);
    let mut params: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> = vec![&batch, &from, &last, &limit];
    if !block.fresh {
        params.push(&block.lines);
    }
    let found = client.query_raw(&statement, params).await.map_err(failed("read rows"))?;
    pin_mut!(found);
    let (mut rows, mut size) = (Vec::new(), 0);
    while let Some(row) = found.next().await {
        let row = row.map_err(failed("read rows"))?;
        let input: Json = row.get(1);
        size += input.len();
        rows.push(InputRow { line: row.get(0), input });
        if size >= bytes {
            break;
        }
    }
    Ok(rows)
}

/// What all blocks of a batch share, read once per batch and worker.
#[derive(Debug)]
pub struct BatchFacts {
    pub context: Json,
    pub max_attempts: Option<i32>,
    pub row_timeout: Option<std::time::Duration>,
    pub traceparent: Option<String>,
    /// Only of a batch that is to stop when it is spent.
    pub budget: Option<Budget>,
}

/// How many rows may fail, as of when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub allowed: i64,
    pub failed: i64,
}

/// `None` when the batch does not exist any more.
pub async fn facts(client: &Object, batch: i64) -> Result<Option<BatchFacts>, QueryError> {
    const SQL: &str = "SELECT t.payload, b.max_attempts,
               (EXTRACT(EPOCH FROM b.row_timeout) * 1000)::bigint, t.traceparent, b.on_budget IS NOT NULL,
               COALESCE(pg_catalog.floor(b.rows * b.max_failed_percent::numeric / 100), b.max_failed)::bigint,
               (SELECT COALESCE(pg_catalog.sum(y.failed), 0)::bigint FROM musterd.tallies y
                 WHERE y.batch_id = b.id AND b.on_budget IS NOT NULL)
          FROM musterd.batches b JOIN musterd.tasks t ON t.id = b.id WHERE b.id = $1";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare reading a batch"))?;
    let row = client.query_opt(&statement, &[&batch]).await.map_err(failed("read a batch"))?;
    Ok(row.map(|row| BatchFacts {
        context: row.get(0),
        max_attempts: row.get(1),
        row_timeout: row
            .get::<_, Option<i64>>(2)
            .map(|ms| std::time::Duration::from_millis(u64::try_from(ms).unwrap_or(1).max(1))),
        traceparent: row.get(3),
        budget: row.get::<_, bool>(4).then(|| Budget { allowed: row.get(5), failed: row.get(6) }),
    }))
}

/// Whether a batch still gives out rows: it is neither held nor aborted nor over.
pub async fn is_open(client: &Object, batch: i64) -> Result<bool, QueryError> {
    const SQL: &str = "SELECT EXISTS (SELECT FROM musterd.batches b WHERE b.id = $1 AND b.open)";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare looking at a batch"))?;
    let row = client.query_one(&statement, &[&batch]).await.map_err(failed("look at a batch"))?;
    Ok(row.get(0))
}
