//! Tasks that wait for a fiber, locks that others hold for long, and tickets that are gone: each holds up only itself.

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::refusal;
use crate::suite::support::tasks::{QUICK, becomes, end_of, number, text};
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

const ONE_FIBER: &str = "[queues.default]\nfibers = 1\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"";

/// A replica whose only fiber is busy for long may claim quick tasks ahead of it; another replica runs them.
#[tokio::test(flavor = "multi_thread")]
async fn quick_tasks_do_not_wait_behind_a_slow_one_while_another_replica_is_idle() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let one = Daemon::builder(&db, ONE_FIBER).start();
    one.wait_ready().await;
    // From these it knows that they are quick.
    text(&client, "SELECT count(musterd.enqueue('noop')) FROM generate_series(1, 50)").await;
    becomes(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'", "50").await;
    let longest = "SELECT (1000 * EXTRACT(EPOCH FROM max(t.finished_at - t.created_at)))::bigint FROM
        (SELECT * FROM musterd.tasks WHERE command = 'noop' ORDER BY id DESC LIMIT 100) t";
    let usual = number(&client, longest).await;
    let slow = number(&client, "SELECT musterd.enqueue('sleep')").await;
    becomes(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {slow}"), "running").await;
    let other = Daemon::builder(&db, ONE_FIBER).start();
    other.wait_ready().await;
    let mut waited = Vec::new();
    for _ in 0..3 {
        text(&client, "SELECT count(musterd.enqueue('noop')) FROM generate_series(1, 100)").await;
        let open = "SELECT count(*) FROM musterd.tasks WHERE command = 'noop' AND state <> 'succeeded'";
        becomes(&client, open, "0").await;
        waited.push(number(&client, longest).await);
    }
    // A machine that does something else makes all of them wait, also without a slow one.
    waited.sort_unstable();
    assert!(
        waited[1] < 1000 + 10 * usual,
        "a hundred quick tasks waited {waited:?} ms, and {usual} ms before"
    );
    becomes(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'", "350").await;
    let charged = "SELECT max(attempt) || ' ' || max(crashes) FROM musterd.tasks";
    assert_eq!(text(&client, charged).await, "1 0", "what was given back is charged nothing");
    assert_eq!(text(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {slow}")).await, "running");
    text(&client, &format!("SELECT musterd.abort({slow})")).await;
}

/// FINDINGS 3: a producer that waits for a task, spawns for it or aborts it in a transaction that it leaves open.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_a_producer_has_locked_keeps_no_other_outcome_from_being_written() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, "[handlers.sleep]\nduration = \"300ms\"").start();
    daemon.wait_ready().await;
    let locked = number(&ledger.client, "SELECT musterd.enqueue('sleep')").await;
    let mut schedule = Schedule::new(&db, &["producer", "other"]).await;
    schedule.run("producer", "BEGIN").await;
    let wait = format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{locked}])");
    schedule.run("producer", &wait).await.rows();
    eventually(SOON, "the outcome is aside", async || {
        (metric(&daemon, "musterd_batcher_aside ").await == 1.0).then_some(())
    })
    .await;
    // Everything else goes on: rows, tasks, other producers.
    let batch = ledger.submit("noop", 1000).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(1000));
    let free = number(&ledger.client, "SELECT musterd.enqueue('noop')").await;
    assert_eq!(end_of(&ledger.client, free).await, "succeeded");
    schedule.run("other", "SELECT musterd.enqueue('noop')").await.rows();
    assert_eq!(
        text(&ledger.client, &format!("SELECT state FROM musterd.tasks WHERE id = {locked}")).await,
        "running"
    );
    assert_eq!(daemon.get("/readyz").await.unwrap().0, 200);
    schedule.run("producer", "COMMIT").await;
    assert_eq!(end_of(&ledger.client, locked).await, "succeeded");
    becomes(&ledger.client, "SELECT count(*) FROM musterd.tasks WHERE state <> 'succeeded'", "0").await;
    assert_eq!(metric(&daemon, "musterd_fenced_total ").await, 0.0);
}

/// L10: nothing but a ticket lets a queued task be claimed. One that is gone, for whatever reason, is issued again by the sweep.
#[tokio::test(flavor = "multi_thread")]
async fn a_queued_task_without_a_ticket_gets_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let task = number(&client, "SELECT musterd.enqueue('noop')").await;
    let later = number(&client, "SELECT musterd.enqueue('noop', delay => '1 hour')").await;
    let held = number(&client, "SELECT musterd.enqueue('noop')").await;
    text(&client, &format!("SELECT musterd.hold({held})")).await;
    assert_eq!(number(&client, "SELECT musterd.sweep_tickets()").await, 0);
    let lose = "DELETE FROM musterd.task_tickets; UPDATE musterd.task_records SET created_at = now() - interval '1 hour'";
    client.batch_execute(lose).await.unwrap();
    assert_eq!(number(&client, "SELECT musterd.sweep_tickets()").await, 2);
    assert_eq!(number(&client, "SELECT musterd.sweep_tickets()").await, 0);
    let tickets = "SELECT string_agg(i::text || ' ' || k.ready, ',' ORDER BY i) FROM musterd.task_tickets k, musterd.task_ids(k.tasks) i";
    assert_eq!(text(&client, tickets).await, format!("{task} true,{later} false"));
    let _daemon = Daemon::builder(&db, "").start();
    assert_eq!(end_of(&client, task).await, "succeeded");
}

/// FINDINGS 11: what is read after a lock must be as new as the lock.
#[tokio::test(flavor = "multi_thread")]
async fn operators_functions_refuse_a_snapshot_that_is_older_than_their_locks() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let task = number(&client, "SELECT musterd.enqueue('noop')").await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for call in ["abort", "hold", "release", "retry_task"] {
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
            let said = refusal(&client, &format!("SELECT musterd.{call}({task})")).await;
            assert_eq!(
                said,
                format!("25001 this needs READ COMMITTED, and the transaction is {level}"),
                "{call}"
            );
            client.batch_execute("ROLLBACK").await.unwrap();
        }
    }
    assert_eq!(text(&client, &format!("SELECT musterd.abort({task})")).await, "aborted");
}

/// FINDINGS 11: waits that nothing takes away (a dependency that was deleted, an end that was missed).
#[tokio::test(flavor = "multi_thread")]
async fn the_sweep_starts_uncles_whose_dependencies_are_gone_or_have_ended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gone = number(&client, "SELECT musterd.enqueue('unheard_of')").await;
    let missed = number(&client, "SELECT musterd.enqueue('unheard_of')").await;
    let one = number(&client, &format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{gone}])")).await;
    let other =
        number(&client, &format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{missed}])")).await;
    let by_hand = format!(
        "DELETE FROM musterd.task_records WHERE id = {gone};
         UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() WHERE id = {missed}"
    );
    client.batch_execute(&by_hand).await.unwrap();
    let _daemon = Daemon::builder(&db, "[completion]\nsweep_min = \"1s\"\nsweep_max = \"2s\"").start();
    for uncle in [one, other] {
        assert_eq!(end_of(&client, uncle).await, "succeeded");
    }
}

/// FINDINGS 23b and 23c.
#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_uncle_waits_again_and_keys_of_batches_are_not_for_producers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let before = number(&client, "SELECT musterd.enqueue('noop')").await;
    let uncle =
        number(&client, &format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{before}])")).await;
    assert_eq!(text(&client, &format!("SELECT musterd.abort({uncle})")).await, "aborted");
    assert_eq!(text(&client, &format!("SELECT musterd.retry_task({uncle})")).await, "scheduled");
    let said = refusal(&client, "SELECT musterd.enqueue('noop', idempotency_key => 'batch/17/1/done')").await;
    assert!(said.starts_with("22023 idempotency_key is \"batch/17/1/done\""), "{said}");
    let _daemon = Daemon::builder(&db, "").start();
    assert_eq!(end_of(&client, uncle).await, "succeeded");
    let order = format!(
        "SELECT u.claimed_at >= b.finished_at FROM musterd.tasks u, musterd.tasks b WHERE u.id = {uncle} AND b.id = {before}"
    );
    assert_eq!(text(&client, &order).await, "t");
}

/// FINDINGS 19: the batch of a sibling is locked at the moment when a failure is to abort it.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_batch_that_was_locked_is_aborted_when_it_is_free() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = number(
        &client,
        "INSERT INTO musterd.task_records (command, state, on_child_failure) VALUES ('p', 'waiting', 'abort_siblings') RETURNING id",
    )
    .await;
    let batch = number(
        &client,
        &format!("SELECT musterd.submit_batch('unheard_of', '[1, 2]', parent_id => {parent})"),
    )
    .await;
    let failed = format!(
        "INSERT INTO musterd.task_records (command, parent_id, state, finished_at) VALUES ('c', {parent}, 'failed', now())"
    );
    client.batch_execute(&failed).await.unwrap();
    let mut schedule = Schedule::new(&db, &["producer", "worker"]).await;
    schedule.run("producer", "BEGIN").await;
    schedule
        .run("producer", &format!("SELECT 1 FROM musterd.batches WHERE id = {batch} FOR UPDATE"))
        .await
        .rows();
    let complete = format!("SELECT musterd.complete_scope({parent})");
    assert_eq!(schedule.run("worker", &complete).await.rows(), ["locked"], "it is to be tried again");
    let listed = format!("SELECT count(*) FROM musterd.parents_aborting WHERE id = {parent}");
    assert_eq!(number(&client, &listed).await, 1, "and the sweep knows of it");
    schedule.run("producer", "COMMIT").await;
    let _daemon = Daemon::builder(&db, "[completion]\nsweep_min = \"1s\"\nsweep_max = \"2s\"").start();
    assert_eq!(end_of(&client, parent).await, "failed");
    assert_eq!(
        text(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {batch}")).await,
        "aborted"
    );
}

/// Enqueueing takes no lock that another producer or a worker waits for.
#[tokio::test(flavor = "multi_thread")]
async fn a_producers_open_transaction_delays_no_other_producer_and_no_worker() {
    let db = TestDb::new().await;
    let (client, open) = (db.client().await, db.client().await);
    let _daemon = Daemon::builder(&db, QUICK).start();
    let enqueue =
        "SELECT musterd.enqueue('noop'), musterd.enqueue('noop', dedup_key => gen_random_uuid()::text);
         SELECT count(*) FROM musterd.enqueue_many('noop', array_fill('{}'::jsonb, ARRAY[1000]));
         INSERT INTO musterd.tasks (command) VALUES ('noop')";
    open.batch_execute(&format!("BEGIN; {enqueue}")).await.unwrap();
    // A wait for what the open transaction has locked would end in an error. Commits of others are waited for: each that notifies holds
    // a lock of the whole server for a moment.
    client.batch_execute(&format!("SET lock_timeout = '10s'; {enqueue}")).await.unwrap();
    becomes(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'", "1003").await;
    open.batch_execute("COMMIT").await.unwrap();
    becomes(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'", "2006").await;
}

/// A worker that was just told of an abort cancels the try that was aborted and not the one that an operator asked for since.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_retried_right_after_its_abort_runs_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = "[handlers.sleep]\nduration = \"2s\"\n[liveness]\nreconcile_interval = \"5m\"";
    let daemon = Daemon::builder(&db, config).start();
    daemon.wait_ready().await;
    let task = number(&client, "SELECT musterd.enqueue('sleep')").await;
    let state = format!("SELECT state FROM musterd.tasks WHERE id = {task}");
    becomes(&client, &state, "running").await;
    assert_eq!(text(&client, &format!("SELECT musterd.abort({task})")).await, "aborted");
    assert_eq!(text(&client, &format!("SELECT musterd.retry_task({task})")).await, "queued");
    assert_eq!(end_of(&client, task).await, "succeeded");
    // A claim that had been cancelled would have waited for the reconciliation, minutes later.
    let took =
        format!("SELECT finished_at - claimed_at < interval '1 minute' FROM musterd.tasks WHERE id = {task}");
    assert_eq!(text(&client, &took).await, "t");
}

/// What a producer asks for ends at the operator's limits.
#[tokio::test(flavor = "multi_thread")]
async fn timeouts_and_tries_that_a_producer_asks_for_end_at_the_operator_s_limits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[retry]\nmax_attempts = 1\nlimit = 2\nbase = \"10ms\"\nmax = \"10ms\"
        [handlers.sleep]\nduration = \"1h\"\ntimeout = \"50ms\"\nmax_timeout = \"100ms\"";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let task =
        number(&client, "SELECT musterd.enqueue('sleep', timeout => '20 days', max_attempts => 1000)").await;
    let batch = number(
        &client,
        "SELECT musterd.submit_batch('sleep', '[1]', row_timeout => '20 days', max_attempts => 1000)",
    )
    .await;
    becomes(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {task}"), "failed").await;
    becomes(&client, &format!("SELECT state FROM musterd.batch_progress WHERE id = {batch}"), "failed").await;
    let task = text(&client, &format!("SELECT attempt, error FROM musterd.tasks WHERE id = {task}")).await;
    assert_eq!(task, "2|ran longer than its timeout of 100ms");
    let row = text(&client, &format!("SELECT attempt, error FROM musterd.batch_row({batch}, 1)")).await;
    assert_eq!(row, "2|ran longer than its timeout of 100ms");
}
