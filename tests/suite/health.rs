//! What the port says of the daemon's health: alive while its loops turn, ready while it can work, and the figures of a queue.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::suite::api::caller::Caller;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::services;
use crate::suite::support::wait::eventually;
use crate::suite::support::work::{Ledger, metric};

const SOON: Duration = Duration::from_secs(60);

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

/// The first visits do nothing: the loop has turned before it stands still.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn a_loop_that_stands_still_is_not_alive_and_is_named() {
    for (step, name) in [
        ("claim.turn=20", "queue default"),
        ("tasks.turn=20", "tasks default"),
        ("batcher.turn=2", "batcher"),
        ("completer.turn=2", "completer"),
    ] {
        let db = TestDb::new().await;
        let toml = "[liveness]\nstuck_after = \"1s\"\n[claim]\npoll_interval = \"50ms\"";
        let builder = Daemon::builder(&db, toml).env("MUSTERD_FAILPOINTS", &format!("{step}*sleep(1h)"));
        let daemon = builder.start();
        daemon.wait_ready().await;
        let ledger = Ledger::open(&db).await;
        let answer = eventually(SOON, &format!("it is not alive because of {name}"), async || {
            // Something to do for those who only turn when there is.
            ledger.submit("noop", 1).await;
            let (status, answer) = daemon.get("/livez").await.unwrap();
            (status == 503 && answer.contains(name)).then_some(answer)
        })
        .await;
        let told: Value = serde_json::from_str(body(&answer)).unwrap();
        assert_eq!(told["alive"], false);
        let stuck: Vec<&str> =
            told["stuck"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
        assert!(stuck.iter().any(|s| s.starts_with(&format!("{name}: has not turned for "))), "{stuck:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_makes_it_unready_and_leaves_it_alive() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let toml = format!(
        "[database]\nurl = \"{}\"\n[liveness]\nstuck_after = \"1s\"\nheartbeat_interval = \"1s\"\n\
         [claim]\npoll_interval = \"50ms\"",
        proxy.rewrite(db.url())
    );
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    eventually(SOON, "the queues were looked at", async || {
        daemon.get("/metrics").await.unwrap().1.contains("musterd_queue_rows{").then_some(())
    })
    .await;
    proxy.set(Fault::Blackhole);
    let began = Instant::now();
    eventually(SOON, "it is not ready", async || {
        let (status, answer) = daemon.get("/readyz").await.unwrap();
        (status == 503 && answer.contains("heartbeat: the database does not take the heartbeat"))
            .then_some(())
    })
    .await;
    // Long after a loop that counted the database's silence as its own standstill would have been given up.
    eventually(SOON, "it is still alive", async || {
        let alive = daemon.get("/livez").await.unwrap().0 == 200;
        (began.elapsed() > Duration::from_secs(4) && alive).then_some(())
    })
    .await;
    // The figures of the last look stay, and a scrape does not wait for the database.
    assert!(metric(&daemon, "musterd_queue_rows{queue=\"default\"} ").await == 0.0);
    proxy.set(Fault::None);
    daemon.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_flushes_fail_it_is_not_ready_and_says_why() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let toml = format!("[http]\nlisten = \"0.0.0.0:{}\"", services::free_port());
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    ledger.client.batch_execute("ALTER TABLE musterd.outcomes RENAME COLUMN attempt TO gone").await.unwrap();
    ledger.submit("noop", 3).await;
    let answer = eventually(SOON, "it is not ready", async || {
        let (status, answer) = daemon.get("/readyz").await.unwrap();
        (status == 503).then_some(answer)
    })
    .await;
    assert!(
        answer.contains("writes: outcomes cannot be written: ") && answer.contains("attempt"),
        "{answer}"
    );
    // Others hear which part it is, and nothing of what the database said.
    let stranger = Caller::of(&daemon).send("GET", "/readyz", &[("host", "pod.example")], b"").await;
    assert_eq!((stranger.status, &*stranger.body), (503, r#"{"ready":false,"reasons":["writes"]}"#));
    assert_eq!(daemon.get("/livez").await.unwrap().0, 200);
    ledger.client.batch_execute("ALTER TABLE musterd.outcomes RENAME COLUMN gone TO attempt").await.unwrap();
    daemon.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_tells_what_waits_and_who_holds_the_horizon() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    ledger.client.execute("SELECT musterd.pause_queue('default')", &[]).await.unwrap();
    ledger.submit("noop", 1000).await;
    ledger.client.execute("SELECT musterd.enqueue('noop') FROM generate_series(1, 3)", &[]).await.unwrap();
    ledger.client.execute("SELECT musterd.enqueue('noop', delay => '1 day')", &[]).await.unwrap();
    let reader = db.client().await;
    reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.unwrap();
    let pid: i32 = reader.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let daemon = Daemon::builder(&db, "[queues.bulk]").start();
    daemon.wait_ready().await;
    let wanted = [
        "musterd_queue_rows{queue=\"default\"} 1000".to_owned(),
        "musterd_queue_rows{queue=\"bulk\"} 0".to_owned(),
        "musterd_queue_tasks{queue=\"default\",state=\"queued\"} 3".to_owned(),
        "musterd_queue_tasks{queue=\"default\",state=\"scheduled\"} 1".to_owned(),
        "musterd_queue_oldest_due_seconds{queue=\"bulk\"} 0.0".to_owned(),
        format!("musterd_xmin_horizon_pid {pid}"),
    ];
    let scrape = eventually(SOON, "the figures are there", async || {
        let (_, text) = daemon.get("/metrics").await.unwrap();
        wanted.iter().all(|line| text.lines().any(|found| found == line)).then_some(text)
    })
    .await;
    let value = |name: &str| -> f64 {
        scrape.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).expect(name)
    };
    assert!(value("musterd_queue_oldest_due_seconds{queue=\"default\"} ") > 0.0, "{scrape}");
    assert!(value("musterd_xmin_horizon_age_seconds ") > 0.0, "{scrape}");
    assert!(value("musterd_liveness_heartbeat_age_seconds ") >= 0.0, "{scrape}");
    reader.batch_execute("COMMIT").await.unwrap();
}

/// Everything below was asked for an hour ago, and became due only now.
#[tokio::test(flavor = "multi_thread")]
async fn what_became_due_later_than_it_was_submitted_waited_since_then() {
    const AN_HOUR_AGO: &str = "UPDATE musterd.tasks SET created_at = created_at - interval '1 hour',
        run_at = run_at - interval '1 hour', not_before = not_before - interval '1 hour'";
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let make = "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb], hold => true);
        SELECT musterd.submit_batch('nobodys', ARRAY['1'::jsonb], hold => true, queue => 'bulk');
        SELECT musterd.hold(musterd.enqueue('noop'));
        SELECT musterd.enqueue_after('noop', '{}', ARRAY[musterd.enqueue('nobodys')])";
    ledger.client.batch_execute(&format!("{make}; {AN_HOUR_AGO}")).await.unwrap();
    let free = "SELECT musterd.release(id) FROM musterd.tasks WHERE state = 'held';
        SELECT musterd.abort(id) FROM musterd.tasks WHERE command = 'nobodys' AND queue = 'default'";
    ledger.client.batch_execute(free).await.unwrap();
    let daemon = Daemon::builder(&db, "[queues.bulk]").start();
    daemon.wait_ready().await;
    eventually(SOON, "all of it has run", async || {
        let open = "SELECT count(*) FROM musterd.tasks WHERE queue = 'default' AND finished_at IS NULL";
        (ledger.number(open).await == 0).then_some(())
    })
    .await;
    let waited = async |work: &str| {
        let of = |what: &str| format!("musterd_pickup_seconds_{what}{{queue=\"default\",work=\"{work}\"}} ");
        (metric(&daemon, &of("count")).await, metric(&daemon, &of("sum")).await)
    };
    let (rows, tasks) = (waited("rows").await, waited("tasks").await);
    assert!(rows.0 == 1.0 && rows.1 < 1800.0, "{rows:?}");
    assert!(tasks.0 == 2.0 && tasks.1 < 1800.0, "{tasks:?}");
    let oldest = eventually(SOON, "the queue was looked at", async || {
        let oldest = metric(&daemon, "musterd_queue_oldest_due_seconds{queue=\"bulk\"} ").await;
        (oldest > 0.0).then_some(oldest)
    })
    .await;
    assert!(oldest < 1800.0, "{oldest}");

    // What was due all the time has waited all the time.
    let old = format!("BEGIN; SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb]); {AN_HOUR_AGO}; COMMIT");
    ledger.client.batch_execute(&old).await.unwrap();
    eventually(SOON, "it is claimed", async || (waited("rows").await.0 == 2.0).then_some(())).await;
    assert!(waited("rows").await.1 > 3600.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_channel_fills_while_outcomes_cannot_be_written_and_empties_afterwards() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, "[batcher]\ncapacity = 500\n[liveness]\nstuck_after = \"1s\"").start();
    daemon.wait_ready().await;
    assert_eq!(metric(&daemon, "musterd_batcher_channel_fullness ").await, 0.0);
    let holder = db.client().await;
    holder.batch_execute("BEGIN; LOCK musterd.outcomes IN EXCLUSIVE MODE").await.unwrap();
    let batch = ledger.submit("noop", 20_000).await;
    eventually(SOON, "the channel fills", async || {
        (metric(&daemon, "musterd_batcher_channel_fullness ").await > 0.5).then_some(())
    })
    .await;
    // Who waits to write, or for a fiber that does, is not stuck: no restart would fix it.
    let began = Instant::now();
    eventually(SOON, "it is still alive", async || {
        let alive = daemon.get("/livez").await.unwrap().0 == 200;
        (began.elapsed() > Duration::from_secs(4) && alive).then_some(())
    })
    .await;
    holder.batch_execute("COMMIT").await.unwrap();
    ledger.end_of(batch, SOON).await;
    eventually(SOON, "the channel is empty", async || {
        (metric(&daemon, "musterd_batcher_channel_fullness ").await == 0.0).then_some(())
    })
    .await;
}
