//! Completions that meet: the last row's commit, an append, an abort, and each other. One ends the batch, none too soon.

use musterd::state::State;
use std::num::NonZeroU32;
use std::time::Duration;

use musterd::flow::complete::{self as completion, CompleteError, Completer};
use musterd::flow::outputs::Uploader;
use musterd::metrics::Metrics;
use musterd::objects;
use musterd::store::batches::{self, Completion};
use musterd::store::flush::Close;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{
    carve, closing_with_retry, complete, look, session, store, success, take, write, written,
};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{PATIENCE, ask, assert_accounts_balance, progress, submit};

fn completer(db: &TestDb, attempts: u32) -> Completer {
    let config = completion::Config {
        attempts: NonZeroU32::new(attempts).unwrap(),
        retry_delay: Duration::from_millis(200),
        ..Default::default()
    };
    let store = store(db);
    let objects = objects::Store::open(&objects::Config::default()).unwrap();
    let uploader = Uploader { pool: store.uploads.clone(), objects };
    Completer { store, uploader, config, cache: None, metrics: Metrics::default() }
}

async fn finish(completer: &Completer, batch: i64) -> Result<Completion, CompleteError> {
    let mut finished = completer.complete_all(vec![batch]).await;
    assert_eq!((finished.len(), finished[0].0), (1, batch));
    finished.remove(0).1
}

/// A batch of `rows` rows of which all but the last are done; the block with the last is still held.
async fn all_but_the_last(db: &TestDb, rows: i32) -> (i64, musterd::store::blocks::Block) {
    let (client, worker) = (db.client().await, session(db).await);
    let batch = submit(&client, "work", rows, "on_done => 'tell'").await;
    let blocks = carve(&worker, 2, rows - 1).await;
    let done = success(&blocks[0], 1..rows, Some(Close::default()));
    assert_eq!(write(&worker, done).await, written(rows as u64 - 1));
    (batch, blocks[1].clone())
}

/// A batch whose last row is committed while s2-1 holds its lock and has counted too soon.
async fn with_a_stale_count(db: &TestDb, schedule: &mut Schedule) -> i64 {
    let (batch, last) = all_but_the_last(db, 10).await;
    schedule.run("s2-1", "BEGIN").await;
    let counted = format!("SELECT musterd.complete_scope({batch}, 1, 10, 9, 0)");
    assert_eq!(schedule.run("s2-1", &counted).await.rows(), ["open"]);
    let worker = session(db).await;
    assert_eq!(write(&worker, success(&last, [10], Some(Close::default()))).await, written(1));
    batch
}

/// The timeline of the seed: s2-1 holds the lock and has counted too soon, s2-4 commits the last row and cannot get it.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_held_over_a_stale_count_is_outlasted_by_the_one_with_the_news() {
    let db = TestDb::new().await;
    let mut schedule = Schedule::new(&db, &["s2-1"]).await;
    let (observer, worker) = (db.client().await, session(&db).await);
    for (attempts, resolved) in [(5, true), (1, false)] {
        let batch = with_a_stale_count(&db, &mut schedule).await;
        let s2_4 = completer(&db, attempts);
        let (answer, ()) = tokio::join!(finish(&s2_4, batch), async {
            // Once its first try was denied, the holder ends without having finished anything.
            eventually(PATIENCE, "s2-4 was denied", async || {
                let denied = "SELECT count(*) FROM pg_stat_activity
                     WHERE datname = current_database() AND application_name = 'musterd' AND query = 'ROLLBACK'
                       AND state = 'idle'";
                (ask::<i64>(&observer, denied).await > 0).then_some(())
            })
            .await;
            schedule.run("s2-1", "ROLLBACK").await;
        });
        let state = progress(&observer, batch).await.state;
        if resolved {
            assert_eq!((answer.unwrap(), state), (Completion::Completed, State::Succeeded));
        } else {
            // Without another try it stays open, and only the sweep can find it.
            let error = answer.unwrap_err();
            assert!(
                matches!(error, CompleteError::Contended { why: Completion::Locked, tries: 1, .. }),
                "{error}"
            );
            assert_eq!(state, State::Running);
            assert_eq!(batches::unfinished(&worker).await.unwrap(), [batch]);
            assert_eq!(finish(&s2_4, batch).await.unwrap(), Completion::Completed);
        }
    }
    assert_accounts_balance(&observer).await;
    assert_eq!(ask::<i64>(&observer, "SELECT count(*) FROM musterd.tasks WHERE command = 'tell'").await, 2);
}

/// Of several, one that another transaction has locked is passed by, and found again.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_batch_holds_up_only_itself_and_is_found_by_the_sweep() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let mut schedule = Schedule::new(&db, &["s2-1"]).await;
    for attempts in [1, 2] {
        let locked = with_a_stale_count(&db, &mut schedule).await;
        let (free, last) = all_but_the_last(&db, 3).await;
        assert_eq!(write(&worker, success(&last, [3], Some(Close::default()))).await, written(1));
        let s2_4 = completer(&db, attempts);
        for (id, answer) in s2_4.complete_all(vec![locked, free]).await {
            match answer {
                Ok(answer) => assert_eq!((id, answer), (free, Completion::Completed)),
                Err(error) => {
                    let is_locked = matches!(error, CompleteError::Contended { why: Completion::Locked, tries, .. } if tries == attempts);
                    assert!(id == locked && is_locked, "{id}: {error}");
                }
            }
        }
        assert_eq!(progress(&client, locked).await.state, State::Running);
        assert_eq!(progress(&client, free).await.state, State::Succeeded);
        // No flush asks again; only the sweep can find it.
        assert_eq!(batches::unfinished(&worker).await.unwrap(), [locked]);
        schedule.run("s2-1", "ROLLBACK").await;
        assert_eq!(finish(&s2_4, locked).await.unwrap(), Completion::Completed);
    }
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_finish_at_once_one_does() {
    let db = TestDb::new().await;
    let (batch, last) = all_but_the_last(&db, 3).await;
    let mut one = session(&db).await;
    assert_eq!(write(&one, success(&last, [3], Some(Close::default()))).await, written(1));
    let closed = look(&one, batch).await.unwrap();
    let mut schedule = Schedule::new(&db, &["other"]).await;
    schedule.run("other", "BEGIN").await;
    let end = format!("SELECT musterd.complete_scope({batch}, 1, 3, 3, 0)");
    assert_eq!(schedule.run("other", &end).await.rows(), ["completed"]);
    assert_eq!(complete(&mut one, &closed).await, Completion::Locked);
    schedule.run("other", "COMMIT").await;
    assert_eq!(complete(&mut one, &closed).await, Completion::Ended);
    assert_eq!(look(&one, batch).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_appended_before_the_end_keep_the_batch_open() {
    let db = TestDb::new().await;
    let (batch, last) = all_but_the_last(&db, 3).await;
    let mut worker = session(&db).await;
    assert_eq!(write(&worker, success(&last, [3], Some(Close::default()))).await, written(1));
    // Counted, and then the append comes between the count and the end.
    let closed = look(&worker, batch).await.unwrap();
    let mut schedule = Schedule::new(&db, &["producer", "completer"]).await;
    schedule.run("producer", "BEGIN").await;
    let append = format!("SELECT musterd.append_rows({batch}, '[4]'::jsonb)");
    assert_eq!(schedule.run("producer", &append).await.rows(), ["4"]);
    let end = format!("SELECT musterd.complete_scope({batch}, 1, 3, 3, 0)");
    schedule.blocks("completer", &end).await;
    schedule.run("producer", "COMMIT").await;
    assert_eq!(schedule.resumes("completer").await.rows(), ["open"]);

    // The new row runs; the old count is of another number of rows.
    let block = carve(&worker, 1, 5).await.remove(0);
    assert_eq!(write(&worker, success(&block, [4], Some(Close::default()))).await, written(1));
    assert_eq!(complete(&mut worker, &closed).await, Completion::Stale);
    assert_eq!(finish(&completer(&db, 1), batch).await.unwrap(), Completion::Completed);
    assert_eq!(progress(&db.client().await, batch).await.succeeded, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_appended_after_the_end_are_refused() {
    let db = TestDb::new().await;
    let (batch, last) = all_but_the_last(&db, 3).await;
    let worker = session(&db).await;
    assert_eq!(write(&worker, success(&last, [3], Some(Close::default()))).await, written(1));
    let mut schedule = Schedule::new(&db, &["producer", "completer"]).await;
    schedule.run("completer", "BEGIN").await;
    let end = format!("SELECT musterd.complete_scope({batch}, 1, 3, 3, 0)");
    assert_eq!(schedule.run("completer", &end).await.rows(), ["completed"]);
    let append = format!("SELECT musterd.append_rows({batch}, '[4]'::jsonb)");
    schedule.blocks("producer", &append).await;
    schedule.run("completer", "COMMIT").await;
    assert_eq!(schedule.resumes("producer").await.sqlstate(), "23514");
    assert_accounts_balance(&db.client().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_written_beside_an_abort_is_dropped_at_the_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = session(&db).await;
    let batch = submit(&client, "work", 5, "").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    let mut schedule = Schedule::new(&db, &["operator"]).await;
    schedule.run("operator", "BEGIN").await;
    assert_eq!(
        schedule.run("operator", &format!("SELECT musterd.abort({batch})")).await.rows(),
        ["aborting"]
    );
    // The flush neither waits for the abort nor sees it.
    assert_eq!(write(&worker, success(&block, [1, 2], closing_with_retry(&[3, 4, 5]))).await, written(2));
    schedule.run("operator", "COMMIT").await;
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.blocks").await, 1);
    assert!(take(&worker, 1).await.is_empty(), "no worker runs it");
    assert_eq!(
        batches::worth_a_look(&worker, &[batch]).await.unwrap().0,
        [batches::Over { id: batch, outputs: false }]
    );
    assert_eq!(finish(&completer(&db, 1), batch).await.unwrap(), Completion::Completed);
    let end = progress(&client, batch).await;
    assert_eq!((end.state.as_str(), end.succeeded, end.aborted), ("aborted", 2, 3));
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_taken_before_a_late_flush_of_an_aborted_batch_is_stale() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut worker = session(&db).await;
    let batch = submit(&client, "work", 5, "").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    write(&worker, success(&block, [1], closing_with_retry(&[2]))).await;
    let taken = take(&worker, 1).await.remove(0);
    client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
    // As counted while the retry was still free; since then it was taken and run.
    let early = batches::Closed {
        id: batch,
        uid: block.uid,
        generation: 1,
        rows: 5,
        succeeded: 1,
        failed: 0,
        recorded: 1,
        outputs: false,
        aborting: true,
    };
    assert_eq!(complete(&mut worker, &early).await, Completion::Open);
    assert_eq!(write(&worker, success(&taken, [2], Some(Close::default()))).await, written(1));
    assert_eq!(complete(&mut worker, &early).await, Completion::Stale);
    assert_eq!(finish(&completer(&db, 1), batch).await.unwrap(), Completion::Completed);
    assert_eq!(progress(&client, batch).await.succeeded, 2);
    assert_accounts_balance(&client).await;
}
