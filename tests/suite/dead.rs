//! A dead worker's rows run elsewhere, soon, once, and nobody who lives is touched.

use std::time::Duration;

use musterd::store::Store;
use musterd::store::recovery::{self, Ran};
use rustix::process::Signal;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::services;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger, metric};

/// Judged by silence alone: no session lock behind a transaction pooler.
const BY_SILENCE: &str = "[database]\npooler = \"transaction\"\n";
const SHORT: &str = "heartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\nrows_ttl = \"1m\"\nsettle = \"1s\"\n";
/// Rows of a quarter of a second: some are always under way.
const SLOW: &str = "[handlers.sleep]\nduration = \"250ms\"\n";

fn redis(prefix: &str) -> String {
    format!("[redis]\nurl = {:?}\nkey_prefix = {prefix:?}\n", services::redis().url())
}

/// Kills one of two workers; the seconds until what it held was claimed by the other, who saw it by `sign`.
async fn kill_one(config: &str, sign: &str) -> f64 {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let victim = Daemon::builder(&db, config).start();
    victim.wait_ready().await;
    ledger.submit("sleep", 400).await;
    let worker = ledger.somebody_holds(1, SOON).await;
    // Carved to the end: whatever the other claims was the victim's.
    ledger.client.execute("UPDATE musterd.batches SET next_line = rows + 1", &[]).await.unwrap();
    let heir = Daemon::builder(&db, config).start();
    heir.wait_ready().await;
    let settled = "SELECT count(*) FROM musterd.workers WHERE state = 'alive'";
    assert_eq!(ledger.number(settled).await, 2);
    // A judge must have been well for a while itself (`liveness.settle`), which nobody can see from outside.
    tokio::time::sleep(Duration::from_millis(if config.contains("settle") { 1_500 } else { 16_000 })).await;
    let killed = ledger.now().await;
    victim.signal(Signal::KILL);
    let took = ledger.claimed_elsewhere(&worker, &killed, Duration::from_secs(130)).await;
    ledger.worker_is(&worker, "dead", SOON).await;
    heir.wait_for_log(SOON, |line| line.contains("declared dead") && line.contains(sign)).await;
    // Counted after the commit that the claim above has seen.
    eventually(SOON, "the recovery is counted", async || {
        (metric(&heir, "musterd_liveness_recovered_blocks_total ").await >= 1.0).then_some(())
    })
    .await;
    assert_eq!(ledger.deadlocks().await, 0);
    took
}

/// L2, with the shipped settings, and Redis.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_killed_worker_run_again_by_its_session_lock() {
    let config = format!(
        "{}[liveness]\nbackend = \"redis\"\n[handlers.sleep]\nduration = \"3s\"",
        redis(&services::redis_prefix())
    );
    let took = kill_one(&config, "its session lock is gone").await;
    println!("SIGKILL to the first row re-run, session lock, shipped settings: {took:.1} s");
    assert!(took <= 10.0, "{took} s");
}

/// L2, with the shipped settings alone: no Redis is configured.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_killed_worker_run_again_within_ten_seconds_without_redis() {
    let took = kill_one("[handlers.sleep]\nduration = \"3s\"", "its session lock is gone").await;
    println!("SIGKILL to the first row re-run, session lock, without Redis: {took:.1} s");
    assert!(took <= 10.0, "{took} s");
}

/// L2 without the session lock: TTL + interval.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_session_lock_redis_tells_of_a_death() {
    let slow = SLOW.replace("250ms", "2s");
    let config = format!(
        "{BY_SILENCE}{}[liveness]\nbackend = \"redis\"\n{SHORT}{slow}",
        redis(&services::redis_prefix())
    );
    let took = kill_one(&config, "silent for longer than the TTL").await;
    assert!(took >= 3.0, "{took} s; the TTL is 4 s");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_session_lock_and_redis_the_table_tells_of_a_death() {
    let slow = SLOW.replace("250ms", "2s");
    let config = format!("{BY_SILENCE}[liveness]\n{SHORT}{slow}");
    let took = kill_one(&config, "silent for longer than the TTL").await;
    assert!(took >= 3.0, "{took} s; the TTL is 4 s");
}

/// L2: everybody was down for longer than every TTL.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_left_by_workers_long_gone_is_recovered_at_the_first_start() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let first = Daemon::builder(&db, SLOW).start();
    let batch = ledger.submit("sleep", 40).await;
    let worker = ledger.somebody_holds(1, SOON).await;
    first.signal(Signal::KILL);
    first.wait_exit(SOON).await;
    ledger
        .client
        .execute("UPDATE musterd.workers SET seen_at = now() - interval '3 hours'", &[])
        .await
        .unwrap();
    // The shipped settings: only the look at the start can be this quick.
    let second = Daemon::builder(&db, SLOW).start();
    second.wait_for_log(SOON, |line| line.contains("silent for longer than the TTL")).await;
    ledger.worker_is(&worker, "dead", SOON).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(40));
}

/// S6: dead between the commit of the last row and everything that follows from it.
#[tokio::test(flavor = "multi_thread")]
async fn a_death_right_after_the_last_commit_repeats_nothing_and_the_batch_still_ends() {
    let (db, prefix) = (TestDb::new().await, services::redis_prefix());
    let ledger = Ledger::open(&db).await;
    let config = format!("{}[liveness]\nbackend = \"redis\"\nsettle = \"1s\"", redis(&prefix));
    let batch = ledger.submit_block("noop", 50).await;
    let first = Daemon::builder(&db, &config).env("MUSTERD_FAILPOINTS", "flush.committed=1*abort").start();
    first.wait_exit(SOON).await;
    assert_eq!(ledger.number("SELECT count(*) FROM musterd.results").await, 50, "the flush was committed");
    assert!(ledger.end(batch).await.is_none(), "nobody has looked at the batch yet");
    let second = Daemon::builder(&db, &config).start();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(50));
    assert_eq!(ledger.claimed_again().await, 0);
    drop(second);
}

/// S16 and L2, by hand: what one recoverer lists, another has freed and a living worker has claimed.
#[tokio::test(flavor = "multi_thread")]
async fn a_recoverer_that_was_paused_touches_nothing_that_has_changed_hands() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config: musterd::store::Config = toml::from_str(&format!("url = {:?}", db.url())).unwrap();
    let store = Store::open(&config).unwrap();
    ledger.submit_block("noop", 100).await;
    ledger.submit_block("noop", 100).await;
    let own = "UPDATE musterd.blocks SET worker = 'gone', token = gen_random_uuid(), claimed_at = now()";
    ledger.client.execute(own, &[]).await.unwrap();

    let (mut slow, mut quick) = (store.general.get().await.unwrap(), store.general.get().await.unwrap());
    let listed = recovery::orphans(&slow).await.unwrap();
    assert_eq!(listed.len(), 2, "an owner whom nobody knows is dead");
    // One of the two blocks is locked by somebody: it does not keep the other from being freed.
    let mut schedule = Schedule::new(&db, &["user"]).await;
    schedule.run("user", "BEGIN").await;
    schedule
        .run("user", &format!("SELECT 1 FROM musterd.blocks WHERE id = {} FOR UPDATE", listed[0].0))
        .await;
    let freed = recovery::free_if_held(&mut quick, &listed, 3, &Ran::default()).await.unwrap();
    assert_eq!((freed.blocks, freed.lines), (1, 100));
    schedule.run("user", "COMMIT").await;
    let freed = recovery::free_if_held(&mut quick, &listed, 3, &Ran::default()).await.unwrap();
    assert_eq!(freed.blocks, 1);
    let pieces = "SELECT count(*) FROM musterd.blocks WHERE worker IS NULL AND crashes = 1";
    assert_eq!(ledger.number(pieces).await, 16, "each block in eighths");

    // A living worker takes them; ids may even be the same, the tokens are not.
    let alive = "INSERT INTO musterd.workers (id, host, pid, version) VALUES ('alive', 'h', 1, 'v')";
    ledger.client.execute(alive, &[]).await.unwrap();
    let claim = format!(
        "UPDATE musterd.blocks SET worker = 'alive', token = gen_random_uuid(), id = CASE WHEN id = \
         (SELECT min(id) FROM musterd.blocks) THEN {} ELSE id END",
        listed[0].0
    );
    ledger.client.execute(&claim, &[]).await.unwrap();
    let freed = recovery::free_if_held(&mut slow, &listed, 3, &Ran::default()).await.unwrap();
    assert_eq!(freed.blocks, 0);
    assert_eq!(ledger.number("SELECT count(*) FROM musterd.blocks WHERE worker = 'alive'").await, 16);
    assert!(recovery::orphans(&slow).await.unwrap().is_empty());
}

/// A row of the list that another transaction has locked keeps no judge waiting: it is declared dead at a later look.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_worker_is_declared_dead_later() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config: musterd::store::Config = toml::from_str(&format!("url = {:?}", db.url())).unwrap();
    let client = Store::open(&config).unwrap().general.get().await.unwrap();
    let workers = "INSERT INTO musterd.workers (id, host, pid, version, seen_at, lock_key)
         VALUES ('judge', 'h', 1, 'v', now(), NULL), ('silent', 'h', 2, 'v', now() - interval '1 hour', NULL),
                ('lockless', 'h', 3, 'v', now(), 4711)";
    ledger.client.batch_execute(workers).await.unwrap();
    let mut schedule = Schedule::new(&db, &["user"]).await;
    schedule.run("user", "BEGIN").await;
    schedule.run("user", "SELECT 1 FROM musterd.workers FOR UPDATE").await;
    let suspect = recovery::lockless(&client, "judge", Duration::ZERO).await.unwrap().remove(0);
    assert_eq!(suspect.id, "lockless");
    let (ttl, own) = (Duration::from_secs(60), Duration::from_secs(600));
    for (is_locked, dead) in [(true, 0), (false, 2)] {
        if !is_locked {
            schedule.run("user", "COMMIT").await;
        }
        let declared = [
            recovery::declare_dead_if_silent(&client, "judge", "silent", ttl, own).await.unwrap(),
            recovery::declare_dead_if_lockless(&client, &suspect).await.unwrap(),
        ];
        assert_eq!(declared, [!is_locked; 2]);
        assert_eq!(ledger.dead().await, dead);
    }
}

/// S16, with processes: two recover at once, each slow between listing and freeing.
#[tokio::test(flavor = "multi_thread")]
async fn two_recoverers_at_once_free_every_row_once() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = format!("[liveness]\nsettle = \"1s\"\n{SLOW}");
    let victim = Daemon::builder(&db, &config).start();
    let batch = ledger.submit("sleep", 300).await;
    ledger.somebody_holds(4, SOON).await;
    let judge =
        || Daemon::builder(&db, &config).env("MUSTERD_FAILPOINTS", "recovery.listed=sleep(700ms)").start();
    let (one, other) = (judge(), judge());
    one.wait_ready().await;
    other.wait_ready().await;
    victim.signal(Signal::KILL);
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(300));
    assert_eq!(ledger.dead().await, 1);
    for judge in [&one, &other] {
        assert_eq!(metric(judge, "musterd_fenced_total ").await, 0.0, "a recoverer took from the living");
    }
    assert_eq!((ledger.owned().await, ledger.deadlocks().await), (0, 0));
}

/// Tasks are freed too.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_an_unknown_owner_go_back_to_their_queue() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let task: i64 =
        ledger.client.query_one("SELECT musterd.enqueue('nobody_runs_this')", &[]).await.unwrap().get(0);
    let run = "SELECT guard.claim($1, p_worker => 'gone')";
    ledger.client.execute(run, &[&task]).await.unwrap();
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_for_log(SOON, |line| line.contains("freed what the dead held")).await;
    let sql = "SELECT count(*) FROM musterd.tasks WHERE state = 'queued' AND worker IS NULL AND crashes = 1";
    assert_eq!(ledger.number(sql).await, 1);
}

/// S16 for tasks: one that is locked waits for the next look, and keeps nobody else waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_somebody_has_locked_does_not_keep_others_from_being_freed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config: musterd::store::Config = toml::from_str(&format!("url = {:?}", db.url())).unwrap();
    let client = Store::open(&config).unwrap().general.get().await.unwrap();
    let dead = "INSERT INTO musterd.workers (id, host, pid, version, state, ended_at) VALUES ('dead', 'h', 1, 'v', 'dead', now());
         INSERT INTO musterd.workers (id, host, pid, version) VALUES ('alive', 'h', 1, 'v');
         SELECT guard.claim(musterd.enqueue('c'), p_worker => w, p_at => now() - interval '1 s')
           FROM unnest('{dead,dead,alive}'::text[]) w;
         UPDATE musterd.tasks SET run_at = now() - interval '1 hour';
         SELECT guard.claim(musterd.enqueue('late'), p_worker => 'dead', p_at => now() + interval '1 s')";
    ledger.client.batch_execute(dead).await.unwrap();
    let mut schedule = Schedule::new(&db, &["user"]).await;
    schedule.run("user", "BEGIN").await;
    schedule.run("user", "SELECT 1 FROM musterd.tasks WHERE id = 1 FOR UPDATE").await;
    assert_eq!(recovery::free_tasks(&client, 3, &Ran::default()).await.unwrap().freed, 2);
    schedule.run("user", "COMMIT").await;
    assert_eq!(recovery::free_tasks(&client, 3, &Ran::default()).await.unwrap().freed, 1);
    assert_eq!(recovery::free_tasks(&client, 3, &Ran::default()).await.unwrap().freed, 0);
    let left = "SELECT count(*) FROM musterd.tasks WHERE worker = 'alive' AND state = 'running'";
    assert_eq!(ledger.number(left).await, 1);
    let charged =
        "SELECT count(*) FROM musterd.tasks WHERE state = 'queued' AND crashes = (command <> 'late')::int";
    assert_eq!(ledger.number(charged).await, 3, "what was claimed after the end had not started");
    let due =
        "SELECT count(*) FROM musterd.tasks WHERE state = 'queued' AND run_at > now() - interval '30 min'";
    assert_eq!(ledger.number(due).await, 3, "they wait for a worker only now");
}

/// All sessions cut at once, and a server that restarts them all: everybody lives on.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_taken_for_dead_when_all_sessions_are_cut() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = format!("[liveness]\nsettle = \"2s\"\n[database]\nmax_connections = 8\n{SLOW}");
    let daemons: Vec<Daemon> = (0..4).map(|_| Daemon::builder(&db, &config).start()).collect();
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    let batch = ledger.submit("sleep", 800).await;
    ledger.has_results(batch, 20, SOON).await;
    let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    for round in 1..=2 {
        ledger.client.execute(cut, &[]).await.unwrap();
        ledger.has_results(batch, 200 * round, SOON).await;
    }
    // One session at a time, too: the others are well, and look.
    let one = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'musterd listen' LIMIT 1";
    ledger.client.execute(one, &[]).await.unwrap();
    assert_eq!(ledger.end_of(batch, SOON * 2).await, End::succeeded(800));
    assert_eq!(ledger.dead().await, 0);
    for daemon in &daemons {
        assert_eq!(metric(daemon, "musterd_workers_declared_dead_total ").await, 0.0);
    }
    assert_eq!(ledger.deadlocks().await, 0);
    let config = TestConfig::new(&db, "");
    let output = config.musterd(&["worker", "list"]).await;
    assert_eq!(String::from_utf8(output.stdout).unwrap().matches("alive").count(), 4);
}

/// A living worker that has lost its lock, and cannot have it back, keeps itself alive by beating.
#[tokio::test(flavor = "multi_thread")]
async fn a_living_worker_without_its_lock_is_not_taken_for_dead() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let url = proxy.rewrite(db.url());
    let settings = "[liveness]\nsettle = \"1s\"\n[handlers.sleep]\nduration = \"100ms\"\n";
    let judge = Daemon::builder(&db, settings).start();
    judge.wait_ready().await;
    let daemon = Daemon::builder(&db, &format!("{settings}[database]\nurl = {url:?}")).start();
    daemon.wait_ready().await;
    let worker = ledger.worker_of(&daemon).await;
    let key = format!("SELECT count(*) FROM musterd.workers WHERE id = '{worker}' AND lock_key IS NOT NULL");
    eventually(SOON, "it has its lock", async || (ledger.number(&key).await == 1).then_some(())).await;
    proxy.set(Fault::RefuseNew);
    let cut = "SELECT count(pg_terminate_backend(l.pid)) FROM pg_locks l JOIN musterd.workers w
                  ON l.locktype = 'advisory' AND (l.classid::bigint << 32) | l.objid::bigint = w.lock_key
                WHERE w.id = $1";
    assert_eq!(ledger.client.query_one(cut, &[&worker]).await.unwrap().get::<_, i64>(0), 1);
    // Three seconds of silence would be its death; it has twice the chance.
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(ledger.dead().await, 0);
    proxy.set(Fault::None);
    daemon.wait_ready().await;
    assert_eq!(ledger.dead().await, 0);
}
