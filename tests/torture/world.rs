//! The ground of a run: four replicas that differ, and between them and their servers a network that breaks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use super::faults::{Fault, Faults, Reruns, now};
use super::ledger::Ledger;
use super::postgres::{Cluster, Session, open};
use super::replica::{Kind, Replica};
use super::sink::{SECRET, Sink};
use crate::suite::support::audit;
use crate::suite::support::mutants;
use crate::suite::support::pgbouncer::PgBouncer;
use crate::suite::support::proxy::FaultProxy;
use crate::suite::support::redis::Redis;
use crate::suite::support::services::{self, S3};

/// Silence after which a worker counts as dead: everything here is scaled to it.
pub(crate) const TTL: Duration = Duration::from_secs(5);
pub(crate) const REPLICAS: usize = 4;
/// The one whose clock is an hour ahead, the one behind PgBouncer, the one of another build.
const CLOCK: usize = 1;
const POOLED: usize = 2;
const OTHER: usize = 3;

/// Functions and procedures of the `sql` handlers: what they write is there once, or not at all.
const APP: &str = "
CREATE SCHEMA app;
CREATE TABLE app.row_effects (batch bigint NOT NULL, line int NOT NULL);
CREATE TABLE app.task_effects (task bigint NOT NULL);
CREATE FUNCTION app.score(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (SELECT FROM jsonb_array_elements(rows) r WHERE r -> 'input' ->> 'do' = 'slow') THEN PERFORM pg_sleep(0.2); END IF;
    IF EXISTS (SELECT FROM jsonb_array_elements(rows) r WHERE r -> 'input' ->> 'do' = 'raise') THEN RAISE EXCEPTION 'asked to'; END IF;
    INSERT INTO app.row_effects SELECT score.batch, (r ->> 'line')::int FROM jsonb_array_elements(rows) r
     WHERE COALESCE(r -> 'input' ->> 'do', 'ok') NOT IN ('fail') AND (r -> 'input' ->> 'do' = 'retry' AND (r ->> 'attempt')::int = 1) IS NOT TRUE;
    RETURN QUERY SELECT (r ->> 'line')::int,
        CASE WHEN r -> 'input' ->> 'do' = 'fail' THEN 'failed'
             WHEN r -> 'input' ->> 'do' = 'retry' AND (r ->> 'attempt')::int = 1 THEN 'retry' ELSE 'succeeded' END,
        jsonb_build_object('n', r -> 'input' -> 'n'), 'asked to fail'::text FROM jsonb_array_elements(rows) r;
END $$;
CREATE PROCEDURE app.effect(id bigint, payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.task_effects VALUES (id);
    IF payload ->> 'do' = 'fail' THEN RAISE EXCEPTION 'asked to fail'; END IF;
    PERFORM musterd.set_result(jsonb_build_object('n', payload -> 'n'));
END $$;";

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) cluster: tokio::sync::Mutex<Cluster>,
    /// Where the primary is.
    primary: Mutex<String>,
    pub(crate) redis: Mutex<Redis>,
    pub(crate) pooler: Mutex<PgBouncer>,
    /// Between each replica and PostgreSQL; then of those who submit, of Redis, of S3, of the service.
    pub(crate) databases: Vec<FaultProxy>,
    pub(crate) front: FaultProxy,
    pub(crate) redis_proxy: FaultProxy,
    pub(crate) s3_proxy: FaultProxy,
    pub(crate) sink_proxy: FaultProxy,
    pub(crate) bucket: String,
    pub(crate) sink: Sink,
    pub(crate) ledger: Ledger,
    pub(crate) replicas: Vec<Arc<Replica>>,
    pub(crate) faults: Faults,
    pub(crate) has_disks: bool,
    /// Lines for the report: what this machine could not do.
    pub(crate) skipped: Vec<String>,
    tasks: JoinSet<()>,
}

impl World {
    pub(crate) async fn start(other: Option<PathBuf>) -> Result<Self> {
        let mut skipped = Vec::new();
        let has_disks = std::env::var_os(super::PRIVATE_MOUNTS).is_some();
        if !has_disks {
            skipped.push("disk full: needs root and a mount namespace of its own".to_owned());
        }
        let cluster = Cluster::start(has_disks).await?;
        open(&cluster.url("postgres")).await?.batch_execute("CREATE DATABASE torture").await?;
        prepare(&cluster.url("torture")).await?;
        let mut databases = Vec::new();
        for _ in 0..REPLICAS {
            databases.push(FaultProxy::start(cluster.address()).await);
        }
        let front = FaultProxy::start(cluster.address()).await;
        let redis = Redis::start(crate::suite::support::redis::Maker::Redis, services::free_port(), &[]);
        let redis_proxy = FaultProxy::start(redis.address()).await;
        let s3 = tokio::task::spawn_blocking(|| (services::s3().endpoint(), services::s3().new_bucket()));
        let (endpoint, bucket) = s3.await?;
        let s3_proxy = FaultProxy::start(endpoint.trim_start_matches("http://").parse()?).await;
        let mut tasks = JoinSet::new();
        let ledger = Ledger::start().await?;
        let (sink, sink_port) = Sink::start(ledger.clone(), &mut tasks).await?;
        let sink_proxy = FaultProxy::start(([127, 0, 0, 1], sink_port).into()).await;
        let pipe = ledger.listen(&mut tasks).await?;
        let pooler = PgBouncer::before(&server_url(databases[POOLED].address()), "server_round_robin = 1");
        let mut world = Self {
            primary: Mutex::new(cluster.url("torture")),
            cluster: tokio::sync::Mutex::new(cluster),
            redis: Mutex::new(redis),
            pooler: Mutex::new(pooler),
            databases,
            front,
            redis_proxy,
            s3_proxy,
            sink_proxy,
            bucket,
            sink,
            ledger,
            replicas: Vec::new(),
            faults: Faults::default(),
            has_disks,
            skipped,
            tasks,
        };
        for number in 0..REPLICAS {
            let kind = world.kind(number, &other, pipe)?;
            world.replicas.push(Arc::new(Replica::new(kind)?));
        }
        for replica in world.replicas.clone() {
            let faults = world.faults.clone();
            world.tasks.spawn(async move { replica.keep(&faults).await });
        }
        world.tasks.spawn(watch_the_machine(world.faults.clone()));
        for replica in &world.replicas {
            replica.wait_ready(Duration::from_secs(60)).await?;
        }
        Ok(world)
    }

    fn kind(&mut self, number: usize, other: &Option<PathBuf>, pipe: u16) -> Result<Kind> {
        let (mut note, mut binary, mut environment) =
            ("", PathBuf::from(env!("CARGO_BIN_EXE_musterd")), vec![]);
        match (number, faketime(), other) {
            (CLOCK, Some(library), _) => {
                note = "an hour ahead";
                let pairs =
                    [("LD_PRELOAD", &*library), ("FAKETIME", "+1h"), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")];
                environment.extend(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
            }
            (CLOCK, None, _) => self.skipped.push("a wrong clock: libfaketime is not installed".into()),
            (POOLED, ..) => note = "behind PgBouncer",
            (OTHER, _, Some(path)) => (note, binary) = ("another build", path.clone()),
            (OTHER, _, None) => self.skipped.push("another build: none was given (--other FILE)".into()),
            _ => {}
        }
        let http_port = services::free_port();
        let config = self.config(number, http_port, pipe)?;
        Ok(Kind { number, note, binary, environment, http_port, config })
    }

    fn config(&self, number: usize, http_port: u16, pipe: u16) -> Result<String> {
        let straight = format!("{}/torture", server_url(self.databases[number].address()));
        let database = match number {
            POOLED => {
                let pooler = SocketAddr::from(([127, 0, 0, 1], self.pooler.lock().unwrap().port()));
                let pooled = format!("{}/torture", server_url(pooler));
                format!("url = {pooled:?}\ndirect_url = {straight:?}")
            }
            _ => format!("url = {straight:?}"),
        };
        let program = std::env::current_exe()?;
        let program = program.to_str().context("a program with a strange name")?;
        Ok(CONFIG
            .replace("{database}", &database)
            .replace("{redis}", &self.redis_proxy.address().to_string())
            .replace("{s3}", &self.s3_proxy.address().to_string())
            .replace("{bucket}", &self.bucket)
            .replace("{access}", S3::ACCESS_KEY)
            .replace("{s3_secret}", S3::SECRET_KEY)
            .replace("{port}", &http_port.to_string())
            .replace("{sink}", &self.sink_proxy.address().to_string())
            .replace("{secret}", SECRET)
            .replace("{number}", &number.to_string())
            .replace("{program}", program)
            .replace("{pipe}", &pipe.to_string()))
    }

    /// A session of the operator: to the primary, past every proxy.
    pub(crate) async fn admin(&self) -> Result<Session> {
        let url = self.primary.lock().unwrap().clone();
        open(&url).await
    }

    /// Of those who submit: through their proxy.
    pub(crate) fn front_url(&self) -> String {
        format!("{}/torture?options=-c%20statement_timeout%3D8000", server_url(self.front.address()))
    }

    pub(crate) fn all_databases(&self) -> impl Iterator<Item = &FaultProxy> {
        self.databases.iter().chain([&self.front])
    }

    /// The primary is another server now.
    pub(crate) fn follow(&self, cluster: &Cluster) {
        *self.primary.lock().unwrap() = cluster.url("torture");
        for proxy in self.all_databases() {
            proxy.point_at(cluster.address());
            proxy.reset_all();
        }
    }

    pub(crate) fn start_pooler_again(&self) {
        let mut pooler = self.pooler.lock().unwrap();
        pooler.restart();
    }
}

/// A machine that gives us no time for so long gives the replicas none either: a living worker may be taken for dead.
async fn watch_the_machine(faults: Faults) {
    loop {
        let began = now();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let ended = now();
        if ended - began > TTL.as_secs_f64() / 2.0 {
            faults.add(Fault {
                kind: "the machine stood still",
                reruns: Reruns::All,
                began,
                ended,
                pid: None,
            });
        }
    }
}

fn server_url(address: SocketAddr) -> String {
    format!("postgres://postgres:secret@{address}")
}

/// The schema of this source tree, the guard of all tests, the audit, and the functions of the handlers.
async fn prepare(url: &str) -> Result<()> {
    let mut session = open(url).await?;
    musterd::store::migrate::migrate(&mut session.client).await?;
    audit::guard(&session).await;
    audit::install(&session).await;
    mutants::apply(&session).await;
    session.batch_execute(APP).await?;
    Ok(())
}

fn faketime() -> Option<String> {
    let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
    let files = places.map(|dir| format!("{dir}/faketime/libfaketime.so.1"));
    files.into_iter().find(|file| std::path::Path::new(file).exists())
}

const CONFIG: &str = r#"
[database]
{database}
max_connections = 10
sql_connections = 4
statement_timeout = "10s"
lock_timeout = "2s"
idle_in_transaction_session_timeout = "5s"
[redis]
url = "redis://{redis}"
key_prefix = "TORTURE"
[liveness]
backend = "redis"
heartbeat_interval = "1s"
heartbeat_ttl = "5s"
recovery_interval = "2s"
reconcile_interval = "1s"
settle = "2s"
rows_ttl = "20s"
[claim]
poll_interval = "300ms"
[batcher]
max_interval = "1s"
[completion]
sweep_min = "2s"
sweep_max = "3s"
[shutdown]
grace = "3s"
[retry]
max_attempts = 30
base = "100ms"
max = "1s"
[outputs]
store = "s3"
[outputs.s3]
endpoint = "http://{s3}"
bucket = "{bucket}"
access_key = "{access}"
secret_key = "{s3_secret}"
timeout = "5s"
[http]
listen = "127.0.0.1:{port}"
[queues.default]
fibers = 8
[queues.kin]
fibers = 3
mode = "structured"
[queues.bad]
fibers = 1
[handlers.work]
kind = "http"
url = "http://{sink}/work"
timeout = "2s"
secret = "{secret}"
headers = { X-Replica = "{number}" }
[handlers.family]
kind = "http"
queue = "kin"
url = "http://{sink}/work"
timeout = "2s"
secret = "{secret}"
headers = { X-Replica = "{number}" }
[handlers.notify]
kind = "http"
url = "http://{sink}/work"
timeout = "2s"
secret = "{secret}"
headers = { X-Replica = "{number}" }
[handlers.pipe]
kind = "exec"
argv = ["{program}", "__exec", "{number}", "{pipe}"]
processes = 2
timeout = "2s"
[handlers.score]
kind = "sql"
function = "app.score"
timeout = "10s"
[handlers.effect]
kind = "sql"
procedure = "app.effect"
timeout = "10s"
[handlers.panics]
kind = "builtin"
builtin = "fail"
failure = "panic"
rate = 0.1
queue = "bad"
[handlers.kills]
kind = "builtin"
builtin = "fail"
failure = "abort"
rate = 0.1
queue = "bad"
"#;
