//! SIGTERM: stop claiming, finish, flush, complete, say goodbye, and exit 0 with nothing owned.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::services;
use crate::suite::support::wait::SOON;
use crate::suite::support::work::{End, Ledger};

/// The stages in the order in which the log says that they stopped.
fn stages(daemon: &Daemon) -> Vec<String> {
    let stage = |line: &String| {
        let event: serde_json::Value = serde_json::from_str(line).ok()?;
        (event["message"] == "stage stopped").then(|| event["stage"].as_str().unwrap().to_owned())
    };
    daemon.log().iter().filter_map(stage).collect()
}

fn summary(daemon: &Daemon) -> serde_json::Value {
    let log = daemon.log();
    let last =
        log.iter().rev().find(|line| line.contains("\"message\":\"stopped\"")).expect("a summary line");
    serde_json::from_str(last).unwrap()
}

/// S23, and the order of the phases.
#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_under_load_nothing_is_owned_and_nothing_is_lost() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[handlers.sleep]\nduration = \"20ms\"";
    let daemon = Daemon::builder(&db, config).start();
    let batch = ledger.submit("sleep", 3000).await;
    ledger.has_results(batch, 100, SOON).await;
    let worker = ledger.worker_of(&daemon).await;
    daemon.signal(Signal::TERM);
    let status = daemon.wait_exit(SOON).await;
    assert!(status.success(), "{status}");
    assert_eq!(ledger.owned().await, 0);
    ledger.worker_is(&worker, "stopped", SOON).await;
    let drained = "SELECT count(*) FROM public.beats WHERE state = 'draining'";
    assert!(ledger.number(drained).await >= 1, "the beats said that it was going");
    assert_eq!(
        stages(&daemon),
        ["Upkeep", "Claims", "Writes", "Completion", "Timeouts", "Heartbeat", "Http"]
    );
    let last = summary(&daemon);
    assert_eq!((&last["clean"], &last["owned"]), (&true.into(), &0.into()), "{last}");

    let second = Daemon::builder(&db, "[handlers.sleep]\nduration = \"0s\"").start();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(3000));
    assert_eq!(ledger.claimed_again().await, 0, "a row that was finished ran again");
    assert_eq!((ledger.dead().await, ledger.deadlocks().await), (0, 0));
    drop(second);
}

/// L7: what does not end by itself goes back, and no attempt is charged.
#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_the_grace_rows_go_back_uncharged() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[shutdown]\ngrace = \"1s\"\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"";
    let daemon = Daemon::builder(&db, config).start();
    ledger.submit_block("sleep", 30).await;
    ledger.somebody_holds(1, SOON).await;
    let began = Instant::now();
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(SOON).await.success());
    assert!(began.elapsed() >= Duration::from_secs(1), "it did not wait for the grace");
    let last = summary(&daemon);
    assert_eq!(last["rows_given_back"], 30, "{last}");
    let free = "SELECT count(*) FROM musterd.blocks WHERE worker IS NULL AND attempt = 1 AND crashes = 0 AND lines = '{[1,31)}'";
    assert_eq!(ledger.number(free).await, 1);
}

/// L1: a replica with nothing to do looks rarely, so it is told of what another one gives back.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_replica_gives_back_wakes_an_idle_one() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let busy = Daemon::builder(&db, "[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"").start();
    let batch = ledger.submit_block("sleep", 5).await;
    ledger.somebody_holds(1, SOON).await;
    let config = "[claim]\npoll_interval = \"1h\"\n[handlers.sleep]\nduration = \"0s\"";
    let idle = Daemon::builder(&db, config).start();
    idle.wait_ready().await;
    busy.signal(Signal::TERM);
    busy.wait_for_log(SOON, |line| line.contains("\"draining\"")).await;
    busy.signal(Signal::TERM);
    assert!(busy.wait_exit(SOON).await.success());
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(5));
    drop(idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_gives_back_at_once() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[shutdown]\ngrace = \"10m\"\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"";
    let daemon = Daemon::builder(&db, config).start();
    ledger.submit_block("sleep", 5).await;
    ledger.somebody_holds(1, SOON).await;
    daemon.signal(Signal::TERM);
    daemon.wait_for_log(SOON, |line| line.contains("\"draining\"")).await;
    daemon.signal(Signal::INT);
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(ledger.owned().await, 0);
}

/// A worker that takes its time to drain is not taken for dead: it keeps its lock and its beat.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_is_left_in_peace() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let judge = Daemon::builder(&db, "[liveness]\nsettle = \"1s\"").start();
    judge.wait_ready().await;
    // A command that the judge does not know, and more time than a judgement takes.
    let daemon =
        Daemon::builder(&db, "[handlers.slow]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"10s\"")
            .start();
    daemon.wait_ready().await;
    let batch = ledger.submit("slow", 1).await;
    let worker = ledger.somebody_holds(1, SOON).await;
    daemon.signal(Signal::TERM);
    ledger.worker_is(&worker, "draining", SOON).await;
    assert!(daemon.wait_exit(SOON).await.success());
    ledger.worker_is(&worker, "stopped", SOON).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(1));
    assert_eq!((ledger.dead().await, ledger.claimed_again().await), (0, 0));
}

/// Exit 0 is a promise; without the database nobody can give it.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_ask_what_it_owns_does_not_exit_with_nought() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let url = proxy.rewrite(db.url());
    let config = format!(
        "[database]\nurl = {url:?}\n[shutdown]\ngrace = \"500ms\"\n[handlers.sleep]\nduration = \"1h\""
    );
    // Once with a block in hand, once idle: then everything stops in time, and still nobody knows.
    for rows in [5, 0] {
        proxy.set(Fault::None);
        let daemon = Daemon::builder(&db, &config).start();
        daemon.wait_ready().await;
        if rows > 0 {
            ledger.submit_block("sleep", rows).await;
            ledger.somebody_holds(1, SOON).await;
        }
        proxy.set(Fault::RefuseNew);
        proxy.reset_all();
        daemon.signal(Signal::TERM);
        let status = daemon.wait_exit(SOON).await;
        assert_eq!(status.code(), Some(1), "with {rows} rows in hand");
        let last = summary(&daemon);
        assert_eq!((&last["clean"], &last["owned"]), (&false.into(), &serde_json::Value::Null), "{last}");
        assert_eq!(ledger.owned().await, i64::from(rows > 0), "a block is left to the recovery");
        // As recovery would: the next worker finds nothing to do.
        ledger.client.execute("DELETE FROM musterd.blocks", &[]).await.unwrap();
    }
}
