//! Bounds of the claim: batches take turns block by block, and the end of a batch is not one long block.

use deadpool_postgres::Object;
use musterd::store::blocks::{self, Block, Priorities, Size, Wanted};
use musterd::store::tasks::Scope;
use uuid::Uuid;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, session};
use crate::suite::support::worker::submit;

/// A carve of one block, for a queue of so many fibers.
async fn carve_for(client: &Object, fibers: i32, size: Size) -> Option<Block> {
    let wanted = Wanted {
        queue: "default",
        worker: "test",
        tokens: &[Uuid::new_v4()],
        commands: &["work".to_owned()],
        durable: &[],
        sizes: &[size],
        fibers,
        scope: Scope::Any,
        behind_tasks: None,
    };
    blocks::carve(client, &wanted, Priorities::Best).await.unwrap().pop()
}

/// A hundred rows never wait behind five million: they take turns with them, even when those were first.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_batch_takes_turns_with_a_large_one() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let large = submit(&client, "work", 20_000, "").await;
    for _ in 0..5 {
        assert_eq!(carve(&worker, 1, 100).await[0].reference.batch, large);
    }
    let small = submit(&client, "work", 300, "").await;
    let mut order = Vec::new();
    for _ in 0..8 {
        order.push(carve(&worker, 1, 100).await[0].reference.batch);
    }
    let of_small: Vec<usize> = (0..8).filter(|place| order[*place] == small).collect();
    assert_eq!(of_small.len(), 3, "{order:?}");
    assert!(of_small[0] <= 1, "it waits for one block at most: {order:?}");
    assert!(
        of_small.windows(2).all(|pair| pair[1] - pair[0] <= 2),
        "one block of the other between two of its own: {order:?}"
    );
    // One claim of several blocks is shared, too.
    let other = submit(&client, "work", 300, "").await;
    let shared = carve(&worker, 4, 100).await;
    let count = |batch: i64| shared.iter().filter(|block| block.reference.batch == batch).count();
    assert_eq!((count(large), count(other)), (2, 2));
}

/// However many there are, each gets a block before any gets two.
#[tokio::test(flavor = "multi_thread")]
async fn twenty_batches_go_round() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    for _ in 0..20 {
        submit(&client, "work", 30, "").await;
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        let mut round = Vec::new();
        for _ in 0..20 {
            round.push(carve(&worker, 1, 10).await[0].reference.batch);
        }
        round.sort_unstable();
        round.dedup();
        seen.push(round.len());
    }
    assert_eq!(seen, [20, 20, 20]);
    assert!(carve(&worker, 1, 10).await.is_empty());
}

/// Blocks get smaller toward the end, so that all fibers end at about the same time; and not before it, or claims would cost more than rows.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_batch_is_shared_by_all_fibers() {
    const ROWS: i32 = 10_000;
    const FIBERS: i32 = 8;
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    submit(&client, "work", ROWS, "").await;
    let (mut left, mut sizes) = (ROWS, Vec::new());
    while let Some(block) = carve_for(&worker, FIBERS, Size { most: 500, least: 1 }).await {
        let size = block.lines.len() as i32;
        let share = (left + 2 * FIBERS - 1) / (2 * FIBERS);
        assert!(size <= share.max(1), "{size} of the {left} that were left, for {FIBERS} fibers: {sizes:?}");
        left -= size;
        sizes.push(size);
    }
    assert_eq!(left, 0);
    assert_eq!(sizes[0], 500, "the first ones are as large as they may be");
    let tail: i32 = sizes.iter().rev().take(FIBERS as usize).sum();
    assert_eq!(tail, FIBERS, "the last ones are single rows: {sizes:?}");
    assert!(sizes.len() < 120, "{} blocks for {ROWS} rows", sizes.len());
    // Where fewer rows are not worth a block, it does not go down to one.
    submit(&client, "work", 1_000, "").await;
    let mut sizes = Vec::new();
    while let Some(block) = carve_for(&worker, FIBERS, Size { most: 500, least: 40 }).await {
        sizes.push(block.lines.len());
    }
    assert!(sizes[..sizes.len() - 1].iter().all(|size| *size >= 40), "{sizes:?}");
}
