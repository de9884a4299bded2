//! The daemon's own statements, called one by one: a claim, a flush, a completion, each on a connection of its own.

use deadpool_postgres::Object;
use musterd::lines::Lines;
use musterd::store::Store;
use musterd::store::batches::{self, Advisory, Closed, Completion, Look, ScopeEnd};
use musterd::store::blocks::{self, Block, Priorities, Size, Wanted};
use musterd::store::flush::{self, BlockWrite, Close, Outcomes, Patience, Purpose};
use musterd::store::pages::{self, ChunkCache};
use musterd::store::tasks::Scope;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::database::TestDb;

/// The pools of one worker that does nothing by itself.
pub(crate) fn store(db: &TestDb) -> Store {
    Store::open(&musterd::store::Config { url: db.url().into(), ..Default::default() }).unwrap()
}

/// A connection of its own, with our session settings.
pub(crate) async fn session(db: &TestDb) -> Object {
    store(db).general.get().await.unwrap()
}

/// The kinds of claim.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Fresh,
    Free,
    Solo,
}

/// What a worker with `fibers` idle fibers wants of the default queue; blocks have `size` lines.
async fn claim(client: &Object, count: usize, size: i32, kind: Kind) -> Vec<Block> {
    let tokens: Vec<Uuid> = (0..count).map(|_| Uuid::new_v4()).collect();
    let wanted = Wanted {
        queue: "default",
        worker: "test",
        tokens: &tokens,
        commands: &["work".to_owned(), "sql".to_owned()],
        durable: &["sql".to_owned()],
        sizes: &[Size { most: size, least: size }; 2],
        fibers: 1,
        scope: Scope::Any,
        behind_tasks: None,
    };
    match kind {
        Kind::Fresh => blocks::carve(client, &wanted, Priorities::Best).await.unwrap(),
        Kind::Free => blocks::take(client, &wanted, Priorities::Best).await.unwrap(),
        Kind::Solo => blocks::take_solo(client, &wanted).await.unwrap().into_iter().collect(),
    }
}

/// Carves `count` fresh blocks of `size` lines.
pub(crate) async fn carve(client: &Object, count: usize, size: i32) -> Vec<Block> {
    claim(client, count, size, Kind::Fresh).await
}

/// Takes up to `count` free blocks.
pub(crate) async fn take(client: &Object, count: usize) -> Vec<Block> {
    claim(client, count, 1, Kind::Free).await
}

/// Takes a block that is to run alone.
pub(crate) async fn take_solo(client: &Object) -> Vec<Block> {
    claim(client, 1, 1, Kind::Solo).await
}

/// The first and the last line of each block, which must have all lines between.
#[track_caller]
pub(crate) fn lines(blocks: &[Block]) -> Vec<(i32, i32)> {
    let ends = |block: &Block| {
        assert!(block.lines.ranges().len() <= 1, "there are gaps: {}", block.lines);
        (block.lines.first().unwrap(), block.lines.last().unwrap())
    };
    blocks.iter().map(ends).collect()
}

/// The lines of a block that a worker would run: those whose inputs it reads.
pub(crate) async fn open_lines(client: &Object, block: &Block) -> Vec<i32> {
    let limits = 1 << 20;
    let page = pages::read(client, &ChunkCache::default(), block, &block.lines, limits).await.unwrap();
    assert_eq!(page.lines(), &block.lines, "a small block is read at once");
    page.rows().iter().map(|row| row.line).collect()
}

/// Success of these lines of a block, without or with its end. Every call is a part of its own.
pub(crate) fn success(
    block: &Block,
    lines: impl IntoIterator<Item = i32>,
    close: Option<Close>,
) -> BlockWrite {
    let mut outcomes = Outcomes::default();
    outcomes.succeed_all(&lines.into_iter().collect());
    BlockWrite { block: block.reference, part: block.parts.next(), outcomes, close }
}

/// Failure of these lines of a block, without or with its end.
pub(crate) fn failure(
    block: &Block,
    lines: impl IntoIterator<Item = i32>,
    close: Option<Close>,
) -> BlockWrite {
    let mut write = success(block, [], close);
    lines.into_iter().for_each(|line| write.outcomes.fail(line, "no".into()));
    write
}

/// The end of a block of which `lines` want another try.
pub(crate) fn closing_with_retry(lines: &[i32]) -> Option<Close> {
    Some(Close { retry: lines.iter().copied().collect::<Lines>(), ..Close::default() })
}

/// What a flush came to: the rows that it recorded, or `None` when it was refused.
pub(crate) type Written = Option<u64>;

pub(crate) const REFUSED: Written = None;

pub(crate) fn written(rows: u64) -> Written {
    Some(rows)
}

/// Flushes one block, and counts what is recorded of its batch before and after.
pub(crate) async fn write(client: &Object, write: BlockWrite) -> Written {
    let batch = write.block.batch;
    let before = recorded(client, batch).await;
    let answers = write_all(client, &mut [write]).await;
    let rows = recorded(client, batch).await - before;
    assert!(answers[0] || rows == 0, "a refused flush recorded {rows} rows");
    answers[0].then_some(rows)
}

/// Flushes blocks together; for each whether it was written. A wait for a lock has an end; the next try goes on with it, as
/// a worker does.
pub(crate) async fn write_all(client: &Object, writes: &mut [BlockWrite]) -> Vec<bool> {
    loop {
        match flush::write_if_held(client, writes, Purpose::Write, Patience::Group).await {
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {}
            answers => return answers.unwrap(),
        }
    }
}

/// The rows of a batch that have a result.
async fn recorded(client: &Object, batch: i64) -> u64 {
    let sql = "SELECT count(*) FROM musterd.results WHERE batch_id = $1";
    client.query_one(sql, &[&batch]).await.unwrap().get::<_, i64>(0) as u64
}

/// A batch that is over and adds up; `None` when it is not over.
pub(crate) async fn look(client: &Object, batch: i64) -> Option<Closed> {
    match batches::look(client, &[batch]).await.unwrap().pop()? {
        Look::Closed(closed) => Some(closed),
        other => panic!("batch {batch}: {other:?}"),
    }
}

/// Finishes a batch with what was counted.
pub(crate) async fn complete(client: &mut Object, closed: &Closed) -> Completion {
    let end = ScopeEnd { id: closed.id, closed: Some(closed), outputs: None };
    let answers = batches::complete(client, &[end], Advisory::Ask).await.unwrap();
    assert_eq!((answers.len(), answers[0].0), (1, closed.id));
    answers[0].1
}

/// The server's number for a session.
pub(crate) async fn backend(client: &Object) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}
