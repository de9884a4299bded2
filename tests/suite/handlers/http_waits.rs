//! FINDINGS 4: whatever wait a service asks for, its rows come back one day, and no other waits for it.

use serde_json::{Value, json};

use super::server::{Act, Request, Server};
use super::{SOON, Site, all_succeeded};
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::ask;

/// Now, never heard of, the past, and very long: as seconds, and as dates.
const WAITS: [&str; 11] = [
    "0",
    "-1",
    "1e18",
    "soon",
    "Sun, 06 Nov 1994 08:49:37 GMT",
    // Later than any moment that can be computed with: as good as none.
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "99999999999999",
    "18446744073709551615",
    "1763380800000",
    "340282366920938463463374607431768211456",
    "Thu, 30 Dec 9999 12:00:00 GMT",
];
/// How many of them are over at once.
const SHORT: usize = 6;

/// A handler for each of them, so that a service that wants to be left alone for a while is left alone by its own rows only.
fn config(server: &Server) -> String {
    let handler = |n| server.config("").replace("[handlers.work]", &format!("[handlers.work{n}]"));
    (1..=WAITS.len()).map(handler).collect()
}

/// The first time a row or a task is asked for, 503 with the wait that it names; then it succeeds.
async fn busy_at_first() -> Server {
    Server::start(|request: Request| async move {
        let is_task = request.body["kind"] == "task";
        let (call, input) = match is_task {
            true => (&request.body["task"], &request.body["task"]["payload"]),
            false => (&request.body["block"], &request.body["rows"][0]["input"]),
        };
        if call["attempt"] == 1 {
            let wait = WAITS[input["n"].as_u64().unwrap() as usize - 1];
            return Act::ReplyWith(503, vec![("retry-after", wait.into())], "busy".into());
        }
        match is_task {
            true => Act::Reply(200, json!({ "outcome": "succeeded" }).to_string()),
            false => request.all("succeeded"),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_retry_after_keeps_a_worker_from_writing_or_a_row_from_coming_back() {
    let server = busy_at_first().await;
    let site = Site::start(&config(&server)).await;
    let mut batches = Vec::new();
    for n in 1..=WAITS.len() {
        batches.push(site.submit_rows(&format!("work{n}"), &json!([{ "n": n }])).await);
    }
    let left = "SELECT count(*) FROM musterd.blocks WHERE worker IS NULL AND available_at > now() + interval '1 hour'";
    eventually(SOON, "all were asked for, and the short waits are over", async || {
        let done = "SELECT count(*) FROM musterd.results";
        let done = ask::<i64>(&site.client, done).await == SHORT as i64;
        (done && ask::<i64>(&site.client, left).await == (WAITS.len() - SHORT) as i64).then_some(())
    })
    .await;
    let last = "SELECT max(available_at) <= now() + interval '25 hours' FROM musterd.blocks";
    assert!(ask::<bool>(&site.client, last).await, "no wait is longer than a day");
    // The worker is well: it writes, claims, and ends what else there is.
    assert_eq!(site.daemon.get("/readyz").await.unwrap().0, 200);
    all_succeeded(&site.run("noop", 100).await, 100);
    // When their time has come they run.
    site.client.execute("UPDATE musterd.blocks SET available_at = now()", &[]).await.unwrap();
    for batch in batches {
        let rows = site.ended(batch).await;
        all_succeeded(&rows, 1);
        assert_eq!(rows[0].attempt, 2, "{rows:?}");
    }
    site.daemon.signal(rustix::process::Signal::TERM);
    assert!(site.daemon.wait_exit(SOON).await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_retry_after_keeps_a_task_from_coming_back() {
    let server = busy_at_first().await;
    let site = Site::start(&config(&server)).await;
    for n in 1..=WAITS.len() {
        let payload: Value = json!({ "n": n });
        let enqueue = format!("SELECT musterd.enqueue('work{n}', $1)");
        site.client.query_one(&enqueue, &[&payload]).await.unwrap();
    }
    eventually(SOON, "all were asked for, and the short waits are over", async || {
        let now = "SELECT count(*) FILTER (WHERE state = 'succeeded') || '/' ||
                          count(*) FILTER (WHERE state = 'scheduled' AND run_at > now() + interval '1 hour') FROM musterd.tasks";
        (ask::<String>(&site.client, now).await == format!("{SHORT}/{}", WAITS.len() - SHORT)).then_some(())
    })
    .await;
    let last = "SELECT max(run_at) <= now() + interval '25 hours' FROM musterd.tasks";
    assert!(ask::<bool>(&site.client, last).await, "no wait is longer than a day");
    assert_eq!(site.daemon.get("/readyz").await.unwrap().0, 200);
    let due = "UPDATE musterd.tasks SET run_at = now() WHERE state = 'scheduled'";
    site.client.execute(due, &[]).await.unwrap();
    eventually(SOON, "they run", async || {
        let open = "SELECT count(*) FROM musterd.tasks WHERE state <> 'succeeded'";
        (ask::<i64>(&site.client, open).await == 0).then_some(())
    })
    .await;
}

/// A service that wants to be left alone keeps no fiber of its queue waiting, and costs no further row an attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_a_service_holds_up_nothing_else_of_its_queue() {
    let open = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let is_open = std::sync::Arc::clone(&open);
    let server = Server::start(move |request: Request| {
        let is_open = is_open.load(std::sync::atomic::Ordering::SeqCst);
        async move {
            match is_open {
                true => request.all("succeeded"),
                false => Act::ReplyWith(503, vec![("retry-after", "12".into())], "busy".into()),
            }
        }
    })
    .await;
    let site = Site::start(&server.config("block_size = 10\n[queues.default]\nfibers = 1\n")).await;
    let batch = site.submit("work", 500).await;
    eventually(SOON, "it was asked", async || (!server.seen().is_empty()).then_some(())).await;
    open.store(true, std::sync::atomic::Ordering::SeqCst);
    let began = std::time::Instant::now();
    // The only fiber is free for others.
    all_succeeded(&site.run("noop", 100).await, 100);
    assert!(began.elapsed() < std::time::Duration::from_secs(8), "{:?}", began.elapsed());
    assert!(server.seen().len() < 3, "it is left alone");
    let rows = site.ended(batch).await;
    all_succeeded(&rows, 500);
    let charged = rows.iter().filter(|row| row.attempt > 1).count();
    assert!((1..=10).contains(&charged), "only those that were asked for: {charged}");
}
