//! What a token may write and what its parts prove: after a recovery, after a lost reply, and at the end of a block.

use std::time::Duration;

use deadpool_postgres::Object;
use musterd::json::Json;
use musterd::store::batches::Completion;
use musterd::store::blocks::Block;
use musterd::store::flush::{self, BlockWrite, Close, Unanswered};
use musterd::store::recovery::{self, Ran};

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{
    REFUSED, carve, closing_with_retry, complete, failure, look, session, success, take, write, written,
};
use crate::suite::support::sql::{rows, value};
use crate::suite::support::worker::{ask, assert_accounts_balance, submit};

/// What the database says about a write that was not answered.
async fn asked(client: &Object, write: &BlockWrite) -> Unanswered {
    flush::ask_about(client, &[write]).await.unwrap()[0]
}

/// Takes free blocks until there are none. A worker holds one suspect at a time: each becomes another worker's.
async fn take_all(client: &Object) -> Vec<Block> {
    let mut all = Vec::new();
    loop {
        let taken = take(client, 8).await;
        if taken.is_empty() {
            return all;
        }
        client
            .batch_execute("UPDATE musterd.blocks SET worker = 'another' WHERE worker = 'test'")
            .await
            .unwrap();
        all.extend(taken);
    }
}

/// S2 with a real recovery: the zombie's block is gone, its open lines are in eight others, and what it wrote before stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_zombies_partial_flush_after_a_split_is_refused() {
    let db = TestDb::new().await;
    let (client, zombie, mut heir) = (db.client().await, session(&db).await, session(&db).await);
    let batch = submit(&client, "work", 20, "").await;
    let block = carve(&zombie, 1, 20).await.remove(0);
    let before = success(&block, 1..=3, None);
    assert_eq!(write(&zombie, before.clone()).await, written(3));
    // No worker of this name is alive, so its block is an orphan.
    let orphans = recovery::orphans(&heir).await.unwrap();
    let freed = recovery::free_if_held(&mut heir, &orphans, 3, &Ran::default()).await.unwrap();
    assert_eq!((freed.blocks, freed.lines, freed.failed), (1, 17, 0));
    let pieces = "SELECT lines FROM musterd.blocks ORDER BY lower(lines)";
    let expected =
        ["{[4,7)}", "{[7,9)}", "{[9,11)}", "{[11,13)}", "{[13,15)}", "{[15,17)}", "{[17,19)}", "{[19,21)}"];
    assert_eq!(rows(&client, pieces).await, expected, "only what is open, in eighths");
    // Everything it may still want to say, before and after other workers have the lines.
    let late = [
        success(&block, [4, 5], None),
        failure(&block, [6], None),
        success(&block, 4..=20, Some(Close::default())),
        success(&block, [], closing_with_retry(&[7, 8])),
        success(&block, [], Some(Close::default())),
    ];
    let refused = async || {
        for write_again in &late {
            assert_eq!(write(&zombie, write_again.clone()).await, REFUSED);
            assert_eq!(asked(&zombie, write_again).await, Unanswered::NotHeld);
        }
        assert_eq!(asked(&zombie, &before).await, Unanswered::Applied, "that one was in time");
    };
    refused().await;
    let taken = take_all(&heir).await;
    assert_eq!(taken.len(), 8);
    assert!(taken.iter().all(|piece| piece.attempt == 1), "a crash is no attempt");
    for piece in &taken {
        let all: Vec<i32> = piece.lines.iter().collect();
        assert_eq!(write(&heir, success(piece, all[..1].to_vec(), None)).await, written(1));
        refused().await;
        let close = success(piece, all[1..].to_vec(), Some(Close::default()));
        assert_eq!(write(&heir, close).await, written(all.len() as u64 - 1));
    }
    refused().await;
    let closed = look(&heir, batch).await.unwrap();
    assert_eq!(complete(&mut heir, &closed).await, Completion::Completed);
    assert_accounts_balance(&client).await;
}

/// After a lost reply to COMMIT the same write is sent again: nothing is recorded twice, and its part proves that it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_is_repeated_after_a_lost_reply_is_known() {
    let db = TestDb::new().await;
    let (client, mut worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 10, "").await;
    let block = carve(&worker, 1, 10).await.remove(0);
    let parts = [
        (success(&block, 1..=3, None), 3),
        // Without a line that succeeded, and without any outcome at all: the tuple is there, too.
        (failure(&block, [4], None), 1),
        (success(&block, [], None), 0),
        (success(&block, 5..=7, closing_with_retry(&[8, 9])), 3),
    ];
    for (part, rows) in &parts {
        assert_eq!(asked(&worker, part).await, Unanswered::Inconsistent, "held, and not written");
        assert_eq!(write(&worker, part.clone()).await, written(*rows));
        for _ in 0..2 {
            if *rows > 0 {
                assert_eq!(write(&worker, part.clone()).await, REFUSED);
            }
            assert_eq!(asked(&worker, part).await, Unanswered::Applied);
        }
    }
    // The block is closed, and a write that never arrived is not taken for one that did.
    let never = success(&block, [10], None);
    assert_eq!(write(&worker, never.clone()).await, REFUSED);
    assert_eq!(asked(&worker, &never).await, Unanswered::NotHeld);
    let left = "SELECT attempt, lines FROM musterd.blocks ORDER BY 1";
    assert_eq!(rows(&client, left).await, ["1|{[10,11)}", "2|{[8,10)}"], "the close was done once");
    for block in take(&worker, 2).await {
        let lines: Vec<i32> = block.lines.iter().collect();
        assert_eq!(
            write(&worker, success(&block, lines.clone(), Some(Close::default()))).await,
            written(lines.len() as u64)
        );
    }
    for (part, _) in &parts {
        assert_eq!(asked(&worker, part).await, Unanswered::Applied, "for ever");
    }
    let closed = look(&worker, batch).await.unwrap();
    assert_eq!((closed.succeeded, closed.failed), (9, 1));
    assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
    assert_accounts_balance(&client).await;
}

/// One part stands for one content: another content under the same part is an error, and nothing of it is lost silently.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_is_used_for_other_lines_is_an_error() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    submit(&client, "work", 10, "").await;
    let block = carve(&worker, 1, 10).await.remove(0);
    // A part is a key together with its first line; of failures alone the first line is none.
    let first = failure(&block, [1], None);
    let mut other = failure(&block, [2], None);
    other.part = first.part;
    assert_eq!(write(&worker, first).await, written(1));
    let mut other = [other];
    let error =
        flush::write_if_held(&worker, &mut other, flush::Purpose::Write, flush::Patience::Group).await;
    let error = error.unwrap_err();
    assert_eq!(error.code().map(|state| state.code()), Some("23505"));
    assert_eq!(musterd::store::fault::of(&error), musterd::store::fault::Fault::Systemic, "it blames no row");
    assert_eq!(value(&client, "SELECT lines FROM musterd.blocks").await, "{[2,11)}");
}

/// Outcomes come in any order, some lines want another try and some were never started: every line is where it belongs, and
/// every value with its line.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_sorts_what_was_reported_out_of_order() {
    let db = TestDb::new().await;
    let (client, mut worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 12, "").await;
    let block = carve(&worker, 1, 12).await.remove(0);
    let mut part = success(&block, [], None);
    for line in [9, 2, 7] {
        part.outcomes.succeed(line, Some(Json::from_text(format!("\"r{line}\""))), None);
    }
    assert_eq!(write(&worker, part).await, written(3));
    // 3 and 5 are to be tried again. So is 2, by a handler that cannot count; and 40, which is of no block. 1, 6, 10 and 12 were
    // not started.
    let close =
        Close { rest_after: Duration::from_secs(1_000), ..closing_with_retry(&[3, 5, 2, 40]).unwrap() };
    let mut part = failure(&block, [11], Some(Close { error: Some("again".into()), ..close }));
    for line in [8, 4] {
        part.outcomes.succeed(
            line,
            Some(Json::from_text(format!("\"r{line}\""))),
            Some(Json::from_text("{\"f\":\"t\"}")),
        );
    }
    assert_eq!(write(&worker, part).await, written(3));
    let blocks = "SELECT attempt, lines, rows, error, available_at > now() + interval '500 s' FROM musterd.blocks ORDER BY attempt";
    assert_eq!(
        rows(&client, blocks).await,
        ["1|{[1,2),[6,7),[10,11),[12,13)}|4||t", "2|{[3,4),[5,6)}|2|again|f"]
    );
    let results = "SELECT line, state, result #>> '{}', outputs ->> 'f' FROM musterd.results ORDER BY line";
    assert_eq!(
        rows(&client, results).await,
        [
            "2|succeeded|r2|",
            "4|succeeded|r4|t",
            "7|succeeded|r7|",
            "8|succeeded|r8|t",
            "9|succeeded|r9|",
            "11|failed||"
        ]
    );
    client.execute("UPDATE musterd.blocks SET available_at = now()", &[]).await.unwrap();
    for block in take(&worker, 2).await {
        let lines: Vec<i32> = block.lines.iter().collect();
        assert!(write(&worker, success(&block, lines, Some(Close::default()))).await.is_some());
    }
    let closed = look(&worker, batch).await.unwrap();
    assert_eq!((closed.succeeded, closed.failed), (11, 1));
    assert_eq!(complete(&mut worker, &closed).await, Completion::Stale, "its files are missing");
    let end = format!("SELECT musterd.complete_scope({batch}, 1, 12, 11, 1, '{{}}')");
    assert_eq!(value(&client, &end).await, "completed");
    assert_accounts_balance(&client).await;
}

/// S5: no wait of a handler's, however long, keeps a close from being written or a row from ever coming back.
#[tokio::test(flavor = "multi_thread")]
async fn no_wait_is_longer_than_a_year() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    for wait in
        [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(1_700_000_000_000), Duration::ZERO]
    {
        submit(&client, "work", 2, "").await;
        let block = carve(&worker, 1, 2).await.remove(0);
        let close = Close { retry_after: wait, rest_after: wait, ..closing_with_retry(&[1]).unwrap() };
        assert_eq!(write(&worker, success(&block, [], Some(close))).await, written(0), "{wait:?}");
        let due = "SELECT count(*) FROM musterd.blocks WHERE available_at <= now() + interval '367 days'";
        assert_eq!(ask::<i64>(&client, due).await, 2, "{wait:?}");
        client
            .batch_execute("DELETE FROM musterd.blocks; UPDATE musterd.batches SET open = false")
            .await
            .unwrap();
    }
}
