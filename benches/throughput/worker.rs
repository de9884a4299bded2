//! The real thing: the release binary, `musterd run` as it is shipped, on a batch of its own.

use super::{
    load::{self, Measured, Start},
    scrape,
};
use crate::ground::{Database, Ground, connect, processor_times};
use anyhow::{Context, Result, bail};
use musterd::embedded::Tether;
use rustix::process::Signal;
use std::{
    process::{Command, Stdio},
    time::Duration,
};

/// A running `musterd run`; killed when dropped.
pub(crate) struct Worker {
    tether: Tether,
    port: u16,
    _dir: tempfile::TempDir,
}

/// One run of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) measured: Measured,
    pub(crate) peak_memory: f64,
    /// Processor time of the worker, in microseconds.
    pub(crate) time_per_row: f64,
    /// p50, p95, p99 of the time from an outcome to its commit, in seconds.
    pub(crate) update_latency: [f64; 3],
    pub(crate) flush_size: f64,
    pub(crate) flushes_per_second: f64,
    pub(crate) rollbacks: f64,
}

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Longer than this for the rows of one run and something is wrong.
const RUN_LIMIT: Duration = Duration::from_secs(20 * 60);

impl Worker {
    /// With the shipped configuration, except where the database is, that there is no Redis, and `settings`.
    pub(crate) async fn start(database: &Database, settings: &[String]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_musterd"));
        command
            .arg("run")
            .current_dir(dir.path())
            .env_clear()
            .envs(std::env::var_os("PATH").map(|p| ("PATH", p)));
        command.env("MUSTERD__DATABASE__URL", &database.url);
        command.env("MUSTERD__LIVENESS__BACKEND", "postgres");
        command.env("MUSTERD__HTTP__LISTEN", format!("127.0.0.1:{port}"));
        for setting in settings {
            command.args(["--set", setting]);
        }
        let log = std::fs::File::create(dir.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let worker = Self { tether: Tether::spawn(command, Signal::KILL)?, port, _dir: dir };
        let ready = async {
            while scrape::get(port, "/readyz").await.is_err() {
                if let Some(status) = worker.tether.status() {
                    let log = std::fs::read_to_string(worker._dir.path().join("log")).unwrap_or_default();
                    bail!("musterd ended with {status}: {log}");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        };
        tokio::time::timeout(START_LIMIT, ready).await.context("musterd did not become ready")??;
        Ok(worker)
    }

    async fn metrics(&self) -> Result<String> {
        scrape::get(self.port, "/metrics").await
    }

    /// Lets it drain; what it had counted with the server is counted then.
    pub(crate) async fn stop(self) -> Result<()> {
        self.tether.signal(Signal::TERM)?;
        let wait = self.tether.waiter();
        let status = tokio::task::spawn_blocking(move || wait(STOP_LIMIT)).await?;
        anyhow::ensure!(
            status.is_some_and(|status| status.success()),
            "musterd did not stop cleanly: {status:?}"
        );
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a clean stop there is nobody to signal.
        let _ = self.tether.signal(Signal::KILL);
    }
}

pub(crate) async fn measure(ground: &Ground, rows: i32, settings: &[String]) -> Result<Run> {
    let database = ground.database().await?;
    let batch = load::load_batch(&database, rows).await?;
    let start = Start::now(ground, &database).await?;
    let worker = Worker::start(&database, settings).await?;
    // The worker is idle and connected: what follows is the walk of the rows and nothing else.
    let released = release(&database, batch).await?;
    tokio::time::timeout(RUN_LIMIT, async {
        while scrape::value(&worker.metrics().await?, "musterd_batches_completed_total") != Some(1.0) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    })
    .await
    .context("musterd did not finish the batch in time")??;
    let wal = ground.wal().await?;
    let took = took(&database, batch, released).await?;
    let metrics = worker.metrics().await?;
    let peak_memory = scrape::peak_memory(worker.tether.pid())?;
    let [user, system, ..] = processor_times(worker.tether.pid())?;
    worker.stop().await?;
    let measured = start.end(ground, &database, rows, took, wal).await?;
    load::check_results(&database, rows).await?;
    ground.drop_database(database).await?;
    let latency =
        |q| scrape::quantile(&metrics, "musterd_batcher_update_latency_seconds", q).unwrap_or(f64::NAN);
    let number = |name| scrape::value(&metrics, name).unwrap_or(f64::NAN);
    let flushes = number("musterd_batcher_flush_size_count");
    Ok(Run {
        measured,
        peak_memory,
        time_per_row: (user + system) * 1e6 / f64::from(rows),
        update_latency: [0.5, 0.95, 0.99].map(latency),
        flush_size: number("musterd_batcher_flush_size_sum") / flushes,
        flushes_per_second: flushes / took.as_secs_f64(),
        rollbacks: number("musterd_batcher_rollbacks_total"),
    })
}

/// Opens the batch; when that was, by the server's clock.
async fn release(database: &Database, batch: i64) -> Result<f64> {
    let client = connect(&database.url).await?;
    let sql = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 FROM musterd.release($1)";
    let row = client.query_one(sql, &[&batch]).await?;
    client.close().await;
    Ok(row.get(0))
}

/// From the release to the end, both by the server's clock.
async fn took(database: &Database, batch: i64, released: f64) -> Result<Duration> {
    let client = connect(&database.url).await?;
    let sql = "SELECT EXTRACT(EPOCH FROM finished_at)::float8 FROM musterd.tasks WHERE id = $1 AND state = 'succeeded'";
    let row = client.query_one(sql, &[&batch]).await?;
    client.close().await;
    Ok(Duration::from_secs_f64(row.get::<_, f64>(0) - released))
}
