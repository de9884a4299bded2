//! Redis is an input: what any client may write there makes no tick fail, delays no recovery and is believed by no judge.

use std::time::{Duration, Instant};

use fred::clients::Client;
use fred::prelude::{Expiration, KeysInterface, SetsInterface};
use fred::types::Value;
use rustix::process::Signal;

use crate::suite::alive::redis_client;
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::services;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

const REGISTRY: &str = "MUSTER_WORKER_REGISTRY";
/// The slow looks of the recovery, many times a minute.
const OFTEN: &str = "heartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\n\
                     rows_ttl = \"1m\"\nsettle = \"1s\"";

fn config(url: &str, rest: &str) -> String {
    format!("[redis]\nurl = {url:?}\n[liveness]\nbackend = \"redis\"\n{OFTEN}\n{rest}")
}

async fn is_tidy(client: &Client) {
    eventually(SOON, "the registry has nothing but the worker that lives", async || {
        (client.scard::<i64, _>(REGISTRY).await.ok()? == 1).then_some(())
    })
    .await;
}

/// Members that are no names, and a lot of them: the recovery goes on, and they are tidied away.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_in_the_registry_is_removed_and_delays_no_recovery() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    let odd: Vec<Value> = vec![
        "a\0b".into(),
        Value::Bytes(vec![0xff, 0xfe, 0x00].into()),
        "".into(),
        "host".into(),
        "-1-1".into(),
        "{x}-1-1".into(),
        "../../etc/passwd".into(),
        "long-1-1".repeat(1_000).into(),
    ];
    client.sadd::<i64, _, _>(REGISTRY, odd.clone()).await.unwrap();
    let daemon = Daemon::builder(&db, &config(&redis.url(), "")).start();
    daemon.wait_ready().await;
    is_tidy(&client).await;
    for part in 0..300 {
        let many: Vec<String> = (0..1_000).map(|n| format!("garbage {part} {n}")).collect();
        client.sadd::<i64, _, _>(REGISTRY, many).await.unwrap();
    }
    client.sadd::<i64, _, _>(REGISTRY, odd).await.unwrap();
    // A worker that died: found by its silence in the time that this takes without garbage.
    let dead = "INSERT INTO musterd.workers (id, host, pid, version, seen_at)
                VALUES ('gone-1-1', 'h', 1, 'v', now() - interval '1 hour')";
    let began = Instant::now();
    ledger.client.execute(dead, &[]).await.unwrap();
    ledger.worker_is("gone-1-1", "dead", SOON).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    is_tidy(&client).await;
    let log = daemon.log();
    let failed: Vec<_> =
        log.iter().filter(|line| line.contains("tick failed") && !line.contains("sweep")).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// A heartbeat that no worker can have written speaks for no worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_that_lives_for_a_year_or_for_ever_is_not_believed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    let lives = [Some(Expiration::EX(365 * 24 * 60 * 60)), Some(Expiration::EX(60)), None];
    for (n, life) in lives.into_iter().enumerate() {
        let key = format!("MUSTER_{{silent-{n}-1}}_HEARTBEAT");
        client.set::<(), _, _>(key, "alive", life, None, false).await.unwrap();
        let silent = "INSERT INTO musterd.workers (id, host, pid, version, seen_at)
                      VALUES ($1, 'h', 1, 'v', now() - interval '1 hour')";
        ledger.client.execute(silent, &[&format!("silent-{n}-1")]).await.unwrap();
    }
    let judge = Daemon::builder(&db, &config(&redis.url(), "")).start();
    for n in 0..3 {
        ledger.worker_is(&format!("silent-{n}-1"), "dead", SOON).await;
    }
    drop(judge);
}

/// What a worker that is killed was running is in its set: blocks and tasks. It is compared with the database, which is right.
#[tokio::test(flavor = "multi_thread")]
async fn the_set_of_a_dead_worker_is_read_and_compared() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    let long = config(
        &redis.url(),
        "[handlers.long]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"1h\"\ntimeout = \"2h\"",
    );
    let victim = Daemon::builder(&db, &long).start();
    victim.wait_ready().await;
    let worker = ledger.worker_of(&victim).await;
    let task: i64 = ledger.client.query_one("SELECT musterd.enqueue('long')", &[]).await.unwrap().get(0);
    let batch = ledger.submit("long", 1).await;
    let key = format!("MUSTER_{{{worker}}}_ROWS");
    let members = eventually(SOON, "both are in the set", async || {
        let members: Vec<String> = client.smembers(key.as_str()).await.unwrap();
        (members.len() == 2).then_some(members)
    })
    .await;
    let tokens = "SELECT b.token::text, c.token::text FROM musterd.blocks b, musterd.task_claims c";
    let row = ledger.client.query_one(tokens, &[]).await.unwrap();
    let block = format!("block/{batch}/{}", row.get::<_, String>(0));
    for member in [&block, &format!("task/{task}/{}", row.get::<_, String>(1))] {
        assert!(members.contains(member), "{members:?}");
    }
    let heir = Daemon::builder(&db, &long).start();
    heir.wait_ready().await;
    // The worker would write its set again.
    victim.signal(Signal::STOP);
    // An end that was committed and not taken off yet, a stranger's words; and a block that is not there.
    let stale = ["block/1/00000000-0000-0000-0000-000000000001", "task/x/y", "a\0b"];
    client.sadd::<i64, _, _>(key.as_str(), stale.to_vec()).await.unwrap();
    client.srem::<i64, _, _>(key.as_str(), block).await.unwrap();
    victim.signal(Signal::KILL);
    heir.wait_for_log(SOON, |line| line.contains("Redis and PostgreSQL differ in what a dead worker")).await;
    assert_eq!(metric(&heir, "musterd_liveness_only_in_redis_total ").await, 1.0);
    assert_eq!(metric(&heir, "musterd_liveness_only_in_postgres_total ").await, 1.0);
    eventually(SOON, "both run elsewhere, whatever Redis said", async || {
        let held = "SELECT (SELECT count(*) FROM musterd.blocks WHERE worker <> $1)
                         + (SELECT count(*) FROM musterd.task_claims WHERE worker <> $1)";
        (ledger.client.query_one(held, &[&worker]).await.unwrap().get::<_, i64>(0) == 2).then_some(())
    })
    .await;
    eventually(SOON, "its set is removed", async || {
        (client.exists::<i64, _>(key.as_str()).await.unwrap() == 0).then_some(())
    })
    .await;
}

/// A worker that died held three blocks and eight tasks, and ran the last of each: with that one it may have died. A worker takes up one
/// suspect at a time, and these are the first.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_worker_ran_is_taken_up_before_what_it_only_held() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    let dead = "INSERT INTO musterd.workers (id, host, pid, version, seen_at)
                VALUES ('gone-1-1', 'h', 1, 'v', now() - interval '1 hour')";
    ledger.client.execute(dead, &[]).await.unwrap();
    let mut batches = Vec::new();
    for _ in 0..3 {
        let batch = ledger.submit_block("noop", 1).await;
        let held =
            "UPDATE musterd.blocks SET worker = 'gone-1-1', token = gen_random_uuid(), claimed_at = now()
                     WHERE batch_id = $1 RETURNING token::text";
        let token: String = ledger.client.query_one(held, &[&batch]).await.unwrap().get(0);
        batches.push((batch, token));
    }
    let enqueue = "SELECT musterd.enqueue('noop') FROM generate_series(1, 8)";
    let tasks: Vec<i64> =
        ledger.client.query(enqueue, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let claim = "SELECT c.id, c.token::text FROM musterd.claim_tasks('default', 'gone-1-1',
        ARRAY[gen_random_uuid(), gen_random_uuid()], ARRAY['noop'], ARRAY[500], '{}') c";
    let claimed = ledger.client.query(claim, &[]).await.unwrap();
    assert_eq!(claimed.len(), 8, "one claim of them all");
    let (task, (batch, token)) = (tasks[7], batches[2].clone());
    let ran = [format!("block/{batch}/{token}"), format!("task/{task}/{}", claimed[0].get::<_, String>(1))];
    client.sadd::<i64, _, _>("MUSTER_{gone-1-1}_ROWS", ran.to_vec()).await.unwrap();

    let _daemon = Daemon::builder(&db, &config(&redis.url(), "")).start();
    for id in tasks.iter().copied().chain(batches.iter().map(|(batch, _)| *batch)) {
        let ends = format!("SELECT count(*) FROM musterd.tasks WHERE id = {id} AND state = 'succeeded'");
        eventually(SOON, "everything ends", async || (ledger.number(&ends).await == 1).then_some(())).await;
    }
    let first_batch =
        "SELECT batch FROM public.claims WHERE worker <> 'gone-1-1' AND crashes > 0 ORDER BY at LIMIT 1";
    let first_task =
        "SELECT id FROM musterd.tasks WHERE command = 'noop' AND crashes > 0 ORDER BY claimed_at LIMIT 1";
    let first = (ledger.number(first_batch).await, ledger.number(first_task).await);
    assert_eq!(first, (batch, task));
}

/// The status cache is filled at the end of a batch and read by `batch show --cached`; anything else there is not believed.
#[tokio::test(flavor = "multi_thread")]
async fn the_status_cache_is_written_at_the_end_and_can_be_shown() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let redis = services::own_redis();
    let client = redis_client(&redis.url()).await;
    let toml = config(&redis.url(), "");
    let files = TestConfig::new(&db, &toml);
    let shown = async |id: i64| {
        let output = files.musterd(&["batch", "show", &id.to_string(), "--cached", "--json"]).await;
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        (serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap(), said)
    };
    let daemon = Daemon::builder(&db, &toml).start();
    let batch = ledger.submit("noop", 5).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(5));
    let key = format!("MUSTER_{{batch:{batch}}}_STATUS");
    let written = eventually(SOON, "the cache is written", async || {
        client.get::<Option<String>, _>(key.as_str()).await.unwrap()
    })
    .await;
    let left: i64 = client.ttl(key.as_str()).await.unwrap();
    assert!((80_000..=86_400).contains(&left), "{left}");
    let database = files.musterd(&["batch", "show", &batch.to_string(), "--json"]).await;
    let database: serde_json::Value = serde_json::from_slice(&database.stdout).unwrap();
    let mut progress = database.clone();
    // These the cache does not have.
    for key in ["canary", "redrives"] {
        progress.as_object_mut().unwrap().remove(key).unwrap();
    }
    let (cached, said) = shown(batch).await;
    assert!(said.contains("from the status cache, written"), "{said}");
    assert_eq!(cached, progress);
    // That it comes from there: the database does not know this one.
    let life = || Some(Expiration::EX(86_000));
    let other = written.replace(&format!("\"id\":{batch}"), "\"id\":987654");
    client.set::<(), _, _>("MUSTER_{batch:987654}_STATUS", other, life(), None, false).await.unwrap();
    let (other, said) = shown(987_654).await;
    assert_eq!(other["id"], 987_654);
    assert!(said.contains("written 6m 4"), "{said}");
    let escape = written.replace("\"noop\"", "\"no\\u001bop\"");
    for garbage in ["", "{}", "null", "{\"id\": 1}", escape.as_str()] {
        client.set::<(), _, _>(key.as_str(), garbage, life(), None, false).await.unwrap();
        let (answer, said) = shown(batch).await;
        assert_eq!(answer, database);
        assert!(said.contains("does not know batch"), "{said}");
    }
    client.del::<i64, _>(key.as_str()).await.unwrap();
    client.sadd::<i64, _, _>(key.as_str(), "another type").await.unwrap();
    assert!(shown(batch).await.1.contains("does not know batch"));
    drop((daemon, redis));
    let (answer, said) = shown(batch).await;
    assert_eq!(answer, database);
    assert!(said.contains("cannot be reached") && said.contains("asking the database"), "{said}");
}
