//! Redis as it is run when one server is not enough: a Cluster, and a server under Sentinel.

use std::process::Command;
use std::time::Duration;

use super::services::{self, Redis};
use super::wait::eventually;

const SOON: Duration = Duration::from_secs(60);

/// What `redis-cli` says on a port.
pub(crate) fn cli(port: u16, args: &[&str]) -> String {
    let output = Command::new("redis-cli").args(["-p", &port.to_string()]).args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Three masters, with a replica each or without.
pub(crate) struct Cluster {
    nodes: Vec<Redis>,
}

impl Cluster {
    pub(crate) async fn start(replicas: usize) -> Self {
        let options = [
            "--cluster-enabled",
            "yes",
            "--cluster-config-file",
            "nodes.conf",
            "--cluster-node-timeout",
            "2000",
        ];
        let nodes: Vec<Redis> =
            (0..3 * (1 + replicas)).map(|_| Redis::start_with(cluster_port(), &options)).collect();
        let made = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(nodes.iter().map(|node| node.address().to_string()))
            .args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stdout));
        let cluster = Self { nodes };
        cluster.wait_whole(replicas).await;
        cluster
    }

    async fn wait_whole(&self, replicas: usize) {
        let known = format!("cluster_known_nodes:{}\r", self.nodes.len());
        for node in &self.nodes {
            eventually(SOON, "the node knows the whole cluster", async || {
                let info = cli(node.address().port(), &["cluster", "info"]);
                (info.contains("cluster_state:ok") && info.contains(&known)).then_some(())
            })
            .await;
        }
        // A replica that has not got its master's data yet does not stand for election.
        let first = self.nodes[0].address().port();
        eventually(SOON, "every replica follows its master", async || {
            let nodes = cli(first, &["cluster", "nodes"]);
            (nodes.matches("slave").count() == 3 * replicas && self.all_synced(replicas)).then_some(())
        })
        .await;
    }

    fn all_synced(&self, replicas: usize) -> bool {
        let synced = |node: &&Redis| {
            cli(node.address().port(), &["info", "replication"]).contains("master_link_status:up")
        };
        self.nodes.iter().filter(synced).count() == 3 * replicas
    }

    pub(crate) fn url(&self) -> String {
        let all: Vec<String> = self.nodes.iter().map(|node| node.address().to_string()).collect();
        format!("redis-cluster://{}?node={}", all[0], all[1..].join("&node="))
    }

    /// Kills the master that has a key; the port of a node that lives.
    pub(crate) fn kill_master_of(&self, key: &str) -> u16 {
        let first = self.nodes[0].address().port();
        let slot: u16 = cli(first, &["cluster", "keyslot", key]).trim().parse().unwrap();
        let nodes = cli(first, &["cluster", "nodes"]);
        let owner = nodes.lines().find(|line| line.contains("master") && owns(line, slot)).unwrap();
        let address = owner.split_whitespace().nth(1).unwrap().split('@').next().unwrap();
        let victim = self.nodes.iter().find(|node| node.address().to_string() == address).unwrap();
        victim.stop();
        let alive = self.nodes.iter().find(|node| node.pid() != victim.pid()).unwrap();
        alive.address().port()
    }
}

/// Whether a line of `cluster nodes` has the slot among its ranges.
fn owns(line: &str, slot: u16) -> bool {
    line.split_whitespace().skip(8).any(|range| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        from.parse().is_ok_and(|from: u16| from <= slot) && to.parse().is_ok_and(|to: u16| slot <= to)
    })
}

/// A cluster's bus has its own port, 10,000 above.
fn cluster_port() -> u16 {
    loop {
        let port = services::free_port();
        if std::net::TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            return port;
        }
    }
}

/// A master and its replica, watched by a Sentinel that decides alone.
pub(crate) struct Watched {
    pub(crate) master: Redis,
    pub(crate) replica: Redis,
    sentinel: Redis,
}

impl Watched {
    pub(crate) async fn start() -> Self {
        let master = services::own_redis();
        let port = master.address().port().to_string();
        let replica = Redis::start_with(services::free_port(), &["--replicaof", "127.0.0.1", &port]);
        eventually(SOON, "the replica follows", async || {
            cli(replica.address().port(), &["info", "replication"])
                .contains("master_link_status:up")
                .then_some(())
        })
        .await;
        let sentinel = Redis::start_sentinel(&format!(
            "sentinel monitor main 127.0.0.1 {port} 1\nsentinel down-after-milliseconds main 2000\n\
             sentinel failover-timeout main 10000\n"
        ));
        let watched = Self { master, replica, sentinel };
        eventually(SOON, "Sentinel knows the replica", async || {
            let known = cli(watched.sentinel.address().port(), &["sentinel", "replicas", "main"]);
            known.contains(&watched.replica.address().port().to_string()).then_some(())
        })
        .await;
        watched
    }

    pub(crate) fn url(&self) -> String {
        format!("redis-sentinel://{}?sentinelServiceName=main", self.sentinel.address())
    }
}
