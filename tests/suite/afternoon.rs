//! A stranger's afternoon: hold, release, kills, floods, forged locks and stray deletes in whatever order. Everything ends, and
//! without a restart.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::suite::batch_cli::json_of;
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::ledger::session;
use crate::suite::support::tasks::{becomes, number, text};
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger};

const SHORT: &str = "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\nrows_ttl = \"1m\"\n\
    settle = \"200ms\"\nreconcile_interval = \"500ms\"\n[claim]\npoll_interval = \"100ms\"\n\
    [completion]\nsweep_min = \"300ms\"\nsweep_max = \"500ms\"\n[retry]\nbase = \"10ms\"\nmax = \"50ms\"\n";

/// Rows that are tried again, held and released while they are written, given back and recovered: no order leaves any behind.
#[tokio::test(flavor = "multi_thread")]
async fn hold_and_release_beside_flushes_deaths_and_drains_leave_nothing_behind() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = format!("{SHORT}[handlers.fail]\nrate = 0.5\nduration = \"5ms\"\n");
    let mut batches = Vec::new();
    for _ in 0..8 {
        let submit = "SELECT musterd.submit_batch('fail', ARRAY (SELECT to_jsonb(g) FROM generate_series(1, 150) g), max_attempts => 3)";
        batches.push(number(&ledger.client, submit).await);
    }
    let mut daemons: Vec<Daemon> = (0..2).map(|_| Daemon::builder(&db, &config).start()).collect();
    let mut random = StdRng::seed_from_u64(11);
    for round in 0..60 {
        let batch = batches[random.random_range(0..batches.len())];
        text(&ledger.client, &format!("SELECT musterd.hold({batch})")).await;
        tokio::time::sleep(Duration::from_millis(random.random_range(0..60))).await;
        text(&ledger.client, &format!("SELECT musterd.release({batch})")).await;
        if round % 20 == 10 {
            let place = random.random_range(0..daemons.len());
            daemons[place].signal(if round % 40 == 10 { Signal::KILL } else { Signal::TERM });
            daemons[place] = Daemon::builder(&db, &config).start();
        }
    }
    for batch in batches {
        let End { state, succeeded, failed } = ledger.end_of(batch, SOON).await;
        assert!(["succeeded", "failed"].contains(&state.as_str()), "{state}");
        assert_eq!(succeeded + failed, 150);
    }
    assert_eq!(ledger.number("SELECT count(*) FROM musterd.blocks").await, 0);
    assert_eq!(ledger.deadlocks().await, 0);
}

/// Every channel, every kind of payload, thousands of them: work goes on, and no fate changes.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_forged_notifications_delays_little_and_changes_nothing() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let login = db.login("pg_monitor").await;
    let (stranger, _connection) = connect(&login.url).await;
    let daemon = Daemon::builder(&db, &format!("{SHORT}[handlers.sleep]\nduration = \"100ms\"\n")).start();
    daemon.wait_ready().await;
    let batch = ledger.submit("sleep", 200).await;
    let task = number(&ledger.client, "SELECT musterd.enqueue('sleep')").await;
    let flood = "SELECT pg_notify(channel, payload)
         FROM unnest(ARRAY['musterd_wake', 'musterd_abort', 'musterd_check', 'musterd_done', 'musterd', 'MUSTERD_ABORT']) channel,
              LATERAL (SELECT i::text AS payload FROM generate_series(1, 1000) i
                       UNION ALL SELECT unnest(ARRAY['', 'default', '-1', '99999999999999999999', '1e3', '0x11', ' 1', E'a\\nb', '{}', 'Ω',
                                                     repeat('x', 7999)])) p";
    for _ in 0..20 {
        stranger.batch_execute(flood).await.unwrap();
    }
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(200));
    becomes(&ledger.client, &format!("SELECT state FROM musterd.tasks WHERE id = {task}"), "succeeded").await;
    // After the flood new work is picked up as before.
    let began = Instant::now();
    assert_eq!(ledger.end_of(ledger.submit("noop", 1).await, SOON).await, End::succeeded(1));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(ledger.claimed_again().await, 0, "rows were run again");
}

/// Any login may take any advisory lock, or wait for one that a worker holds, and get it when the worker dies.
#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_that_takes_the_lock_of_a_dead_worker_does_not_make_it_live() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let login = db.login("pg_monitor").await;
    let (stranger, _connection) = connect(&login.url).await;
    let config = format!("{SHORT}[handlers.sleep]\nduration = \"300ms\"\n");
    let victim = Daemon::builder(&db, &config).start();
    victim.wait_ready().await;
    let batch = ledger.submit("sleep", 40).await;
    let worker = ledger.somebody_holds(1, SOON).await;
    let key = format!("SELECT lock_key FROM musterd.workers WHERE id = '{worker}'");
    let key = eventually(SOON, "it has its lock", async || {
        ledger.client.query_one(&key, &[]).await.unwrap().get::<_, Option<i64>>(0)
    })
    .await;
    let heir = Daemon::builder(&db, &config).start();
    heir.wait_ready().await;
    let wait = format!("SELECT pg_advisory_lock({key})");
    let waiting = stranger.batch_execute(&wait);
    let kill = async {
        let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        eventually(SOON, "the stranger waits", async || (ledger.number(waits).await > 0).then_some(())).await;
        victim.signal(Signal::KILL);
    };
    let (locked, ()) = tokio::join!(waiting, kill);
    locked.unwrap();
    // Not by its lock, which is held: by its silence.
    ledger.worker_is(&worker, "dead", SOON).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(40));
}

/// Tickets and claims of tasks, and blocks, that were deleted by hand: named by `why`, healed by the sweep.
#[tokio::test(flavor = "multi_thread")]
async fn stray_deletes_are_named_and_healed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = TestConfig::new(&db, "");
    let lost = number(&ledger.client, "SELECT musterd.enqueue('sleep')").await;
    ledger.client.batch_execute("DELETE FROM musterd.task_tickets").await.unwrap();
    let told = json_of(&config, &["why", "task", &lost.to_string()]).await;
    assert_eq!(told["reasons"][0]["code"], "no_ticket", "{told}");
    // The sweep leaves young ones alone: their ticket may be on its way.
    let old = "UPDATE musterd.task_records SET created_at = now() - interval '1 hour'";
    ledger.client.batch_execute(old).await.unwrap();
    let daemon = Daemon::builder(&db, &format!("{SHORT}[handlers.sleep]\nduration = \"2s\"\n")).start();
    let state = format!("SELECT state FROM musterd.tasks WHERE id = {lost}");
    becomes(&ledger.client, &state, "running").await;
    ledger.client.batch_execute("DELETE FROM musterd.task_claims").await.unwrap();
    let batch = ledger.submit_block("sleep", 4).await;
    ledger.somebody_holds(1, SOON).await;
    ledger.client.batch_execute("DELETE FROM musterd.blocks").await.unwrap();
    becomes(&ledger.client, &state, "succeeded").await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(4));
    drop(daemon);
}

/// Tables that are locked for seconds, again and again, while everything periodic runs: no session is left in a failed transaction.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_go_back_to_their_pools_clean_whatever_they_met() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let locker = session(&db).await;
    let config = format!(
        "{SHORT}[handlers.sleep]\nduration = \"20ms\"\n[database]\nlock_timeout = \"100ms\"\nstatement_timeout = \"500ms\"\n"
    );
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    let batch = ledger.submit("sleep", 300).await;
    let aborted = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'musterd%'
                      AND state LIKE '%aborted%' AND state_change < now() - interval '1 second'";
    for table in ["task_claims", "blocks", "task_records", "batches", "workers", "outcomes"] {
        // A task that the worker owns and does not know: the reconciliation frees it, or tries to.
        let lose =
            "INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
                    VALUES (gen_random_uuid(), $1, 'default', 'noop', '{}', 1, 1, 0)";
        ledger.client.execute(lose, &[&worker]).await.unwrap();
        locker
            .batch_execute(&format!(
                "BEGIN; LOCK TABLE musterd.{table} IN EXCLUSIVE MODE; SELECT pg_sleep(1.5)"
            ))
            .await
            .unwrap();
        assert_eq!(ledger.number(aborted).await, 0, "{table}");
        locker.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(300));
    assert_eq!(ledger.number(aborted).await, 0);
    assert!(
        !daemon.log().iter().any(|line| line.contains("25P02")),
        "a session in a failed transaction was used"
    );
}
