//! A worker that was paused, declared dead, and comes back: it changes nothing, and goes on under another name.

use rustix::process::Signal;

use crate::suite::support::config::is_polling;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

/// S2.
#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_changes_no_outcome_and_works_on_under_a_new_name() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\n\
                  rows_ttl = \"1m\"\nsettle = \"1s\"\n[handlers.sleep]\nduration = \"200ms\"";
    let zombie = Daemon::builder(&db, config).start();
    zombie.wait_ready().await;
    let batch = ledger.submit("sleep", 200).await;
    let old = ledger.somebody_holds(4, SOON).await;
    ledger.has_results(batch, 8, SOON).await;
    zombie.signal(Signal::STOP);

    let heir = Daemon::builder(&db, config).start();
    ledger.worker_is(&old, "dead", SOON).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(200));
    let outcomes = "SELECT hashtext(string_agg(r::text, ',' ORDER BY line))::bigint FROM musterd.results r";
    let before = ledger.number(outcomes).await;

    zombie.signal(Signal::CONT);
    zombie.wait_for_log(SOON, |line| line.contains("this worker was declared dead")).await;
    eventually(SOON, "the zombie's outcomes are refused", async || {
        (metric(&zombie, "musterd_fenced_total ").await > 0.0).then_some(())
    })
    .await;
    eventually(SOON, "the zombie holds nothing", async || {
        let (_, text) = zombie.get("/readyz").await.ok()?;
        text.contains("\"ready\":true").then_some(())
    })
    .await;
    assert_eq!(ledger.number(outcomes).await, before, "a zombie changed an outcome");
    assert_eq!(metric(&zombie, "musterd_liveness_rebirths_total ").await, 1.0);

    // It works on: the other one is gone, and a further batch comes to its end.
    heir.signal(Signal::TERM);
    assert!(heir.wait_exit(SOON).await.success());
    let new = ledger.worker_of(&zombie).await;
    assert_ne!(new, old);
    let further = ledger.submit("sleep", 20).await;
    assert_eq!(ledger.end_of(further, SOON).await, End::succeeded(20));
    let claimed = format!("SELECT count(*) FROM public.claims WHERE batch = {further} AND worker <> '{new}'");
    assert_eq!(ledger.number(&claimed).await, 0);
    if !is_polling() {
        // Its new name has a lock of its own: a second death is seen as quickly as the first would have been.
        let locked =
            format!("SELECT count(*) FROM musterd.workers WHERE id = '{new}' AND lock_key IS NOT NULL");
        eventually(SOON, "the lock belongs to the new name", async || {
            (ledger.number(&locked).await == 1).then_some(())
        })
        .await;
    }
    zombie.signal(Signal::TERM);
    assert!(zombie.wait_exit(SOON).await.success());
}

/// A worker that was declared dead by mistake, while it is at work, gives everything up at its next beat.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_finds_itself_dead_gives_up_its_work_at_once() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[liveness]\nheartbeat_interval = \"300ms\"\nheartbeat_ttl = \"30s\"\nrows_ttl = \"5m\"\n\
                  [handlers.sleep]\nduration = \"1s\"";
    let daemon = Daemon::builder(&db, config).start();
    let batch = ledger.submit_block("sleep", 20).await;
    let old = ledger.somebody_holds(1, SOON).await;
    let bury = "UPDATE musterd.workers SET state = 'dead', ended_at = clock_timestamp() WHERE id = $1";
    ledger.client.execute(bury, &[&old]).await.unwrap();
    daemon.wait_for_log(SOON, |line| line.contains("this worker was declared dead")).await;
    // Freed from its dead name and claimed again under the living one.
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(20));
    assert_eq!(ledger.number("SELECT count(*) FROM musterd.workers WHERE state = 'alive'").await, 1);
}
