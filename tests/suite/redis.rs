//! S15: nothing in Redis, and no Redis, harms anybody. And the kinds of Redis there are.

use fred::prelude::{ClientLike, ConfigInterface, Expiration, KeysInterface, SetsInterface};
use rustix::process::Signal;

use crate::suite::alive::redis_client;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::redis::{Maker, Redis};
use crate::suite::support::redis_kinds::Cluster;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};
use crate::suite::support::{run, services};

fn config(url: &str, rest: &str) -> String {
    format!(
        "[redis]\nurl = {url:?}\n[liveness]\nbackend = \"redis\"\n{rest}\n[database]\nmax_connections = 8\n\
         [handlers.sleep]\nduration = \"50ms\""
    )
}

/// Many short looks, so that a mistake has many chances.
const BUSY: &str = "heartbeat_interval = \"500ms\"\nheartbeat_ttl = \"20s\"\nrecovery_interval = \"300ms\"\nrows_ttl = \"2m\"\nsettle = \"1s\"";

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_restarted_or_spoilt_redis_makes_nobody_steal() {
    nobody_steals(Maker::Redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_restarted_or_spoilt_valkey_makes_nobody_steal() {
    if has("valkey") {
        nobody_steals(Maker::Valkey).await;
    }
}

async fn nobody_steals(maker: Maker) {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let mut redis = Redis::start(maker, services::free_port(), &[]);
    let config = config(&redis.url(), BUSY);
    let daemons: Vec<Daemon> = (0..4).map(|_| Daemon::builder(&db, &config).start()).collect();
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    let batch = ledger.submit("sleep", 4000).await;
    ledger.has_results(batch, 50, SOON).await;
    let client = redis_client(&redis.url()).await;
    for round in 1..=10 {
        client.flushall::<()>(false).await.unwrap();
        ledger.has_results(batch, 50 + round * 50, SOON).await;
    }
    let workers = eventually(SOON, "the living write themselves into the registry again", async || {
        let workers: Vec<String> = client.smembers("MUSTER_WORKER_REGISTRY").await.unwrap();
        (workers.len() == 4).then_some(workers)
    })
    .await;

    // Every key of theirs, with a type it must not have.
    for round in 1..=10 {
        for worker in &workers {
            let (rows, beat) =
                (format!("MUSTER_{{{worker}}}_ROWS"), format!("MUSTER_{{{worker}}}_HEARTBEAT"));
            for key in ["MUSTER_WORKER_REGISTRY".to_owned(), rows, beat] {
                client.del::<i64, _>(key.clone()).await.unwrap();
                client.hset_garbage(&key).await;
            }
        }
        ledger.has_results(batch, 600 + round * 50, SOON).await;
    }
    eventually(SOON, "the registry is a set again", async || {
        client.smembers::<Vec<String>, _>("MUSTER_WORKER_REGISTRY").await.ok()
    })
    .await;
    // Of an old dump: workers nobody knows, with rows that are other people's.
    client.sadd::<i64, _, _>("MUSTER_WORKER_REGISTRY", vec!["old-1-1", "old-2-2"]).await.unwrap();
    client.sadd::<i64, _, _>("MUSTER_{old-1-1}_ROWS", "block/1/not-a-token").await.unwrap();
    eventually(SOON, "they are struck off", async || {
        let left: Vec<String> = client.smembers("MUSTER_WORKER_REGISTRY").await.ok()?;
        let rows: i64 = client.exists("MUSTER_{old-1-1}_ROWS").await.ok()?;
        (!left.iter().any(|id| id.starts_with("old")) && rows == 0).then_some(())
    })
    .await;

    // Gone, and back with nothing.
    redis.stop();
    everybody_sees(&daemons, 0.0).await;
    redis.restart();
    everybody_sees(&daemons, 1.0).await;
    assert_eq!(ledger.end_of(batch, SOON * 2).await, End::succeeded(4000));
    assert_eq!(ledger.claimed_again().await, 0, "rows were run again");
    assert_eq!((ledger.dead().await, ledger.deadlocks().await), (0, 0));
    for daemon in &daemons {
        assert_eq!(metric(daemon, "musterd_fenced_total ").await, 0.0);
        let warned =
            daemon.log().iter().filter(|line| line.contains("Redis is away; PostgreSQL alone")).count();
        // However many clients the worker has.
        assert_eq!(warned, 1, "warned {warned} times");
    }
    drop(redis);
}

async fn everybody_sees(daemons: &[Daemon], up: f64) {
    eventually(SOON, "everybody has seen it", async || {
        for daemon in daemons {
            if metric(daemon, "musterd_redis_up ").await != up {
                return None;
            }
        }
        Some(())
    })
    .await;
}

/// A type that none of our keys has.
trait Garbage {
    async fn hset_garbage(&self, key: &str);
}

impl Garbage for fred::clients::Client {
    async fn hset_garbage(&self, key: &str) {
        use fred::interfaces::HashesInterface;
        // A worker may have written the key again meanwhile; then it is as it should be.
        let _ = self.hset::<i64, _, _>(key, ("field", "value")).await;
    }
}

/// Two witnesses: as long as one of them speaks for a worker, it lives.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_silent_in_postgresql_and_beats_in_redis_is_left_in_peace() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    // Struck off by the judge once it can ask Redis; before, PostgreSQL's word alone would do.
    let (registry, gone) = ("MUSTER_WORKER_REGISTRY", "gone-1-1");
    client.sadd::<i64, _, _>(registry, gone).await.unwrap();
    let judge = Daemon::builder(&db, &config(&redis.url(), BUSY)).start();
    eventually(SOON, "the judge asks Redis", async || {
        (!client.sismember::<bool, _, _>(registry, gone).await.unwrap()).then_some(())
    })
    .await;
    let beat = "MUSTER_{silent-1-1}_HEARTBEAT";
    client.set::<(), _, _>(beat, "alive", Some(Expiration::EX(20)), None, false).await.unwrap();
    let silent = "INSERT INTO musterd.workers (id, host, pid, version, seen_at)
         VALUES ('silent-1-1', 'h', 1, 'v', now() - interval '1 hour')";
    ledger.client.execute(silent, &[]).await.unwrap();
    judge.wait_for_log(SOON, |line| line.contains("alive in Redis; it is not declared dead")).await;
    assert_eq!(ledger.dead().await, 0);
    client.del::<i64, _>(beat).await.unwrap();
    ledger.worker_is("silent-1-1", "dead", SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_away_at_the_start_is_done_without_and_found_later() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let port = services::free_port();
    let daemon = Daemon::builder(&db, &config(&format!("redis://127.0.0.1:{port}"), BUSY)).start();
    daemon.wait_ready().await;
    let batch = ledger.submit("sleep", 100).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(100));
    assert_eq!(metric(&daemon, "musterd_redis_up ").await, 0.0);
    let redis = Redis::start(Maker::Redis, port, &[]);
    let worker = ledger.worker_of(&daemon).await;
    let client = redis_client(&redis.url()).await;
    eventually(SOON, "the heartbeat is in Redis", async || {
        let said: Option<String> = client.get(format!("MUSTER_{{{worker}}}_HEARTBEAT")).await.unwrap();
        said.map(|_| ())
    })
    .await;
    drop((client, redis));
}

/// L8. Nothing is measured: it takes seconds until a Redis that only holds its tongue is given up, and there is time for
/// many beats; with a beat that waits for Redis there are two or three, however often it is tried.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_redis_holds_up_no_heartbeat_in_postgresql() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let often = BUSY.replace("\"500ms\"", "\"50ms\"");
    let daemon = [Daemon::builder(&db, &config(&redis.url(), &often)).start()];
    daemon[0].wait_ready().await;
    let beats = async || ledger.number("SELECT count(*) FROM public.beats").await;
    eventually(SOON * 2, "ten beats before Redis is given up", async || {
        everybody_sees(&daemon, 1.0).await;
        redis.signal(Signal::STOP);
        let before = beats().await;
        let mut enough = false;
        while !enough && metric(&daemon[0], "musterd_redis_up ").await == 1.0 {
            enough = beats().await >= before + 10;
        }
        enough &= metric(&daemon[0], "musterd_redis_up ").await == 1.0;
        redis.signal(Signal::CONT);
        enough.then_some(())
    })
    .await;
}

/// Three masters; the keys of one worker share a slot, the registry has another.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_cluster_serves_as_well_as_a_single_server() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let cluster = Cluster::start(Maker::Redis, 0).await;
    let url = cluster.url();
    let config = config(&url, BUSY).replace("50ms", "500ms");
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    let client = redis_client(&url).await;
    let key = |name: &str| format!("MUSTER_{{{worker}}}_{name}");
    let batch = ledger.submit("sleep", 40).await;
    eventually(SOON, "heartbeat, registry and rows are there", async || {
        let beat: Option<String> = client.get(key("HEARTBEAT")).await.ok()?;
        let listed: bool = client.sismember("MUSTER_WORKER_REGISTRY", worker.as_str()).await.ok()?;
        let rows: i64 = client.scard(key("ROWS")).await.ok()?;
        (beat.is_some() && listed && rows > 0).then_some(())
    })
    .await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(40));
    // A dead worker is struck off there, too.
    let heir = Daemon::builder(&db, &config).start();
    heir.wait_ready().await;
    daemon.signal(Signal::KILL);
    ledger.worker_is(&worker, "dead", SOON).await;
    eventually(SOON, "its keys are gone", async || {
        let beat: i64 = client.exists(key("HEARTBEAT")).await.ok()?;
        let listed: bool = client.sismember("MUSTER_WORKER_REGISTRY", worker.as_str()).await.ok()?;
        (beat == 0 && !listed).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_and_a_password_are_spoken() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let dir = run::new_dir("redis-tls");
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
    let (cert, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let (plain, tls) = (services::free_port(), services::free_port());
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let port = tls.to_string();
    let redis = Redis::start(
        Maker::Redis,
        plain,
        &["--tls-port", &port, "--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-auth-clients", "no"],
    );
    let admin = redis_client(&redis.url()).await;
    admin.config_set("requirepass", "canary").await.unwrap();
    let url = format!("rediss://:canary@localhost:{tls}");
    let daemon = Daemon::builder(&db, &config(&url, BUSY)).env("SSL_CERT_FILE", &cert).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    eventually(SOON, "the heartbeat came through TLS", async || {
        let said: Option<String> = admin.get(format!("MUSTER_{{{worker}}}_HEARTBEAT")).await.unwrap();
        said.map(|_| ())
    })
    .await;
    assert!(!daemon.log().iter().any(|line| line.contains("canary")), "a password in the log");
}
