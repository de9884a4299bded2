//! A living worker says so: on time, whatever its handlers do, in both places, and to whoever asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fred::prelude::{Builder, Client, ClientLike, Config, KeysInterface, SetsInterface};
use futures::FutureExt;
use futures::future::BoxFuture;
use musterd::handler::{Done, Handler, Intake, Outcome, RowCall};

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::{Daemon, http_get};
use crate::suite::support::database::TestDb;
use crate::suite::support::embedded::Embedded;
use crate::suite::support::manifests::has;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::redis::{Maker, Redis};
use crate::suite::support::services;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

pub(crate) async fn redis_client(url: &str) -> Client {
    let client = Builder::from_config(Config::from_url(url).unwrap()).build().unwrap();
    client.init().await.unwrap();
    client
}

/// A handler made of a function.
struct Function<F>(F, Intake);

impl<F: Fn() + Send + Sync + 'static> Handler for Function<F> {
    fn intake(&self) -> Intake {
        self.1
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        async {
            (self.0)();
            Outcome::Succeeded(Done::default())
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_registry_and_rows_are_in_redis_with_their_lifetimes_and_gone_at_the_end() {
    keeps_its_roll_in(services::redis()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_registry_and_rows_are_in_valkey_just_as_well() {
    if has("valkey") {
        keeps_its_roll_in(&Redis::start(Maker::Valkey, services::free_port(), &[])).await;
    }
}

async fn keeps_its_roll_in(server: &Redis) {
    let (db, prefix) = (TestDb::new().await, services::redis_prefix());
    let ledger = Ledger::open(&db).await;
    let config = format!(
        "[redis]\nurl = {:?}\nkey_prefix = {prefix:?}\n[liveness]\nbackend = \"redis\"\n[handlers.sleep]\nduration = \"2s\"",
        server.url()
    );
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    let redis = redis_client(&server.url()).await;
    let key = |name: &str| format!("{prefix}_{{{worker}}}_{name}");
    eventually(SOON, "the heartbeat is there", async || {
        let said: Option<String> = redis.get(key("HEARTBEAT")).await.unwrap();
        (said.as_deref() == Some("alive")).then_some(())
    })
    .await;
    let left: i64 = redis.pttl(key("HEARTBEAT")).await.unwrap();
    assert!((30_000..=60_000).contains(&left), "{left}");
    // The registry is written by a command behind the one that sets the heartbeat.
    let registry = format!("{prefix}_WORKER_REGISTRY");
    eventually(SOON, "the worker is in the registry", async || {
        redis.sismember::<bool, _, _>(&registry, worker.as_str()).await.unwrap().then_some(())
    })
    .await;

    let batch = ledger.submit("sleep", 1).await;
    let held: Vec<String> = eventually(SOON, "the block is tracked", async || {
        let held: Vec<String> = redis.smembers(key("ROWS")).await.unwrap();
        (!held.is_empty()).then_some(held)
    })
    .await;
    let token: String =
        ledger.client.query_one("SELECT token::text FROM musterd.blocks", &[]).await.unwrap().get(0);
    assert_eq!(held, [format!("block/{batch}/{token}")]);
    // Its lifetime is the command behind the one that adds.
    let left: i64 = eventually(SOON, "the set has a lifetime", async || {
        let left: i64 = redis.pttl(key("ROWS")).await.unwrap();
        (left >= 0).then_some(left)
    })
    .await;
    assert!((150_000..=180_000).contains(&left), "{left}");
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(1));
    eventually(SOON, "the block is untracked", async || {
        (redis.exists::<i64, _>(key("ROWS")).await.unwrap() == 0).then_some(())
    })
    .await;
    // A call that was late on a busy machine counts as an absence until the next one.
    eventually(SOON, "Redis is there for every client", async || {
        (metric(&daemon, "musterd_redis_up ").await == 1.0).then_some(())
    })
    .await;

    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(redis.exists::<i64, _>(key("HEARTBEAT")).await.unwrap(), 0);
    let listed: bool = redis.sismember(&registry, worker.as_str()).await.unwrap();
    assert!(!listed);
    ledger.worker_is(&worker, "stopped", SOON).await;
}

/// L8: handlers that leave no thread of the runtime to anybody.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_keep_their_schedule_while_every_thread_is_busy() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = TestConfig::new(
        &db,
        "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"8s\"\nrows_ttl = \"5m\"\n[queues.default]\nfibers = 32",
    );
    let spin = || {
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    };
    let spin = Function(spin, Intake::OneByOne);
    let daemon = Embedded::start(&config, "spin", Arc::new(spin), Duration::from_secs(60));
    let batch = ledger.submit("spin", 8).await;
    assert_eq!(ledger.end_of(batch, SOON * 2).await, End::succeeded(8));
    let gap = "SELECT (max(gap) * 1000)::bigint FROM (
                   SELECT EXTRACT(EPOCH FROM at - lag(at) OVER (PARTITION BY worker ORDER BY at)) AS gap FROM public.beats) g";
    let gap = ledger.number(gap).await;
    assert!(gap < 4_000, "{gap} ms between two beats, half the TTL is 4000");
    assert!(daemon.stop().await.is_clean());
}

/// L9: PostgreSQL is out of reach, and so is every proof that our blocks are still ours.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_renew_starts_nothing_until_it_can() {
    // Whichever way a handler takes its rows.
    let together = Intake::Together(std::num::NonZeroUsize::MIN);
    tokio::join!(starts_nothing_without_a_lease(Intake::OneByOne), starts_nothing_without_a_lease(together));
}

async fn starts_nothing_without_a_lease(intake: Intake) {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let url = proxy.rewrite(db.url());
    let config = TestConfig::new(
        &db,
        &format!(
            "[database]\nurl = {url:?}\n[liveness]\nheartbeat_interval = \"300ms\"\nheartbeat_ttl = \"3s\"\nrows_ttl = \"5m\"\n\
             [queues.default]\nfibers = 1"
        ),
    );
    let starts = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&starts);
    let step = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        #[expect(clippy::disallowed_methods, reason = "the pace of a blocking handler")]
        std::thread::sleep(Duration::from_millis(150));
    };
    let step = Function(step, intake);
    let daemon = Embedded::start(&config, "step", Arc::new(step), Duration::from_secs(60));
    // One block and one page of rows: nothing has to be claimed or read for the next handler to start.
    let batch = ledger.submit_block("step", 60).await;
    eventually(SOON, "the block runs", async || (starts.load(Ordering::SeqCst) > 2).then_some(())).await;
    proxy.set(Fault::Blackhole);
    eventually(SOON, "the lease is lost", async || {
        let (status, ready) = http_get(config.http_port(), "/readyz").await.ok()?;
        (status == 503 && ready.contains("the lease is lost")).then_some(())
    })
    .await;
    // The one that had asked just before may still start. Then nothing happens, which has no event to wait for.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let still = starts.load(Ordering::SeqCst);
    assert!(still < 60, "all rows were started: {still}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(starts.load(Ordering::SeqCst), still);
    proxy.reset_all();
    proxy.set(Fault::None);
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(60));
    drop(daemon);
}

/// L5, the ordinary way: a handler that waits for ever is cancelled and its row tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_hung_handler_is_ended_at_its_timeout() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = "[handlers.sleep]\nduration = \"1h\"\ntimeout = \"300ms\"\n[retry]\nmax_attempts = 2\nbase = \"100ms\"";
    let daemon = Daemon::builder(&db, config).start();
    let batch = ledger.submit("sleep", 1).await;
    let end = ledger.end_of(batch, SOON).await;
    assert_eq!((end.state.as_str(), end.failed), ("failed", 1));
    let sql = "SELECT attempt, error FROM musterd.results";
    let row = ledger.client.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 2);
    assert!(row.get::<_, String>(1).contains("timeout of 300ms"));
    drop(daemon);
}

/// L5, the hard way: a handler that blocks its thread cannot be cancelled; it is reported.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_cannot_be_stopped_is_reported() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = TestConfig::new(&db, "[retry]\nmax_attempts = 1\n");
    let released = Arc::new(AtomicBool::new(false));
    let stays = Arc::clone(&released);
    let block = move || {
        while !stays.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    let block = Function(block, Intake::OneByOne);
    let daemon = Embedded::start(&config, "block", Arc::new(block), Duration::from_millis(100));
    let batch = ledger.submit("block", 1).await;
    eventually(SOON, "it is in the metrics", async || {
        let metrics = http_get(config.http_port(), "/metrics").await.ok()?.1;
        metrics.lines().any(|line| line == "musterd_handlers_overdue 1").then_some(())
    })
    .await;
    let end = ledger.end_of(batch, SOON).await;
    assert_eq!((end.state.as_str(), end.failed), ("failed", 1), "while the handler still blocks");
    released.store(true, Ordering::SeqCst);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_listed_with_what_they_hold() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let daemon = Daemon::builder(&db, "[handlers.sleep]\nduration = \"1h\"").start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    ledger.submit_block("sleep", 7).await;
    ledger.somebody_holds(1, SOON).await;
    let config = TestConfig::new(&db, "");
    let output = config.musterd(&["worker", "list", "--json"]).await;
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&listed[0]["id"], &listed[0]["state"]), (&worker.as_str().into(), &"alive".into()));
    assert_eq!((&listed[0]["blocks"], &listed[0]["rows"]), (&1.into(), &7.into()));
    let output = config.musterd(&["worker", "show", &worker]).await;
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        shown.contains("alive")
            && shown.contains("rows in hand")
            && shown.contains(env!("CARGO_PKG_VERSION")),
        "{shown}"
    );
    let output = config.musterd(&["worker", "list"]).await;
    assert!(String::from_utf8(output.stdout).unwrap().contains(&worker));
    let output = config.musterd(&["worker", "show", "nobody"]).await;
    assert_eq!(output.status.code(), Some(1));
}
