//! A worker that was paused, declared dead, and comes back: it changes nothing, and goes on under another name.

use rustix::process::Signal;

use crate::suite::support::config::is_polling;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::FaultProxy;
use crate::suite::support::services;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

/// A death by silence is declared after some seconds.
const QUICK: &str = "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\n\
                     rows_ttl = \"1m\"\nsettle = \"1s\"\n";

/// S2.
#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_changes_no_outcome_and_works_on_under_a_new_name() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = format!("{QUICK}[handlers.sleep]\nduration = \"200ms\"");
    let zombie = Daemon::builder(&db, &config).start();
    zombie.wait_ready().await;
    let batch = ledger.submit("sleep", 200).await;
    let old = ledger.somebody_holds(4, SOON).await;
    ledger.has_results(batch, 8, SOON).await;
    zombie.signal(Signal::STOP);

    let heir = Daemon::builder(&db, &config).start();
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
    assert_eq!(metric(&zombie, "musterd_liveness_renamed_total ").await, 1.0);

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

/// A worker that stops while its beat is being written leaves no open transaction: its lock on the worker's row would keep every judge
/// from declaring it dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stops_in_the_middle_of_a_beat_is_declared_dead() {
    const GATE: &str = "
        CREATE FUNCTION public.wait_at_the_gate() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NULL; END $$;
        CREATE TRIGGER gate AFTER UPDATE OF seen_at ON musterd.workers FOR EACH ROW EXECUTE FUNCTION public.wait_at_the_gate();
        SELECT pg_advisory_lock(4711)";
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let stopped = Daemon::builder(&db, QUICK).start();
    stopped.wait_ready().await;
    let worker = ledger.worker_of(&stopped).await;
    ledger.client.batch_execute(GATE).await.unwrap();
    let at_the_gate = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
                        WHERE d.datname = current_database() AND l.objid = 4711 AND NOT l.granted";
    eventually(SOON, "a beat is being written", async || {
        (ledger.number(at_the_gate).await > 0).then_some(())
    })
    .await;
    stopped.signal(Signal::STOP);
    ledger.client.batch_execute("SELECT pg_advisory_unlock(4711)").await.unwrap();
    let judge = Daemon::builder(&db, QUICK).start();
    ledger.worker_is(&worker, "dead", SOON).await;
    drop((stopped, judge));
}

/// A worker that was declared dead by mistake, while it is at work, gives everything up at its next beat.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_finds_itself_dead_gives_up_its_work_at_once() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[liveness]\nheartbeat_interval = \"300ms\"\nheartbeat_ttl = \"30s\"\nrows_ttl = \"5m\"\n\
                  [queues.default]\nfibers = 1\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"";
    let daemon = Daemon::builder(&db, config).start();
    let batch = ledger.submit_block("sleep", 1).await;
    let old = ledger.somebody_holds(1, SOON).await;
    // Its only fiber is busy for an hour, unless it gives up what it runs.
    let next = ledger.number("SELECT musterd.submit_batch('noop', '[1, 2, 3]'::jsonb, priority => 1)").await;
    let dead = "UPDATE musterd.workers SET state = 'dead', ended_at = clock_timestamp() WHERE id = $1";
    ledger.client.execute(dead, &[&old]).await.unwrap();
    daemon.wait_for_log(SOON, |line| line.contains("this worker was declared dead")).await;
    assert_eq!(ledger.end_of(next, SOON).await, End::succeeded(3));
    // Freed from its dead name and claimed again under the living one.
    let again = format!("SELECT count(*) FROM musterd.blocks WHERE batch_id = {batch} AND worker <> '{old}'");
    eventually(SOON, "it runs again", async || (ledger.number(&again).await == 1).then_some(())).await;
    assert_eq!(ledger.number("SELECT count(*) FROM musterd.workers WHERE state = 'alive'").await, 1);
}

/// How often a worker has looked for rows.
async fn looks_of(daemon: &Daemon) -> f64 {
    metric(daemon, "musterd_claim_seconds_count{queue=\"default\",work=\"rows\"} ").await
}

/// A worker that was declared dead claims nothing under its dead name, however long its next beat takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_declared_dead_claims_nothing() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    // No beat during the test.
    let config = "[liveness]\nheartbeat_interval = \"10m\"\nheartbeat_ttl = \"30m\"\nrows_ttl = \"2h\"\n\
                  [claim]\npoll_interval = \"50ms\"";
    let daemon = Daemon::builder(&db, config).start();
    assert_eq!(ledger.end_of(ledger.submit("noop", 10).await, SOON).await, End::succeeded(10));
    let worker = ledger.worker_of(&daemon).await;
    let dead = "UPDATE musterd.workers SET state = 'dead', ended_at = clock_timestamp() WHERE id = $1";
    ledger.client.execute(dead, &[&worker]).await.unwrap();
    let (fresh, free) = (ledger.submit("noop", 10).await, ledger.submit_block("noop", 1).await);
    let solo = ledger.submit_block("noop", 1).await;
    let suspect = "UPDATE musterd.blocks SET crashes = 2, solo = true WHERE batch_id = $1";
    ledger.client.execute(suspect, &[&solo]).await.unwrap();
    ledger.client.execute("SELECT musterd.enqueue('noop')", &[]).await.unwrap();
    ledger
        .client
        .execute("INSERT INTO musterd.tasks (command, crashes) VALUES ('noop', 2)", &[])
        .await
        .unwrap();
    let looks = looks_of(&daemon).await;
    eventually(SOON, "the worker has looked for work many times", async || {
        let now = looks_of(&daemon).await;
        (now >= looks + 5.0).then_some(())
    })
    .await;
    let claimed = "SELECT count(*) FROM public.claims WHERE batch = ANY ($1)";
    let claimed: i64 = ledger.client.query_one(claimed, &[&vec![fresh, free, solo]]).await.unwrap().get(0);
    assert_eq!(claimed, 0);
    let tasks =
        "SELECT count(*) FROM musterd.tasks WHERE command = 'noop' AND claimed_at IS NOT NULL AND id > $1";
    let tasks: i64 = ledger.client.query_one(tasks, &[&solo]).await.unwrap().get(0);
    assert_eq!(tasks, 0);
    let other = Daemon::builder(&db, "").start();
    for (batch, rows) in [(fresh, 10), (free, 1), (solo, 1)] {
        assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(rows));
    }
    drop((daemon, other));
}

/// The server ended a session and the worker cannot know: it notices before the others could take it for dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_session_ended_unseen_is_not_taken_for_dead() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let url = proxy.rewrite(db.url());
    let settings = "[liveness]\nsettle = \"1s\"\n";
    let judge = Daemon::builder(&db, settings).start();
    judge.wait_ready().await;
    let own = "[queues.own]\nfibers = 1\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"";
    let daemon = Daemon::builder(&db, &format!("{settings}[database]\nurl = {url:?}\n{own}")).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    // With nothing in hand it would have nothing to lose.
    let task = ledger.number("SELECT musterd.enqueue('sleep', queue => 'own')").await;
    let runs = format!("SELECT count(*) FROM musterd.tasks WHERE id = {task} AND state = 'running'");
    eventually(SOON, "it holds a task", async || (ledger.number(&runs).await == 1).then_some(())).await;
    let lock = format!(
        "SELECT count(*) FROM pg_locks l JOIN musterd.workers w
             ON l.locktype = 'advisory' AND (l.classid::bigint << 32) | l.objid::bigint = w.lock_key
          WHERE w.id = '{worker}' AND l.granted AND l.mode = 'ExclusiveLock'"
    );
    for round in 1..=3 {
        eventually(SOON, "it has its lock", async || (ledger.number(&lock).await == 1).then_some(())).await;
        let beats = format!("SELECT count(*) FROM public.beats WHERE worker = '{worker}'");
        let before = ledger.number(&beats).await;
        proxy.freeze("musterd listen");
        let cut = lock.replace("count(*)", "count(pg_terminate_backend(l.pid))");
        assert_eq!(ledger.number(&cut).await, 1);
        // The next beat by the clock is half a minute away.
        eventually(SOON, "it beats because it is in doubt", async || {
            (ledger.number(&beats).await >= before + 3).then_some(())
        })
        .await;
        assert_eq!(ledger.dead().await, 0, "round {round}");
    }
    eventually(SOON, "it has its lock again", async || (ledger.number(&lock).await == 1).then_some(())).await;
    assert_eq!(ledger.dead().await, 0);
    assert_eq!(ledger.number(&runs).await, 1, "its task was taken from it");
}
