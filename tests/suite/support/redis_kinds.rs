//! Redis as it is run when one server is not enough: a Cluster, and a server under Sentinel.

use std::process::Command;
use std::time::Duration;

use super::redis::{Maker, Redis};
use super::services;
use super::wait::{SOON, eventually};

/// Between two looks at a cluster: each starts a program per node.
const LOOK: Duration = Duration::from_millis(200);

/// What `redis-cli` says on a port.
pub(crate) fn cli(port: u16, args: &[&str]) -> String {
    let output = Command::new("redis-cli").args(["-p", &port.to_string()]).args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How many slots a cluster has.
const SLOTS: u16 = 16_384;

/// Three masters, with a replica each or without.
pub(crate) struct Cluster {
    nodes: Vec<Redis>,
}

impl Cluster {
    pub(crate) async fn start(maker: Maker, replicas: usize) -> Self {
        let options = [
            "--cluster-enabled",
            "yes",
            "--cluster-config-file",
            "nodes.conf",
            "--cluster-node-timeout",
            "2000",
            // A replica gets its master's data at once, without waiting for others that might want it too.
            "--repl-diskless-sync-delay",
            "0",
        ];
        let nodes: Vec<Redis> =
            (0..3 * (1 + replicas)).map(|_| Redis::start(maker, cluster_port(), &options)).collect();
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
        eventually(SOON, "every replica follows its master", async || {
            let nodes = cli(self.port(0), &["cluster", "nodes"]);
            let whole = nodes.matches("slave").count() == 3 * replicas && self.all_synced(replicas);
            if !whole {
                tokio::time::sleep(LOOK).await;
            }
            whole.then_some(())
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
        let slot: u16 = cli(self.port(0), &["cluster", "keyslot", key]).trim().parse().unwrap();
        let victim = self.master_of(slot, 0);
        self.nodes[victim].stop();
        self.port(usize::from(victim == 0))
    }

    /// Kills the master of a random slot, waits until its replica has taken over everywhere, and starts the dead one again,
    /// which comes back as a replica. The port of the one that died.
    pub(crate) async fn replace_a_master(&mut self) -> u16 {
        let slot = rand::random_range(0..SLOTS);
        let victim = self.master_of(slot, 0);
        self.nodes[victim].stop();
        for witness in (0..self.nodes.len()).filter(|node| *node != victim) {
            eventually(SOON, "a replica takes over", async || {
                tokio::time::sleep(LOOK).await;
                let whole = cli(self.port(witness), &["cluster", "info"]).contains("cluster_state:ok");
                (whole && self.master_of(slot, witness) != victim).then_some(())
            })
            .await;
        }
        self.nodes[victim].restart();
        self.wait_whole(1).await;
        self.port(victim)
    }

    fn port(&self, node: usize) -> u16 {
        self.nodes[node].address().port()
    }

    /// Which node has a slot, as `witness` sees it.
    fn master_of(&self, slot: u16, witness: usize) -> usize {
        let nodes = cli(self.port(witness), &["cluster", "nodes"]);
        let owner = nodes.lines().find(|line| line.contains("master") && owns(line, slot));
        let owner = owner.unwrap_or_else(|| panic!("nobody has slot {slot}:\n{nodes}"));
        let address = owner.split_whitespace().nth(1).unwrap().split('@').next().unwrap();
        self.nodes.iter().position(|node| node.address().to_string() == address).unwrap()
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
        let replica = Redis::start(Maker::Redis, services::free_port(), &["--replicaof", "127.0.0.1", &port]);
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
