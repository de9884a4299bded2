//! A daemon that is held at a gate in the middle of a step: what happens meanwhile is neither lost nor done to it.

use std::path::PathBuf;
use std::time::Duration;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger};

/// Longer than a check takes on a busy machine, and far shorter than the sweep, which would hide that it was not made.
const NO_SWEEP: Duration = Duration::from_secs(60);

fn gate(name: &str) -> PathBuf {
    run::new_dir("gate").join(name)
}

async fn waits_at(daemon: &Daemon, step: &str) {
    let at = |line: &str| line.contains("waiting at a gate on purpose") && line.contains(step);
    daemon.wait_for_log(SOON, at).await;
}

/// L4: a check that is asked for while one is under way is made after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_is_asked_for_during_a_check_is_made() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let (before, after) = (gate("before"), gate("after"));
    let gates = format!(
        "complete.counted=1*gate({});complete.committed=1*gate({})",
        before.display(),
        after.display()
    );
    let daemon = Daemon::builder(&db, "").env("MUSTERD_FAILPOINTS", &gates).start();
    let batch = ledger.submit("noop", 1).await;
    waits_at(&daemon, "complete.counted").await;
    // The check is about to find that there is more to come.
    ledger.client.batch_execute("SELECT musterd.pause_queue('default')").await.unwrap();
    ledger.client.execute("SELECT musterd.append_rows($1, '[2]'::jsonb)", &[&batch]).await.unwrap();
    std::fs::write(&before, "").unwrap();
    waits_at(&daemon, "complete.committed").await;
    ledger.client.batch_execute("SELECT musterd.resume_queue('default')").await.unwrap();
    ledger.has_results(batch, 2, SOON).await;
    std::fs::write(&after, "").unwrap();
    assert_eq!(ledger.end_of(batch, NO_SWEEP).await, End::succeeded(2));
}

/// S6: a block whose flush takes long is in hand until it is committed: the worker does not take it for lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_held_until_its_flush_is_committed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let begin = gate("begin");
    let toml = "[liveness]\nreconcile_interval = \"100ms\"\nheartbeat_interval = \"100ms\"\n[queues.default]\nfibers = 1";
    let gates = format!("flush.begin=1*gate({})", begin.display());
    let daemon = Daemon::builder(&db, toml).env("MUSTERD_FAILPOINTS", &gates).start();
    let batch = ledger.submit_block("noop", 5).await;
    waits_at(&daemon, "flush.begin").await;
    // As many beats as looks of the reconcile.
    let beats = ledger.number("SELECT count(*) FROM public.beats").await;
    eventually(SOON, "the worker has compared several times", async || {
        (ledger.number("SELECT count(*) FROM public.beats").await > beats + 15).then_some(())
    })
    .await;
    std::fs::write(&begin, "").unwrap();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(5));
    assert_eq!(ledger.claimed_again().await, 0, "it was given back while its outcomes were being written");
}
