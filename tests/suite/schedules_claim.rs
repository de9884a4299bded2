//! Claims that meet: every line in exactly one block, none of a batch that is held or being aborted.

use std::collections::BTreeSet;
use std::time::Duration;

use deadpool_postgres::Object;
use futures::future::join_all;
use musterd::store::blocks::Block;
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{
    backend, carve, closing_with_retry, lines, session, success, take, take_solo, write, written,
};
use crate::suite::support::wait::within;
use crate::suite::support::worker::{PATIENCE, ask, submit};

#[tokio::test(flavor = "multi_thread")]
async fn carvers_at_once_leave_no_gap_and_no_overlap() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for size in [3_000, 777, 1] {
        submit(&client, "work", size, "").await;
    }
    let carver = async |number: i32| {
        let session = session(&db).await;
        let mut carved = Vec::new();
        loop {
            let blocks = carve(&session, 1 + number as usize % 4, 1 + number * 3).await;
            let left = "SELECT count(*) FROM musterd.batches WHERE next_line <= rows";
            if blocks.is_empty() && session.query_one(left, &[]).await.unwrap().get::<_, i64>(0) == 0 {
                return carved;
            }
            carved.extend(blocks);
        }
    };
    let carved: Vec<Block> = join_all((0..8).map(carver)).await.concat();
    let tokens: BTreeSet<_> = carved.iter().map(|block| block.reference.token).collect();
    assert_eq!(tokens.len(), carved.len());
    for (batch, size) in [(1, 3_000), (2, 777), (3, 1)] {
        let mut ranges: Vec<_> =
            carved.iter().filter(|block| block.reference.batch == batch).cloned().collect();
        ranges.sort_by_key(|block| block.lines.first());
        let mut next = 1;
        for (first, last) in lines(&ranges) {
            assert_eq!(first, next, "batch {batch}");
            next = last + 1;
        }
        assert_eq!(next, size + 1, "batch {batch}");
    }
}

/// Starts a carve that meets `first`'s open transaction, ends that with `end`, and gives what the carve got. A slow
/// machine may let it give up its short wait for the lock; then it is done once more.
async fn carve_meets(
    second: &Object,
    first: &Client,
    begin: &str,
    end: &str,
    observer: &Client,
) -> Vec<Block> {
    let waiting = backend(second).await;
    for _ in 0..20 {
        first.batch_execute(&format!("BEGIN; {begin}")).await.unwrap();
        let ending = async {
            let asleep = "SELECT cardinality(pg_blocking_pids($1)) > 0";
            let blocked =
                async { while !observer.query_one(asleep, &[&waiting]).await.unwrap().get::<_, bool>(0) {} };
            let was_blocked = tokio::time::timeout(Duration::from_millis(80), blocked).await.is_ok();
            first.batch_execute(if was_blocked { end } else { "ROLLBACK" }).await.unwrap();
            was_blocked
        };
        let (carved, was_blocked) =
            within(PATIENCE, async { tokio::join!(carve(second, 1, 5), ending) }).await;
        if was_blocked {
            return carved;
        }
        // It was carved after the rollback, or not at all: as before.
        let undo = "DELETE FROM musterd.blocks; UPDATE musterd.batches SET next_line = 1";
        observer.batch_execute(undo).await.unwrap();
    }
    panic!("the carve was never seen waiting");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_carve_that_waited_for_a_hold_or_an_abort_carves_nothing() {
    let db = TestDb::new().await;
    let (first, observer, second) = (db.client().await, db.client().await, session(&db).await);
    for operation in ["hold", "abort"] {
        let batch = submit(&observer, "work", 20, "").await;
        let begin = format!("SELECT musterd.{operation}({batch})");
        let carved = carve_meets(&second, &first, &begin, "COMMIT", &observer).await;
        assert_eq!(lines(&carved), [], "{operation}");
        // Taken back, it is as if it had not been.
        let other = submit(&observer, "work", 20, "").await;
        let begin = format!("SELECT musterd.{operation}({other})");
        let carved = carve_meets(&second, &first, &begin, "ROLLBACK", &observer).await;
        assert!(carved.is_empty() || lines(&carved) == [(1, 5)], "{operation}");
        observer.query("SELECT musterd.abort($1)", &[&other]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_carve_that_waited_for_an_append_sees_the_new_rows() {
    let db = TestDb::new().await;
    let (first, observer, second) = (db.client().await, db.client().await, session(&db).await);
    let batch = submit(&observer, "work", 2, "").await;
    let begin = format!("SELECT musterd.append_rows({batch}, '[3, 4, 5, 6]'::jsonb)");
    let carved = carve_meets(&second, &first, &begin, "COMMIT", &observer).await;
    if !carved.is_empty() {
        assert_eq!(lines(&carved), [(1, 5)], "all it saw under the lock");
    }
    assert_eq!(ask::<i32>(&observer, "SELECT rows FROM musterd.batches").await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_waited_for_a_carve_leaves_the_block_to_its_owner() {
    let db = TestDb::new().await;
    let (client, operator) = (db.client().await, db.client().await);
    let carver = session(&db).await;
    let batch = submit(&client, "work", 20, "").await;
    carver.batch_execute("BEGIN").await.unwrap();
    let carved = carve(&carver, 1, 5).await;
    let hold = format!("SELECT musterd.hold({batch})");
    let (held, ()) = tokio::join!(ask::<String>(&operator, &hold), async {
        carver.batch_execute("COMMIT").await.unwrap();
    });
    assert_eq!((held.as_str(), lines(&carved)), ("held", vec![(1, 5)]));
    assert_eq!(lines(&carve(&carver, 1, 5).await), []);
    assert_eq!(write(&carver, success(&carved[0], 1..=5, closing_with_retry(&[]))).await, written(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_written_beside_a_hold_waits_for_the_release() {
    let db = TestDb::new().await;
    let (client, operator) = (db.client().await, db.client().await);
    let worker = session(&db).await;
    let batch = submit(&client, "work", 5, "").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    operator.batch_execute(&format!("BEGIN; SELECT musterd.hold({batch})")).await.unwrap();
    // The flush does not wait for the batch's lock, and does not see the hold.
    assert_eq!(write(&worker, success(&block, 1..=4, closing_with_retry(&[5]))).await, written(4));
    operator.batch_execute("COMMIT").await.unwrap();
    assert_eq!(lines(&take(&worker, 4).await), [], "held");
    assert_eq!(ask::<String>(&client, &format!("SELECT musterd.release({batch})")).await, "running");
    let taken = take(&worker, 4).await;
    assert_eq!((lines(&taken), taken[0].attempt), (vec![(5, 5)], 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_free_block_is_taken_by_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    submit(&client, "work", 40, "").await;
    let first = session(&db).await;
    for block in carve(&first, 8, 5).await {
        let all: Vec<i32> = block.lines.iter().collect();
        assert_eq!(write(&first, success(&block, [], closing_with_retry(&all))).await, written(0));
    }
    let second = session(&db).await;
    first.batch_execute("BEGIN").await.unwrap();
    let taken_first = take(&first, 3).await;
    let mut taken_second = take(&second, 8).await;
    first.batch_execute("COMMIT").await.unwrap();
    taken_second.extend(take(&second, 8).await);
    assert_eq!((taken_first.len(), taken_second.len()), (3, 5));
    let all: BTreeSet<_> = taken_first.iter().chain(&taken_second).map(|block| block.lines.first()).collect();
    assert_eq!(all.len(), 8);
    assert_eq!(lines(&take(&second, 8).await), []);
}

/// A claim is lost with the server's last moments, unless it is for work that may be what ends them.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_waited_for_only_when_its_work_is_done_in_the_server() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    for (command, mode) in [("work", "off"), ("sql", "on")] {
        submit(&client, command, 3, "").await;
        for kind in ["fresh", "free", "solo"] {
            worker.batch_execute("BEGIN").await.unwrap();
            let claimed = match kind {
                "fresh" => carve(&worker, 1, 3).await,
                "free" => take(&worker, 1).await,
                _ => take_solo(&worker).await,
            };
            assert_eq!(lines(&claimed), [(1, 3)], "{kind}");
            let shown = worker.query_one("SHOW synchronous_commit", &[]).await.unwrap();
            assert_eq!(shown.get::<_, String>(0), mode, "{command}, {kind}");
            worker.batch_execute("COMMIT").await.unwrap();
            let free = "UPDATE musterd.blocks SET worker = NULL, token = NULL, available_at = now(),
                               crashes = CASE $1 WHEN 'free' THEN 2 ELSE 0 END, solo = $1 = 'free'";
            client.execute(free, &[&kind]).await.unwrap();
        }
        client.batch_execute("DELETE FROM musterd.blocks").await.unwrap();
    }
}
