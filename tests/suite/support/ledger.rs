//! The daemon's own statements, called one by one: a claim, a flush, a completion, each on a connection of its own.

use deadpool_postgres::Object;
use musterd::store::Store;
use musterd::store::blocks::{self, Block, Priorities, Size, Wanted};
use musterd::store::flush::{self, BlockWrite, Close, RowWrite, Verdict, Written};
use musterd::store::tasks::Scope;
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

pub(crate) fn lines(blocks: &[Block]) -> Vec<(i32, i32)> {
    blocks.iter().map(|block| (block.first, block.last)).collect()
}

/// The lines of a block that a worker would run.
pub(crate) async fn open_lines(client: &Object, block: &Block) -> Vec<i32> {
    let rows = blocks::read_rows(client, block, block.first, 1_000, 1 << 20).await.unwrap();
    rows.iter().map(|row| row.line).collect()
}

/// Success of these lines of a block, without or with its end.
pub(crate) fn success(
    block: &Block,
    lines: impl IntoIterator<Item = i32>,
    close: Option<Close>,
) -> BlockWrite {
    let row = |line| RowWrite {
        line,
        attempt: block.attempt,
        verdict: Verdict::Succeeded(None),
        outputs: None,
        append: Vec::new(),
    };
    BlockWrite { block: block.reference, rows: lines.into_iter().map(row).collect(), close }
}

/// The end of a block of which `lines` want another try.
pub(crate) fn closing_with_retry(lines: &[i32]) -> Option<Close> {
    Some(Close { retry: lines.to_vec(), ..Close::default() })
}

pub(crate) async fn write(client: &Object, write: BlockWrite) -> Written {
    flush::write_if_held(client, &[write]).await.unwrap()[0]
}

pub(crate) fn written(succeeded: u64) -> Written {
    Written::Held { succeeded, failed: 0 }
}

/// The server's number for a session.
pub(crate) async fn backend(client: &Object) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}
