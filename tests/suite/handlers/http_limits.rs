//! `http`: a service is asked no more than it can take.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::server::{Act, Request, Server};
use super::{QUICK, SOON, Site, all_succeeded, ended, submit_rows};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::wait::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn no_more_requests_than_the_limit_are_under_way() {
    let gate = Gate::closed();
    let at = gate.clone();
    let server = Server::start(move |request: Request| {
        let at = at.clone();
        async move {
            at.pass().await;
            request.all("succeeded")
        }
    })
    .await;
    let site = Site::start(&server.config("block_size = 1\nconcurrency = 3\n")).await;
    let batch = site.submit("work", 30).await;
    // Three are at the gate, and eight fibers have something to send: nobody else comes.
    gate.entered_by(3).await;
    site.daemon.get("/livez").await.unwrap();
    assert_eq!(server.seen().len(), 3);
    gate.open();
    all_succeeded(&site.ended(batch).await, 30);
    assert_eq!(server.busiest.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_429_lowers_the_concurrency_and_fails_no_row() {
    let storm = Arc::new(AtomicUsize::new(2));
    let left = Arc::clone(&storm);
    let server = Server::start(move |request: Request| {
        let calm = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_err();
        async move {
            match calm {
                true => request.all("succeeded"),
                false => Act::ReplyWith(429, vec![("retry-after", "0".into())], "slow down".into()),
            }
        }
    })
    .await;
    let site = Site::start(&server.config("block_size = 5\n")).await;
    let batch = site.submit("work", 100).await;
    let rows = site.ended(batch).await;
    all_succeeded(&rows, 100);
    let line = site.daemon.wait_for_log(SOON, |line| line.contains("asking it less")).await;
    assert!(line.contains("\"limit\":4"), "from eight to four: {line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_is_kept_by_all_replicas_together() {
    let times = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&times);
    let server = Server::start(move |request: Request| {
        seen.lock().unwrap().push(Instant::now());
        async move { request.all("succeeded") }
    })
    .await;
    let db = TestDb::new().await;
    let config = format!("{QUICK}{}", server.config("block_size = 1\nrate_limit = \"20/s\"\n"));
    let (one, other) = (Daemon::builder(&db, &config).start(), Daemon::builder(&db, &config).start());
    one.wait_ready().await;
    other.wait_ready().await;
    let client = db.client().await;
    let rows: Vec<_> = (0..30).map(|n| serde_json::json!({ "n": n })).collect();
    let began = Instant::now();
    let batch = submit_rows(&client, "work", &rows.into()).await;
    all_succeeded(&ended(&client, batch).await, 30);
    // Thirty turns are twenty-nine intervals of 50 ms, whoever took them; a busy machine only makes it longer.
    let took = *times.lock().unwrap().last().unwrap() - began;
    assert!(took >= Duration::from_millis(1400), "{took:?}");
    let workers: i64 = client
        .query_one("SELECT count(*) FROM musterd.workers WHERE state = 'alive'", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(workers, 2);
}

/// A limit is no reason to fail, and a turn is not lost to a task that stops waiting for it.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_wait_for_their_turn_use_up_no_attempt() {
    let server = Server::start(move |_: Request| async {
        Act::Reply(200, serde_json::json!({ "outcome": "succeeded" }).to_string())
    })
    .await;
    let site = Site::start(&server.config("rate_limit = \"30/m\"\n")).await;
    // The last turn comes after eight seconds, which is longer than each of them has.
    let enqueue = "SELECT musterd.enqueue_many('work', array_fill('{}'::jsonb, ARRAY[5]), max_attempts => 1, timeout => '6 s')";
    site.client.query(enqueue, &[]).await.unwrap();
    let ended = "SELECT state::text, error FROM musterd.tasks WHERE state IN ('succeeded', 'failed')";
    let ended = eventually(SOON, "all have ended", async || {
        let rows = site.client.query(ended, &[]).await.unwrap();
        (rows.len() == 5).then_some(rows)
    })
    .await;
    for task in ended {
        assert_eq!(task.get::<_, String>(0), "succeeded", "{:?}", task.get::<_, Option<String>>(1));
    }
    assert_eq!(server.seen().len(), 5);
}

/// The next turn is in the database: neither a clock that was set back, nor a session that has the row locked, stops a worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_a_day_away_or_locked_stops_nothing() {
    let server = Server::start(move |request: Request| async move { request.all("succeeded") }).await;
    let site = Site::start(&server.config("rate_limit = \"50/s\"\n")).await;
    let mut locker = site.db.client().await;
    all_succeeded(&site.run("work", 2).await, 2);
    locker.batch_execute("UPDATE musterd.rate_limits SET next_at = now() + interval '1 day'").await.unwrap();
    all_succeeded(&site.run("work", 2).await, 2);
    let transaction = locker.transaction().await.unwrap();
    transaction.batch_execute("UPDATE musterd.rate_limits SET next_at = next_at").await.unwrap();
    let waits = site.submit("work", 20).await;
    let why =
        format!("SELECT count(*) FROM musterd.blocks WHERE batch_id = {waits} AND error LIKE 'rate_limit%'");
    eventually(SOON, "its rows were given back", async || {
        (site.client.query_one(&why, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
    })
    .await;
    // The fibers are free for others.
    all_succeeded(&site.run("noop", 20).await, 20);
    transaction.rollback().await.unwrap();
    all_succeeded(&site.ended(waits).await, 20);
}
