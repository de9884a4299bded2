//! The program under test, run as its users run it: `musterd migrate`, `musterd submit FILE`, `musterd run`.

use crate::ground::Database;
use anyhow::{Context, Result, ensure};
use musterd::tether::Tether;
use rustix::process::Signal;
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// A binary of Muster and the settings of its workers.
#[derive(Clone, Debug)]
pub(crate) struct Binary {
    path: PathBuf,
    settings: Vec<String>,
}

/// A command that takes longer than this has gone wrong.
const COMMAND_LIMIT: Duration = Duration::from_secs(10 * 60);

impl Binary {
    /// The one at `path`; without a path the one that was built together with this benchmark.
    pub(crate) fn new(path: Option<PathBuf>, settings: Vec<String>) -> Self {
        Self { path: path.unwrap_or_else(|| env!("CARGO_BIN_EXE_musterd").into()), settings }
    }

    /// `musterd run` in `dir`, with the settings of the benchmark and then `settings`.
    pub(crate) fn worker(&self, url: &str, dir: &Path, settings: &[&str]) -> Command {
        let mut command = self.command(url, dir);
        command.arg("run").env("MUSTERD__LIVENESS__BACKEND", "postgres");
        for setting in self.settings.iter().map(String::as_str).chain(settings.iter().copied()) {
            command.args(["--set", setting]);
        }
        command
    }

    pub(crate) async fn migrate(&self, url: &str) -> Result<()> {
        self.finish(url, &["migrate"]).await?;
        Ok(())
    }

    /// Submits `file` as a held batch; its id.
    pub(crate) async fn submit(&self, database: &Database, file: &Path, command: &str) -> Result<i64> {
        let file = file.to_str().context("a path that is not UTF-8")?;
        let id = self.finish(&database.url, &["submit", file, "--command", command, "--hold"]).await?;
        id.trim().parse().with_context(|| format!("musterd submit answered {id:?}"))
    }

    /// Runs one command to its end; what it printed.
    async fn finish(&self, url: &str, arguments: &[&str]) -> Result<String> {
        let dir = tempfile::tempdir()?;
        let (out, log) = (dir.path().join("out"), dir.path().join("log"));
        let mut command = self.command(url, dir.path());
        command.args(arguments).stdin(Stdio::null());
        command.stdout(std::fs::File::create(&out)?).stderr(std::fs::File::create(&log)?);
        let wait = Tether::spawn(command, Signal::KILL)?.waiter();
        let status = tokio::task::spawn_blocking(move || wait(COMMAND_LIMIT)).await?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "musterd {} ended with {status:?}: {}",
            arguments.join(" "),
            std::fs::read_to_string(&log).unwrap_or_default()
        );
        Ok(std::fs::read_to_string(&out)?)
    }

    /// With the shipped configuration, except for the place of the database.
    fn command(&self, url: &str, dir: &Path) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(dir).env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.env("MUSTERD__DATABASE__URL", url);
        command
    }
}
