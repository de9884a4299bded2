//! The life of a batch as the SQL API shows it: states, progress, hold, abort, pause, and the answers of complete_scope.

use musterd::store::facts::{Budget, check_budget};
use musterd::store::flush::Close;
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{
    carve, closing_with_retry, failure, lines, session, success, take, write, written,
};
use crate::suite::support::sql::{refusal, rows, value};

async fn progress(client: &Client, id: i64) -> String {
    let sql = "SELECT state, rows, queued, running, succeeded, failed, aborted FROM musterd.batch_progress WHERE id = ";
    value(client, &format!("{sql}{id}")).await
}

async fn states(client: &Client, id: i64) -> String {
    let sql =
        "SELECT string_agg(state || coalesce('@' || attempt, ''), ' ' ORDER BY line) FROM musterd.batch_rows";
    value(client, &format!("{sql}({id})")).await
}

async fn complete(client: &Client, id: i64, counts: &str) -> String {
    value(client, &format!("SELECT musterd.complete_scope({id}{counts})")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_shows_every_step_of_its_way() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let submit = "SELECT musterd.submit_batch('work', '[1, 2, 3, 4, 5]'::jsonb, on_done => 'tell', max_failed_percent => 20,
                                              context => '{\"tenant\": 7}')";
    let id: i64 = value(&client, submit).await.parse().unwrap();
    let uncle = value(&client, &format!("SELECT musterd.enqueue_after('after', '{{}}', ARRAY[{id}])")).await;
    assert_eq!(progress(&client, id).await, "queued|5|5|0|0|0|0");
    let block = carve(&worker, 1, 3).await.remove(0);
    assert_eq!(progress(&client, id).await, "running|5|2|3|0|0|0");
    assert_eq!(states(&client, id).await, "running@1 running@1 running@1 queued queued");
    assert_eq!(write(&worker, success(&block, [1], None)).await, written(1));
    assert_eq!(progress(&client, id).await, "running|5|2|2|1|0|0");
    assert_eq!(states(&client, id).await, "succeeded@1 running@1 running@1 queued queued");
    assert_eq!(complete(&client, id, ", 1, 5, 1, 0").await, "open", "a block is held, lines are left");
    assert_eq!(write(&worker, success(&block, [2], closing_with_retry(&[3]))).await, written(1));
    assert_eq!(progress(&client, id).await, "running|5|3|0|2|0|0");
    assert_eq!(states(&client, id).await, "succeeded@1 succeeded@1 queued@2 queued queued");

    assert_eq!(value(&client, &format!("SELECT musterd.hold({id}) || musterd.hold({id})")).await, "heldheld");
    assert_eq!(progress(&client, id).await, "held|5|3|0|2|0|0");
    assert!(carve(&worker, 1, 3).await.is_empty() && take(&worker, 1).await.is_empty());
    assert_eq!(value(&client, &format!("SELECT musterd.append_rows({id}, '[6]'::jsonb)")).await, "6");
    assert_eq!(
        value(&client, &format!("SELECT musterd.release({id}) || musterd.release({id})")).await,
        "runningrunning"
    );
    let fresh = carve(&worker, 1, 3).await.remove(0);
    let again = take(&worker, 1).await.remove(0);
    assert_eq!((lines(std::slice::from_ref(&again)), again.attempt), (vec![(3, 3)], 2));
    assert_eq!(write(&worker, failure(&again, [3], Some(Close::default()))).await, written(1));
    assert_eq!(complete(&client, id, ", 1, 6, 2, 1").await, "open", "a block is held");
    assert_eq!(write(&worker, success(&fresh, 4..=6, Some(Close::default()))).await, written(3));
    for stale in ["", ", 1, 5, 4, 1", ", 1, 6, 4, 1", ", 2, 6, 5, 1", ", 1, 6, 6, 1"] {
        assert_eq!(complete(&client, id, stale).await, "stale", "{stale}");
    }
    assert_eq!(complete(&client, id, ", 1, 6, 5, 1, '{\"files\": []}'").await, "completed");
    assert_eq!(complete(&client, id, ", 1, 6, 5, 1").await, "ended");
    assert_eq!(complete(&client, 4711, "").await, "missing");
    assert_eq!(progress(&client, id).await, "succeeded|6|0|0|5|1|0");
    assert_eq!(
        states(&client, id).await,
        "succeeded@1 succeeded@1 failed@2 succeeded@1 succeeded@1 succeeded@1"
    );
    let told =
        "SELECT state, idempotency_key, payload ->> 'state', payload -> 'context', payload -> 'outputs'
                  FROM musterd.tasks WHERE command = 'tell'";
    let key = format!("batch/{id}/1/done");
    assert_eq!(
        rows(&client, told).await,
        [format!("queued|{key}|succeeded|{{\"tenant\": 7}}|{{\"files\": []}}")]
    );
    assert_eq!(
        value(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {uncle}")).await,
        "queued"
    );
    let all = format!("SELECT musterd.abort({id}), musterd.hold({id}), musterd.release({id})");
    assert_eq!(value(&client, &all).await, "succeeded|succeeded|succeeded", "an ended batch stays as it is");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_not_decided_in_an_old_snapshot() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let said =
            refusal(&client, &format!("BEGIN ISOLATION LEVEL {level}; SELECT musterd.complete_scope(1)"))
                .await;
        assert!(said.starts_with("25000 complete_scope(1) needs READ COMMITTED"), "{said}");
        client.batch_execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_writes_nothing_per_row() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let id: i64 =
        value(&client, "SELECT musterd.submit_batch('work', '[1, 2, 3, 4]'::jsonb)").await.parse().unwrap();
    let block = carve(&worker, 1, 2).await.remove(0);
    let calls =
        format!("SELECT musterd.abort({id}), musterd.abort({id}), musterd.hold({id}), musterd.release({id})");
    assert_eq!(value(&client, &calls).await, "aborting|aborting|aborting|aborting");
    assert_eq!(complete(&client, id, ", 1, 4, 0, 0").await, "open", "a block is held");
    assert_eq!(progress(&client, id).await, "running|4|2|2|0|0|0");
    assert_eq!(write(&worker, success(&block, [1], closing_with_retry(&[2]))).await, written(1));
    assert_eq!(complete(&client, id, ", 1, 4, 0, 0").await, "stale");
    assert_eq!(complete(&client, id, ", 1, 4, 1, 0").await, "stale", "counted before the last flush");
    assert_eq!(complete(&client, id, ", 1, 4, 1, 0, p_recorded => 1").await, "completed");
    assert_eq!(progress(&client, id).await, "aborted|4|0|0|1|0|3");
    assert_eq!(states(&client, id).await, "succeeded@1 aborted aborted aborted");
    let left =
        "SELECT (SELECT count(*) FROM musterd.results) || '/' || (SELECT count(*) FROM musterd.blocks)";
    assert_eq!(value(&client, left).await, "1/0");
    let error = format!("SELECT error FROM musterd.tasks WHERE id = {id}");
    assert_eq!(value(&client, &error).await, "aborted with 3 of 4 rows not run");
    for call in ["hold", "release", "abort"] {
        assert!(
            refusal(&client, &format!("SELECT musterd.{call}(4711)")).await.starts_with("P0002"),
            "{call}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_batch_and_a_paused_queue_are_two_reasons_to_wait() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let id: i64 =
        value(&client, "SELECT musterd.submit_batch('work', '[1, 2, 3]'::jsonb)").await.parse().unwrap();
    let block = carve(&worker, 1, 1).await.remove(0);
    write(&worker, success(&block, [], closing_with_retry(&[1]))).await;
    let can_claim = async || {
        worker.batch_execute("BEGIN").await.unwrap();
        let claimed = (carve(&worker, 1, 1).await.len(), take(&worker, 1).await.len());
        worker.batch_execute("ROLLBACK").await.unwrap();
        claimed
    };
    assert_eq!(can_claim().await, (1, 1));
    let steps = [
        ("pause_queue('default')", (0, 0)),
        (&format!("hold({id})"), (0, 0)),
        ("resume_queue('default')", (0, 0)),
        (&format!("release({id})"), (1, 1)),
        (&format!("hold({id})"), (0, 0)),
        ("pause_queue('default')", (0, 0)),
        (&format!("release({id})"), (0, 0)),
        ("resume_queue('default')", (1, 1)),
    ];
    for (step, expected) in steps {
        client.batch_execute(&format!("SELECT musterd.{step}")).await.unwrap();
        assert_eq!(can_claim().await, expected, "{step}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_percentage_is_taken_as_the_user_wrote_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // 0.7 % of 1000 is 7, though not in binary; so at the end, and so for the budget.
    for (failed, state) in [(7, "succeeded"), (8, "failed")] {
        let submit =
            "SELECT musterd.submit_batch('work', ARRAY(SELECT to_jsonb(g) FROM generate_series(1, 1000) g),
                                                  max_failed_percent => 0.7, on_budget => 'abort')";
        let id: i64 = value(&client, submit).await.parse().unwrap();
        let fill = format!(
            "UPDATE musterd.batches SET next_line = 1000 WHERE id = {id};
             SELECT guard.result({id}, n, CASE WHEN n <= {failed} THEN 'failed' ELSE 'succeeded' END) FROM generate_series(1, 999) n"
        );
        client.batch_execute(&fill).await.unwrap();
        let worker = session(&db).await;
        let (_, spent) = musterd::store::batches::worth_a_look(&worker, &[id]).await.unwrap();
        assert_eq!(spent.is_empty(), failed == 7, "{failed}");
        // With nothing left there is nothing to stop.
        let last = format!(
            "UPDATE musterd.batches SET next_line = 1001 WHERE id = {id}; SELECT guard.result({id}, 1000, 'succeeded')"
        );
        client.batch_execute(&last).await.unwrap();
        let within = Budget::Within { may_fail: 7, has_failed: failed };
        assert_eq!(check_budget(&worker, id).await.unwrap(), within, "{failed}");
        let counts = format!(", 1, 1000, {}, {failed}", 1_000 - failed);
        assert_eq!(complete(&client, id, &counts).await, "completed");
        assert_eq!(value(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {id}")).await, state);
    }
}
