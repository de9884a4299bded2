//! Where a claim stops: none begins once the drain has, and none goes on with a session that has failed.

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::tasks::{end_of, number, text};
use crate::suite::support::wait::{SOON, eventually};
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
async fn a_drain_that_comes_while_rows_wait_for_a_fiber_claims_none() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    ledger.submit("noop", 10).await;
    let gate = crate::suite::support::run::new_dir("gate").join("open");
    let waits = format!("claim.fibers=gate({})", gate.display());
    let daemon = Daemon::builder(&db, LONG_GRACE).env("MUSTERD_FAILPOINTS", &waits).start();
    daemon.wait_for_log(SOON, |line| line.contains("claim.fibers")).await;
    begins_to_drain(&daemon).await;
    std::fs::write(gate, "").unwrap();
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(ledger.number("SELECT count(*) FROM public.claims").await, 0);
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
    let daemon = start_on_spoilt(&db, &ledger, "tasks").await;
    for _ in 0..2 {
        let task = number(&ledger.client, "SELECT musterd.enqueue('noop')").await;
        assert_eq!(end_of(&ledger.client, task).await, "succeeded");
    }
    let told =
        |line: &str| line.contains("cannot claim; trying again") && line.contains("\"work\":\"tasks\"");
    daemon.wait_for_log(SOON, told).await;
}

/// The look whether there is anything takes long, and the drain comes meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_comes_before_a_task_has_its_fiber_claims_none() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, LONG_GRACE).start();
    daemon.wait_ready().await;
    let mut schedule = Schedule::new(&db, &["user"]).await;
    schedule.run("user", "BEGIN; LOCK TABLE musterd.tasks IN ACCESS EXCLUSIVE MODE").await;
    schedule.run("user", "SELECT musterd.enqueue('noop')").await.rows();
    let looks = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
                    AND query LIKE 'SELECT EXISTS (SELECT FROM musterd.tasks t WHERE t.queue = $1 AND t.state = ''queued'')%'";
    eventually(SOON, "it looks for tasks", async || (number(&client, looks).await > 0).then_some(())).await;
    begins_to_drain(&daemon).await;
    schedule.run("user", "COMMIT").await;
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(text(&client, "SELECT state, claimed_at IS NULL FROM musterd.tasks").await, "queued|t");
}
