//! What the port says of the daemon's health: alive while its loops turn, ready while it can work, and the figures of a queue.

use std::time::{Duration, Instant};

use serde_json::Value;

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
async fn a_claim_loop_that_stands_still_is_not_alive_and_is_named() {
    let db = TestDb::new().await;
    let toml = "[liveness]\nstuck_after = \"1s\"\n[claim]\npoll_interval = \"50ms\"";
    let builder = Daemon::builder(&db, toml).env("MUSTERD_FAILPOINTS", "claim.turn=20*sleep(1h)");
    let daemon = builder.start();
    daemon.wait_ready().await;
    let answer = eventually(SOON, "it is not alive", async || {
        let (status, answer) = daemon.get("/livez").await.unwrap();
        (status == 503 && answer.contains("queue default")).then_some(answer)
    })
    .await;
    let told: Value = serde_json::from_str(body(&answer)).unwrap();
    assert_eq!(told["alive"], false);
    let stuck: Vec<&str> = told["stuck"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
    assert!(stuck.iter().any(|s| s.starts_with("queue default: has not turned for ")), "{stuck:?}");
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
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    ledger.client.batch_execute("ALTER TABLE musterd.results RENAME COLUMN attempt TO gone").await.unwrap();
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
    assert_eq!(daemon.get("/livez").await.unwrap().0, 200);
    ledger.client.batch_execute("ALTER TABLE musterd.results RENAME COLUMN gone TO attempt").await.unwrap();
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
