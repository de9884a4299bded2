//! L3: what a living worker owns and does not hold is freed; what it holds and does not own is given up.

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

const OFTEN: &str = "[liveness]\nreconcile_interval = \"500ms\"\n[handlers.sleep]\nduration = \"1h\"";

#[tokio::test(flavor = "multi_thread")]
async fn what_a_living_worker_owns_and_does_not_hold_is_freed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, OFTEN).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    // As if a claim had been committed whose reply never came, and whose tokens were forgotten.
    let lose = "WITH b AS (SELECT musterd.submit_batch('noop', ARRAY ['1'::jsonb, '2'], hold => true) AS id),
         n AS (SELECT id FROM b)
         SELECT id FROM n";
    let batch: i64 = ledger.client.query_one(lose, &[]).await.unwrap().get(0);
    let own = "INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, worker, token, claimed_at)
               VALUES ($1, '{[1,3)}', 2, 'default', 'noop', 100, $2, gen_random_uuid(), now())";
    ledger.client.execute("UPDATE musterd.batches SET next_line = 3", &[]).await.unwrap();
    ledger.client.execute("SELECT musterd.release($1)", &[&batch]).await.unwrap();
    ledger.client.execute(own, &[&batch, &worker]).await.unwrap();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(2));
    assert_eq!(metric(&daemon, "musterd_liveness_reconciled_total ").await, 1.0);
    let charged = "SELECT count(*) FROM public.claims WHERE crashes > 0";
    assert_eq!(ledger.number(charged).await, 0, "nothing was started, nothing is charged");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_holds_and_does_not_own_is_given_up() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, OFTEN).start();
    ledger.submit_block("sleep", 3).await;
    ledger.somebody_holds(1, SOON).await;
    // As if PostgreSQL had crashed and lost a claim that was not synced yet.
    ledger
        .client
        .execute(
            "UPDATE musterd.blocks SET worker = NULL, token = NULL, available_at = now() + interval '1 hour'",
            &[],
        )
        .await
        .unwrap();
    daemon.wait_for_log(SOON, |line| line.contains("this block is not ours any more")).await;
    eventually(SOON, "its handler is stopped", async || {
        (metric(&daemon, "musterd_fenced_total ").await > 0.0).then_some(())
    })
    .await;
    assert_eq!(metric(&daemon, "musterd_liveness_reconciled_total ").await, 1.0);
}

/// The same for tasks; and what is owned and held is left alone, however often it is looked at.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_task_is_freed_and_what_is_held_stays() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, OFTEN).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    ledger.submit_block("sleep", 2).await;
    ledger.client.execute("SELECT musterd.enqueue('sleep')", &[]).await.unwrap();
    let held = "SELECT (SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL)
                     + (SELECT count(*) FROM musterd.tasks WHERE worker IS NOT NULL)";
    eventually(SOON, "a block and a task are held", async || (ledger.number(held).await == 2).then_some(()))
        .await;
    let tokens = "SELECT array_agg(token::text ORDER BY token) FROM (
                      SELECT token FROM musterd.blocks UNION ALL SELECT token FROM musterd.task_claims) t";
    let tokens = async || ledger.client.query_one(tokens, &[]).await.unwrap().get::<_, Vec<String>>(0);
    let before = tokens().await;
    // As if a claim had been committed whose reply never came, and whose tokens were forgotten.
    let lose = "SELECT t.id FROM (SELECT musterd.enqueue('noop') AS id OFFSET 0) t, guard.claim(t.id, p_worker => $1)";
    for freed in 1..=2 {
        let lost: i64 = ledger.client.query_one(lose, &[&worker]).await.unwrap().get(0);
        let ended = format!(
            "SELECT count(*) FROM musterd.tasks WHERE id = {lost} AND state = 'succeeded' AND crashes = 0"
        );
        eventually(SOON, "the lost task has run", async || (ledger.number(&ended).await == 1).then_some(()))
            .await;
        // The freed task can have run before the tick that freed it has returned and been counted.
        eventually(SOON, "it is counted", async || {
            (metric(&daemon, "musterd_liveness_reconciled_total ").await == f64::from(freed)).then_some(())
        })
        .await;
    }
    assert_eq!(tokens().await, before);
    assert_eq!(metric(&daemon, "musterd_fenced_total ").await, 0.0);
}

/// A fiber that panics outside its handler loses nothing: what it held is forgotten, and so freed, while the process lives on.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_panicked_fiber_held_runs_again_in_the_same_process() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let batch = ledger.submit_block("noop", 3).await;
    let panics = Daemon::builder(&db, OFTEN).env("MUSTERD_FAILPOINTS", "fiber.start=1*panic").start();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(3));
    panics.wait_for_log(SOON, |line| line.contains("a fiber panicked")).await;
    assert_eq!(ledger.number("SELECT count(DISTINCT worker) FROM public.claims").await, 1);
    assert_eq!(metric(&panics, "musterd_liveness_reconciled_total ").await, 1.0);
}
