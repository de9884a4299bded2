//! Memory has a bound, whatever the size of the rows and however long PostgreSQL is away.

use std::time::Duration;

use musterd::embedded::{EmbeddedPostgres, Options};
use musterd::lines::Lines;
use musterd::store::pages::{self, ChunkCache};

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::ledger::{carve, session};
use crate::suite::support::proxy::FaultProxy;
use crate::suite::support::run;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::{PATIENCE, ask, assert_accounts_balance, end_of, progress, submit};

/// How long PostgreSQL is away. A worker that gathers anything meanwhile does so in the first seconds.
const AWAY: Duration = Duration::from_secs(8);

async fn start(options: Options) -> EmbeddedPostgres {
    let server =
        tokio::task::spawn_blocking(move || EmbeddedPostgres::start(options).unwrap()).await.unwrap();
    run::kill_at_end(server.pid());
    server
}

async fn stop(server: EmbeddedPostgres) {
    let pid = server.pid();
    tokio::task::spawn_blocking(move || server.stop().unwrap()).await.unwrap();
    run::forget(pid);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgresql_is_away_nothing_is_claimed_or_gathered_and_then_it_goes_on() {
    let options = Options::kept(run::new_dir("away").join("postgres")).setting("fsync", "off");
    let server = start(options.clone()).await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], server.port()).into()).await;
    let (mut client, _connection) = connect(server.url()).await;
    musterd::store::migrate::migrate(&mut client).await.unwrap();

    let toml = format!(
        "[database]\nurl = \"{}\"\n[handlers.echo]\nduration = \"1ms\"\n[queues.default]\nfibers = 16",
        proxy.rewrite(server.url())
    );
    let daemon = Daemon::builder(&TestDb::empty().await, &toml).log("info").start();
    daemon.wait_ready().await;
    let batch = submit(&client, "echo", 60_000, "context => to_jsonb(repeat('x', 1000))").await;
    eventually(PATIENCE, "rows are done", async || {
        (progress(&client, batch).await.succeeded > 2_000).then_some(())
    })
    .await;
    let (before, _) = daemon.memory();
    stop(server).await;
    eventually(PATIENCE, "it is not ready", async || {
        daemon.get("/readyz").await.is_ok_and(|(status, _)| status == 503).then_some(())
    })
    .await;
    let claimed = daemon.metric("musterd_blocks_claimed_total").await;
    // There is nothing to wait for: that nothing happens is what is to be seen.
    tokio::time::sleep(AWAY).await;
    let (during, _) = daemon.memory();
    println!("PostgreSQL away for {AWAY:?}: {before} MiB before, {during} MiB at the end of it");
    assert!(during < before + 64, "{before} MiB before, {during} MiB after {AWAY:?}");
    assert_eq!(daemon.metric("musterd_blocks_claimed_total").await, claimed);
    assert_eq!(daemon.get("/livez").await.unwrap().0, 200, "it lives: nobody should restart it");

    let server = start(options).await;
    proxy.point_at(([127, 0, 0, 1], server.port()).into());
    let (client, _connection) = connect(server.url()).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 60_000, 0, 0));
    assert_accounts_balance(&client).await;
    assert_eq!(daemon.get("/readyz").await.unwrap().0, 200);
    drop(daemon);
    stop(server).await;
}

/// Rows of 100 kB: a page of a megabyte has about ten of them, whether they lie side by side or scattered.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_has_no_more_than_the_bytes_that_were_asked_for() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let rows = "SELECT musterd.submit_batch('work', ARRAY (SELECT to_jsonb(repeat('x', 100000)) FROM generate_series(1, 200)))";
    client.query(rows, &[]).await.unwrap();
    let block = carve(&worker, 1, 200).await.remove(0);
    for wanted in [Lines::span(1, 200), (1..=200).step_by(10).collect::<Lines>()] {
        let page = pages::read(&worker, &ChunkCache::default(), &block, &wanted, 1_000_000).await.unwrap();
        let rows = page.rows();
        assert!((5..=15).contains(&rows.len()), "{wanted}: {} rows", rows.len());
        assert!(rows.iter().all(|row| row.input.len() == 100_002));
        assert_eq!(
            page.lines().iter().collect::<Vec<_>>(),
            rows.iter().map(|row| row.line).collect::<Vec<_>>()
        );
    }
}

/// What a worker may take for rows of a megabyte: pages in hand, a channel's worth of results, and a flush of them.
const MOST_MIB: u64 = 256;

#[tokio::test(flavor = "multi_thread")]
async fn rows_and_results_of_a_megabyte_stay_within_bounds() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "echo", 0, "hold => true").await;
    let append = "SELECT musterd.append_rows($1, ARRAY(
        SELECT to_jsonb(repeat(md5(g::text), 32768)) FROM generate_series(1, 50) g))";
    for _ in 0..4 {
        client.query(append, &[&batch]).await.unwrap();
    }
    let daemon = Daemon::builder(&db, "").log("info").start();
    daemon.wait_ready().await;
    client.query("SELECT musterd.release($1)", &[&batch]).await.unwrap();
    // 200 MiB in and out of a program that was not optimised: it takes as long as it takes.
    let end = eventually(PATIENCE * 3, "the batch ends", async || {
        let end = progress(&client, batch).await;
        end.is_over().then_some(end)
    })
    .await;
    assert_eq!((end.state.as_str(), end.succeeded, end.failed, end.aborted), ("succeeded", 200, 0, 0));
    let same = "SELECT count(*) FROM musterd.batches b, musterd.batch_rows(b.id) r WHERE r.result::text = r.input::text";
    assert_eq!(ask::<i64>(&client, same).await, 200);
    let (_, most) = daemon.memory();
    println!("200 rows and results of 1 MiB: {most} MiB at most");
    assert!(most < MOST_MIB, "{most} MiB");
}
