//! Where a claim stops: none begins once the drain has, and none goes on with a session that has failed.

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, lines, session};
use crate::suite::support::sql::refusal;
use crate::suite::support::tasks::{end_of, number};
use crate::suite::support::wait::SOON;
use crate::suite::support::work::{End, Ledger};

/// Whatever takes long has to be let go by the test itself.
const LONG_GRACE: &str = "[shutdown]\ngrace = \"1h\"";

async fn begins_to_drain(daemon: &Daemon) {
    daemon.signal(Signal::TERM);
    // Said by the supervisor after everybody was told.
    daemon.wait_for_log(SOON, |line| line.contains("\"draining\"")).await;
}

/// Fibers and the drain may come at the same moment; then the drain counts.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_comes_while_work_waits_for_a_fiber_claims_none() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    ledger.submit("noop", 10).await;
    number(&ledger.client, "SELECT musterd.enqueue('noop')").await;
    let gate = crate::suite::support::run::new_dir("gate").join("open");
    let waits = format!("claim.fibers=gate({})", gate.display());
    let daemon = Daemon::builder(&db, LONG_GRACE).env("MUSTERD_FAILPOINTS", &waits).start();
    daemon.wait_for_log(SOON, |line| line.contains("claim.fibers")).await;
    begins_to_drain(&daemon).await;
    std::fs::write(gate, "").unwrap();
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(ledger.number("SELECT count(*) FROM public.claims").await, 0);
    let task = "SELECT count(*) FROM musterd.tasks WHERE state = 'queued' AND claimed_at IS NULL";
    assert_eq!(ledger.number(task).await, 1);
}

/// A session of a claim goes bad: the first claim with it is taken, everything later is refused, as by a server that is
/// read-only now. Only a new session helps.
const SPOIL: &str = "
CREATE SEQUENCE public.claims_so_far;
CREATE FUNCTION public.spoil() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') = 'musterd claim' THEN
        IF current_setting('test.spoilt', true) = 'yes' THEN
            RAISE read_only_sql_transaction;
        ELSIF nextval('public.claims_so_far') = 1 THEN
            PERFORM set_config('test.spoilt', 'yes', false);
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER spoil BEFORE INSERT OR UPDATE ON musterd.TABLE FOR EACH ROW EXECUTE FUNCTION public.spoil();";

/// Past any pooler, whose sessions are not ours.
async fn start_on_spoilt(db: &TestDb, ledger: &Ledger, table: &str) -> Daemon {
    ledger.client.batch_execute(&SPOIL.replace("TABLE", table)).await.unwrap();
    let daemon = Daemon::builder(db, &format!("[database]\nurl = {:?}", db.url())).start();
    daemon.wait_ready().await;
    daemon
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_claimed_with_a_new_session_after_one_has_failed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = start_on_spoilt(&db, &ledger, "blocks").await;
    for _ in 0..2 {
        let batch = ledger.submit("noop", 1).await;
        assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(1));
    }
    daemon.wait_for_log(SOON, |line| line.contains("cannot claim; trying again")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_claimed_with_a_new_session_after_one_has_failed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = start_on_spoilt(&db, &ledger, "task_claims").await;
    for _ in 0..2 {
        let task = number(&ledger.client, "SELECT musterd.enqueue('noop')").await;
        assert_eq!(end_of(&ledger.client, task).await, "succeeded");
    }
    let told =
        |line: &str| line.contains("cannot claim; trying again") && line.contains("\"work\":\"tasks\"");
    daemon.wait_for_log(SOON, told).await;
}

/// The largest batch there can be is carved to its last line, whatever the size of its blocks.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_lines_of_the_largest_batch_are_carved() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let id = number(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb)").await;
    let refused = refusal(&client, "UPDATE musterd.batches SET rows = 2000000001").await;
    assert!(refused.starts_with("23514"), "{refused}");
    client
        .batch_execute("UPDATE musterd.batches SET rows = 2000000000, next_line = 1999999001")
        .await
        .unwrap();
    let blocks = carve(&worker, 4, 250_000_000).await;
    assert_eq!(blocks.iter().map(|block| block.reference.batch).collect::<Vec<_>>(), [id]);
    assert_eq!(lines(&blocks), [(1_999_999_001, 2_000_000_000)]);
    assert_eq!(carve(&worker, 1, 1).await.len(), 0);
}
