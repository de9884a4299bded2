//! Operators and producers that meet a flush, a completion or a budget that was decided a moment ago.

use musterd::store::batches::Completion;
use musterd::store::facts::{Budget, check_budget};
use musterd::store::flush::Close;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{
    backend, carve, closing_with_retry, complete, failure, lines, look, session, success, take, write,
    written,
};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::value;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{PATIENCE, ask, assert_accounts_balance, submit};

/// A COMMIT that makes a block waits for the advisory lock 17, as it would for a slow standby.
const SLOW_COMMIT: &str = "
CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(17); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON musterd.blocks DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.worker IS NULL) EXECUTE FUNCTION public.wait()";

/// FINDINGS 1: the close sees a held batch, its COMMIT takes a while, and the release comes between.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_close_gives_back_beside_a_release_is_taken_up() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    client.batch_execute(SLOW_COMMIT).await.unwrap();
    let mut schedule = Schedule::new(&db, &["operator", "standby"]).await;
    for (steer, undo) in [("hold", "release"), ("pause_queue", "resume_queue")] {
        let batch = submit(&client, "work", 5, "").await;
        let subject = if steer == "hold" { batch.to_string() } else { "'default'".to_owned() };
        let block = carve(&worker, 1, 5).await.remove(0);
        schedule.run("operator", &format!("SELECT musterd.{steer}({subject})")).await.rows();
        schedule.run("standby", "SELECT pg_advisory_lock(17)").await;
        let waiting = backend(&worker).await;
        let close = write(&worker, success(&block, [1], closing_with_retry(&[2])));
        let (written_rows, ()) = tokio::join!(close, async {
            eventually(PATIENCE, "the flush is at its COMMIT", async || {
                let blocked = format!("SELECT cardinality(pg_blocking_pids({waiting})) > 0");
                ask::<bool>(&client, &blocked).await.then_some(())
            })
            .await;
            schedule.run("operator", &format!("SELECT musterd.{undo}({subject})")).await.rows();
            schedule.run("standby", "SELECT pg_advisory_unlock(17)").await;
        });
        assert_eq!(written_rows, written(1));
        let taken = take(&worker, 2).await;
        let found: Vec<(String, i32)> =
            taken.iter().map(|block| (block.lines.to_string(), block.attempt)).collect();
        assert_eq!(found.len(), 2, "{steer}: {found:?}");
        assert!(
            found.contains(&("{[2,3)}".into(), 2)) && found.contains(&("{[3,6)}".into(), 1)),
            "{found:?}"
        );
        for block in taken {
            let all: Vec<i32> = block.lines.iter().collect();
            assert!(write(&worker, success(&block, all, Some(Close::default()))).await.is_some());
        }
    }
}

/// The other way about: held at the moment of the take, whatever the block says.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_given_back_before_a_hold_waits_for_the_release_with_its_own_due_time() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 5, "").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    assert_eq!(write(&worker, success(&block, [1], closing_with_retry(&[2]))).await, written(1));
    value(&client, &format!("SELECT musterd.hold({batch})")).await;
    let parked = "SELECT count(*) FROM musterd.blocks WHERE available_at > now()";
    assert_eq!(ask::<i64>(&client, parked).await, 0, "nothing is parked");
    assert!(take(&worker, 8).await.is_empty());
    value(&client, &format!("SELECT musterd.release({batch})")).await;
    assert_eq!(take(&worker, 8).await.len(), 2);
}

/// A batch of `rows` rows that has ended with its first line failed.
async fn ended_with_a_failure(db: &TestDb, rows: i32, options: &str) -> i64 {
    let (client, mut worker) = (db.client().await, session(db).await);
    let batch = submit(&client, "work", rows, options).await;
    let block = carve(&worker, 1, rows).await.remove(0);
    let mut part = failure(&block, [1], Some(Close::default()));
    part.outcomes.succeed_all(&musterd::lines::Lines::span(2, rows));
    assert_eq!(write(&worker, part).await, written(rows as u64));
    let closed = look(&worker, batch).await.unwrap();
    assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
    batch
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_appended_beside_a_redrive_run_in_its_generation_or_are_refused() {
    let db = TestDb::new().await;
    let (client, mut worker) = (db.client().await, session(&db).await);
    let mut schedule = Schedule::new(&db, &["operator", "producer"]).await;
    for end in ["ROLLBACK", "COMMIT"] {
        let batch = ended_with_a_failure(&db, 3, "").await;
        let append = format!("SELECT musterd.append_rows({batch}, '[4, 5]'::jsonb)");
        schedule.run("operator", "BEGIN").await;
        let redrive = format!("SELECT state FROM musterd.redrive({batch})");
        assert_eq!(schedule.run("operator", &redrive).await.rows(), ["running"]);
        schedule.blocks("producer", &append).await;
        schedule.run("operator", end).await;
        if end == "ROLLBACK" {
            assert_eq!(schedule.resumes("producer").await.sqlstate(), "23514", "it has ended");
            continue;
        }
        assert_eq!(schedule.resumes("producer").await.rows(), ["5"]);
        let (again, fresh) = (take(&worker, 1).await.remove(0), carve(&worker, 1, 5).await.remove(0));
        assert_eq!((lines(std::slice::from_ref(&again)), again.generation), (vec![(1, 1)], 2));
        assert_eq!((lines(std::slice::from_ref(&fresh)), fresh.generation), (vec![(4, 5)], 2));
        assert_eq!(write(&worker, success(&fresh, 4..=5, Some(Close::default()))).await, written(2));
        assert_eq!(look(&worker, batch).await, None, "a block is in hand");
        // It fails once more: the failure before does not stand in its way, and does not count.
        assert_eq!(write(&worker, failure(&again, [1], Some(Close::default()))).await, written(1));
        let closed = look(&worker, batch).await.unwrap();
        assert_eq!((closed.generation, closed.rows, closed.succeeded, closed.failed), (2, 5, 4, 1));
        // Redriven twice, each failure has its history.
        assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
        assert_eq!(value(&client, &redrive).await, "running");
        let history = "SELECT string_agg(line || ' in ' || generation, ', ' ORDER BY generation) FROM musterd.failures_history";
        assert_eq!(value(&client, history).await, "1 in 1, 1 in 2");
        let last = take(&worker, 1).await.remove(0);
        assert_eq!(write(&worker, success(&last, [1], Some(Close::default()))).await, written(1));
        let closed = look(&worker, batch).await.unwrap();
        assert_eq!((closed.generation, closed.succeeded, closed.failed), (3, 5, 0));
        assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
    }
    assert_accounts_balance(&client).await;
}

/// From now on the count of failures is taken, and then the advisory lock 21 is waited for.
const SLOW_COUNT: &str = "
CREATE OR REPLACE FUNCTION musterd.failed_now(p_batch musterd.batches) RETURNS bigint LANGUAGE plpgsql SET lock_timeout = 0 AS $$
DECLARE
    v_failed bigint := (SELECT COALESCE(sum(o.failed), 0) FROM musterd.outcomes o
                         WHERE o.batch_id = p_batch.id AND o.generation = p_batch.generation);
BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(21); RETURN v_failed; END $$";

/// FINDINGS 21: what was counted in one generation decides nothing in the next.
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_was_spent_in_an_older_generation_stops_nothing() {
    let db = TestDb::new().await;
    let (client, mut worker, completer) = (db.client().await, session(&db).await, session(&db).await);
    client.batch_execute(SLOW_COUNT).await.unwrap();
    let mut schedule = Schedule::new(&db, &["gate"]).await;
    for action in ["abort", "hold"] {
        let batch = submit(&client, "work", 3, &format!("on_budget => '{action}'")).await;
        let block = carve(&worker, 1, 2).await.remove(0);
        let rest = carve(&worker, 1, 2).await.remove(0);
        assert_eq!(write(&worker, failure(&block, 1..=2, Some(Close::default()))).await, written(2));
        schedule.run("gate", "SELECT pg_advisory_lock(21)").await;
        let waiting = backend(&completer).await;
        let (verdict, ()) = tokio::join!(check_budget(&completer, batch), async {
            eventually(PATIENCE, "it has counted two failures", async || {
                let blocked = format!("SELECT cardinality(pg_blocking_pids({waiting})) > 0");
                ask::<bool>(&client, &blocked).await.then_some(())
            })
            .await;
            // Meanwhile the batch ends, and is driven again.
            assert_eq!(write(&worker, success(&rest, [3], Some(Close::default()))).await, written(1));
            let closed = look(&worker, batch).await.unwrap();
            assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
            assert_eq!(
                value(&client, &format!("SELECT state FROM musterd.redrive({batch})")).await,
                "running"
            );
            schedule.run("gate", "SELECT pg_advisory_unlock(21)").await;
        });
        assert_eq!(verdict.unwrap(), Budget::Within { may_fail: 0, has_failed: 0 }, "{action}");
        let state = format!("SELECT state FROM musterd.tasks WHERE id = {batch}");
        assert_eq!(value(&client, &state).await, "running");
        let again = take(&worker, 1).await.remove(0);
        assert_eq!(write(&worker, success(&again, 1..=2, Some(Close::default()))).await, written(2));
        let closed = look(&worker, batch).await.unwrap();
        assert_eq!(complete(&mut worker, &closed).await, Completion::Completed);
    }
    assert_accounts_balance(&client).await;
}

/// The decision does not wait for a producer that has the batch locked, and is taken once it has not.
#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_of_a_locked_batch_is_asked_for_again() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 10, "max_failed_percent => 10, on_budget => 'hold'").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    assert_eq!(write(&worker, failure(&block, 1..=2, None)).await, written(2));
    let mut schedule = Schedule::new(&db, &["producer"]).await;
    for (end, verdict) in
        [("ROLLBACK", Budget::Stopped), ("COMMIT", Budget::Within { may_fail: 2, has_failed: 2 })]
    {
        schedule.run("producer", "BEGIN").await;
        let ten = format!(
            "SELECT musterd.append_rows({batch}, (SELECT jsonb_agg(n) FROM generate_series(11, 20) n))"
        );
        assert_eq!(schedule.run("producer", &ten).await.rows(), ["20"]);
        assert_eq!(check_budget(&worker, batch).await.unwrap(), Budget::Busy);
        schedule.run("producer", end).await;
        assert_eq!(check_budget(&worker, batch).await.unwrap(), verdict, "{end}");
        value(&client, &format!("SELECT musterd.release({batch})")).await;
        // The release has forgiven two; for the second round that is undone.
        client.execute("UPDATE musterd.batches SET forgiven = 0", &[]).await.unwrap();
    }
}
