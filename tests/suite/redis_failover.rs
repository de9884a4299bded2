//! A master of Redis dies while a batch and tasks run: nobody is taken for dead, nothing runs again, and the roll is back
//! with the next master.

use std::time::Duration;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::redis::Maker;
use crate::suite::support::redis_kinds::{Cluster, Watched, cli};
use crate::suite::support::wait::eventually;
use crate::suite::support::work::{End, Ledger, metric};

const SOON: Duration = Duration::from_secs(60);
const ROWS: i32 = 1_500;

struct Site {
    ledger: Ledger,
    daemons: [Daemon; 2],
    batch: i64,
    _db: TestDb,
}

impl Site {
    /// Two replicas at work, with a roll in this Redis.
    async fn start(url: &str) -> Self {
        let db = TestDb::new().await;
        let ledger = Ledger::open(&db).await;
        let config = format!(
            "[redis]\nurl = {url:?}\n[liveness]\nbackend = \"redis\"\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"20s\"\n\
             recovery_interval = \"300ms\"\nrows_ttl = \"2m\"\nsettle = \"1s\"\n[handlers.sleep]\nduration = \"30ms\"\n\
             [queues.default]\nfibers = 4"
        );
        let daemons = [0, 1].map(|_| Daemon::builder(&db, &config).log("info").start());
        for daemon in &daemons {
            daemon.wait_ready().await;
        }
        let batch = ledger.submit("sleep", ROWS).await;
        ledger.number("SELECT count(musterd.enqueue('sleep')) FROM generate_series(1, 100)").await;
        let site = Self { ledger, daemons, batch, _db: db };
        site.redis_is_up().await;
        site.ledger.has_results(batch, 50, SOON).await;
        site
    }

    async fn redis_is_up(&self) {
        eventually(SOON, "Redis is there for everybody", async || {
            for daemon in &self.daemons {
                if metric(daemon, "musterd_redis_up ").await != 1.0 {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// Both are in the registry of the server at this port, after it was taken from it.
    async fn are_listed(&self, port: u16) {
        for daemon in &self.daemons {
            let worker = self.ledger.worker_of(daemon).await;
            // Struck off by hand: only one who reaches the new master comes back.
            eventually(SOON * 2, "there is a master to strike it off", async || {
                cli(port, &["-c", "srem", "MUSTER_WORKER_REGISTRY", &worker]).trim().parse::<u8>().ok()
            })
            .await;
            eventually(SOON * 2, "the worker writes itself into the registry again", async || {
                cli(port, &["-c", "smembers", "MUSTER_WORKER_REGISTRY"]).contains(&worker).then_some(())
            })
            .await;
        }
    }

    async fn nothing_happened(&self) {
        assert_eq!(self.ledger.end_of(self.batch, SOON * 2).await, End::succeeded(ROWS));
        eventually(SOON, "every task ends", async || {
            let open = "SELECT count(*) FROM musterd.tasks WHERE state <> 'succeeded'";
            (self.ledger.number(open).await == 0).then_some(())
        })
        .await;
        assert_eq!(self.ledger.claimed_again().await, 0, "rows were run again");
        let again = "SELECT count(*) FROM musterd.tasks WHERE attempt <> 1 OR crashes <> 0";
        assert_eq!(self.ledger.number(again).await, 0, "tasks were run again");
        assert_eq!(self.ledger.dead().await, 0, "somebody was taken for dead");
        for daemon in &self.daemons {
            assert_eq!(metric(daemon, "musterd_fenced_total ").await, 0.0);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_of_a_cluster_may_die_while_work_runs() {
    a_master_dies(Maker::Redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_of_a_cluster_of_valkey_may_die_while_work_runs() {
    if has("valkey") {
        a_master_dies(Maker::Valkey).await;
    }
}

async fn a_master_dies(maker: Maker) {
    let cluster = Cluster::start(maker, 1).await;
    let site = Site::start(&cluster.url()).await;
    let alive = cluster.kill_master_of("MUSTER_WORKER_REGISTRY");
    site.nothing_happened().await;
    site.are_listed(alive).await;
    assert_eq!(site.ledger.dead().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_is_asked_for_the_next_master() {
    let watched = Watched::start().await;
    let site = Site::start(&watched.url()).await;
    let alive = watched.replica.address().port();
    watched.master.stop();
    site.nothing_happened().await;
    eventually(SOON, "the replica is the master", async || {
        cli(alive, &["info", "replication"]).contains("role:master").then_some(())
    })
    .await;
    site.are_listed(alive).await;
    assert_eq!(site.ledger.dead().await, 0);
}
