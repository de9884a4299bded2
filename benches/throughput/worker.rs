//! A running worker: `musterd run` with the shipped settings, its metrics and its memory.

use super::{binary::Binary, scrape};
use crate::ground::{Database, processor_times};
use anyhow::{Context, Result, bail};
use musterd::tether::Tether;
use rustix::process::Signal;
use std::{process::Stdio, time::Duration};

/// A running `musterd run`; killed when dropped.
pub(crate) struct Worker {
    tether: Tether,
    port: u16,
    dir: tempfile::TempDir,
}

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(60);

impl Worker {
    /// With the shipped configuration, except where the database is, that there is no Redis, and `settings`.
    pub(crate) async fn start(musterd: &Binary, database: &Database, settings: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = musterd.worker(&database.url, dir.path(), settings);
        command.env("MUSTERD__HTTP__LISTEN", format!("127.0.0.1:{port}"));
        let log = std::fs::File::create(dir.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let worker = Self { tether: Tether::spawn(command, Signal::KILL)?, port, dir };
        tokio::time::timeout(START_LIMIT, worker.ready()).await.context("musterd did not become ready")??;
        Ok(worker)
    }

    async fn ready(&self) -> Result<()> {
        while scrape::get(self.port, "/readyz").await.is_err() {
            if let Some(status) = self.tether.status() {
                let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                bail!("musterd ended with {status}: {log}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    pub(crate) async fn metrics(&self) -> Result<String> {
        scrape::get(self.port, "/metrics").await
    }

    /// The most memory it has had, in bytes.
    pub(crate) fn peak_memory(&self) -> Result<f64> {
        scrape::peak_memory(self.tether.pid())
    }

    /// Processor time it has used, in seconds.
    pub(crate) fn processor_time(&self) -> Result<f64> {
        let [user, system, ..] = processor_times(self.tether.pid())?;
        Ok(user + system)
    }

    /// Lets it drain. The server has all its counts only after that.
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
        // After a clean stop there is no process to signal.
        let _ = self.tether.signal(Signal::KILL);
    }
}
