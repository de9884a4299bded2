//! Trouble with the database itself fails no row: everything is kept, claims stop, readiness goes off, and it passes.

use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, assert_accounts_balance, end_of, progress, submit, succeeded,
};

/// Rows take a while, so that there is always something in hand.
fn slow() -> std::sync::Arc<Script> {
    Script::new(|_| async {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        succeeded()
    })
}

/// Breaks the database under a running batch, sees the worker hold everything, mends it, and sees everything end.
async fn outlasts(db: &TestDb, toml: &str, breaking: &str, mending: &str) {
    let client = db.client().await;
    let script = slow();
    let worker = Worker::start(db, toml, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 3_000, "").await;
    eventually(PATIENCE, "rows are done", async || {
        (progress(&client, batch).await.succeeded > 50).then_some(())
    })
    .await;
    client.batch_execute(breaking).await.unwrap();
    flushes_fail(&worker, 3.0).await;
    assert!(!worker.is_ready().await);
    let at_rest = at_rest(&worker).await;
    flushes_fail(&worker, 2.0).await;
    assert_eq!(worker.metric("musterd_blocks_claimed_total").await, at_rest, "claims go on");
    client.batch_execute(mending).await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 3_000, 0, 0));
    assert!(worker.is_ready().await);
    assert!(script.runs().values().all(|runs| *runs == 1), "outcomes were thrown away");
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

/// Waits until so many more flushes have failed.
async fn flushes_fail(worker: &Worker, count: f64) {
    let failed = async || worker.metric("musterd_batcher_rollbacks_total").await;
    let wanted = failed().await + count;
    eventually(PATIENCE, "flushes fail", async || (failed().await >= wanted).then_some(())).await;
}

/// The number of blocks claimed, once it does not change from one failed flush to the next.
async fn at_rest(worker: &Worker) -> f64 {
    eventually(PATIENCE, "claims have stopped", async || {
        let claimed = worker.metric("musterd_blocks_claimed_total").await;
        flushes_fail(worker, 1.0).await;
        (worker.metric("musterd_blocks_claimed_total").await == claimed).then_some(claimed)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_column_fails_no_row() {
    let db = TestDb::new().await;
    outlasts(
        &db,
        "",
        "ALTER TABLE musterd.blocks DROP COLUMN solo",
        "ALTER TABLE musterd.blocks ADD COLUMN solo boolean NOT NULL DEFAULT false",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_fails_no_row_and_the_workers_role_has_all_it_needs() {
    let db = TestDb::new().await;
    let login = db.login("musterd_worker").await;
    let toml = format!("[database]\nurl = \"{}\"", login.url);
    outlasts(
        &db,
        &toml,
        "REVOKE INSERT ON musterd.outcomes FROM musterd_worker",
        "GRANT INSERT ON musterd.outcomes TO musterd_worker",
    )
    .await;
}

async fn end_sessions(client: &Client) {
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND application_name LIKE 'musterd%'";
    client.query(sql, &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_read_only_for_a_while_fails_no_row() {
    let db = TestDb::new().await;
    let name = db.name().to_owned();
    // Without session settings of our own, as behind a pooler: what the database says holds. Not through one: its sessions
    // are its own, and it keeps those that met the trouble.
    let toml = format!("[database]\nurl = {:?}\npooler = \"transaction\"", db.url());
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND application_name LIKE 'musterd%'";
    let set =
        |value: &str| format!("ALTER DATABASE \"{name}\" SET default_transaction_read_only = {value}; {end}");
    let own = "SET default_transaction_read_only = off";
    // The second time no session is ended: those that met the trouble must have been given up by themselves.
    let mend = format!("{own}; ALTER DATABASE \"{name}\" RESET default_transaction_read_only");
    outlasts(&db, &toml, &format!("{own}; {}", set("on")), &mend).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_claimed_before_an_error_of_the_same_claim_are_run() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = db.login("musterd_worker").await;
    let toml = format!("[database]\nurl = \"{}\"", login.url);
    // Taking free blocks needs UPDATE, carving fresh ones does not: the second half of a claim fails.
    client.batch_execute("REVOKE UPDATE ON musterd.blocks FROM musterd_worker").await.unwrap();
    let script = Script::succeeding();
    let _worker = Worker::start(&db, &toml, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 3, "").await;
    // Not all of them: the outcomes of the first cannot be written either, and that stops the claims.
    eventually(PATIENCE, "a claimed row is run", async || (!script.calls().is_empty()).then_some(())).await;
    client.batch_execute("GRANT UPDATE ON musterd.blocks TO musterd_worker").await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 3, 0, 0));
    assert!(script.runs().values().all(|runs| *runs == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_ended_under_load_lose_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = slow();
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 5_000, "").await;
    for done in [100, 1_000, 2_000, 3_000, 4_000] {
        eventually(PATIENCE, "rows are done", async || {
            (progress(&client, batch).await.succeeded > done).then_some(())
        })
        .await;
        end_sessions(&client).await;
    }
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 5_000, 0, 0));
    assert!(script.runs().values().all(|runs| *runs == 1), "an outcome in hand was thrown away");
    assert_eq!(worker.metric("musterd_fenced_total").await, 0.0, "nobody else had the blocks");
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}
