//! FINDINGS 18: what hits every row is no row's fault. It is waited for, and nothing of it stays with any row.

use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, progress, submit, succeeded_with,
};

/// Breaks every write of outcomes by `breaking`, sees the worker try again and again, ends the trouble by `fixing`, and sees every row succeed.
async fn blames_no_row(breaking: &str, fixing: &str) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| async move { succeeded_with(&call.line.to_string()) });
    let worker = Worker::start(&db, "[queues.default]\nfibers = 3", &[("work", script.clone())]).await;
    let warm = submit(&client, "work", 10, "").await;
    assert_eq!(end_of(&client, warm).await.0, "succeeded");
    client.batch_execute(breaking).await.unwrap();
    let batch = submit(&client, "work", 300, "").await;
    let refused = worker.metric("musterd_batcher_rollbacks_total").await;
    // Long enough to come down to single rows, and to try those more than once.
    eventually(PATIENCE, "it has tried single rows", async || {
        (worker.metric("musterd_batcher_rollbacks_total").await > refused + 40.0).then_some(())
    })
    .await;
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.failures").await, 0, "a row was blamed");
    assert_eq!(progress(&client, batch).await.succeeded, 0);
    client.batch_execute(fixing).await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 300, 0, 0));
    assert!(script.runs().values().all(|runs| *runs == 1), "outcomes were thrown away");
    results_are_right(&client, 310).await;
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

async fn results_are_right(client: &Client, count: i64) {
    let right = "SELECT count(*) FROM musterd.results WHERE result = to_jsonb(line)";
    assert_eq!(ask::<i64>(client, right).await, count);
}

/// A trigger of the user's that refuses what `when` says.
fn trigger(when: &str, sqlstate: &str) -> String {
    format!(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION 'not today' USING ERRCODE = '{sqlstate}'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON musterd.outcomes FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION public.refuse()"
    )
}

const NO_TRIGGER: &str = "DROP TRIGGER refuse ON musterd.outcomes";

/// Of an audit trigger that refuses everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_that_refuses_every_outcome_blames_no_row() {
    blames_no_row(&trigger("true", "P0001"), NO_TRIGGER).await;
}

/// Only successes: a plain failure in the row's place would be taken, and is not the row's due all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_that_refuses_every_success_blames_no_row() {
    blames_no_row(&trigger("NEW.succeeded > 0", "P0001"), NO_TRIGGER).await;
}

/// The stop before the wraparound of transaction ids, or a full queue of notifications.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_the_server_blames_no_row() {
    blames_no_row(&trigger("true", "54000"), NO_TRIGGER).await;
}

/// A sequence behind its table, after a logical replication or a restore of the data alone: here of an
/// audit table.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_behind_its_table_blames_no_row() {
    let log = "CREATE TABLE public.log (id int PRIMARY KEY); INSERT INTO public.log SELECT generate_series(1, 100000);
        CREATE SEQUENCE public.log_ids MAXVALUE 100000 CYCLE;
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO public.log VALUES (nextval('public.log_ids')); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER INSERT ON musterd.outcomes FOR EACH ROW EXECUTE FUNCTION public.note()";
    blames_no_row(log, "DELETE FROM public.log").await;
}

/// The ledger itself: a refusal by one of its own keys is a fault of ours, or of the disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_by_a_key_of_the_ledger_blames_no_row() {
    for (sqlstate, constraint) in [("23505", "outcomes_pkey"), ("23P01", "no_line_twice"), ("XX001", "")] {
        let refuse = format!(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN RAISE EXCEPTION 'key' USING ERRCODE = '{sqlstate}', SCHEMA = 'musterd', TABLE = 'outcomes', CONSTRAINT = '{constraint}'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON musterd.outcomes FOR EACH ROW WHEN (NEW.succeeded = 1) EXECUTE FUNCTION public.refuse()"
        );
        stands_still(&refuse).await;
    }
}

/// A single row meets `breaking`, which is systemic: the worker keeps it, is not ready, and writes it once the trouble is over.
async fn stands_still(breaking: &str) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(breaking).await.unwrap();
    let worker = Worker::start(&db, "", &[("work", Script::succeeding())]).await;
    let batch = submit(&client, "work", 1, "").await;
    eventually(PATIENCE, "it is not ready", async || (!worker.is_ready().await).then_some(())).await;
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.failures").await, 0, "the row was blamed");
    client.batch_execute(NO_TRIGGER).await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 1, 0, 0));
    assert!(worker.stop().await.is_clean());
}
