//! A configuration file in a directory of its own, and the real binary run with it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::time::Duration;

use toml::Table;

use super::database::TestDb;
use super::{pgbouncer, redis_deaths, run, services};
use crate::suite::support::wait::SOON;

/// No command of a test takes longer than this.
const COMMAND_LIMIT: Duration = SOON;

/// A configuration on disk.
#[derive(Debug)]
pub(crate) struct TestConfig {
    dir: PathBuf,
    file: PathBuf,
    http_port: u16,
}

impl TestConfig {
    /// `toml` as given, with a database, a free HTTP port and PostgreSQL liveness where it names none.
    pub(crate) fn new(db: &TestDb, toml: &str) -> Self {
        let mut table: Table = toml.parse().unwrap_or_else(|error| panic!("the test's TOML: {error}"));
        match POOLER.as_deref() {
            Some(way) if !has(&table, "database", "url") => pooled(&mut table, db, way),
            _ => drop(default(&mut table, "database", "url", db.url())),
        }
        if *CLUSTER && !has(&table, "liveness", "backend") && !table.contains_key("redis") {
            default(&mut table, "liveness", "backend", "redis");
            default(&mut table, "redis", "url", redis_deaths::url());
            // The replicas of a test have one database and one roll, and no other test has either.
            default(&mut table, "redis", "key_prefix", db.name());
        }
        default(&mut table, "liveness", "backend", "postgres");
        let free = format!("127.0.0.1:{}", services::free_port());
        let listen = default(&mut table, "http", "listen", &free);
        let http_port = listen.rsplit_once(':').unwrap().1.parse().unwrap();
        let dir = run::new_dir("musterd");
        let file = dir.join("musterd.toml");
        std::fs::write(&file, table.to_string()).unwrap();
        Self { dir, file, http_port }
    }

    /// The working directory of what runs with this configuration.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    pub(crate) fn http_port(&self) -> u16 {
        self.http_port
    }

    /// `musterd ARGS --config FILE`, in an environment that has nothing of the caller's.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = command(&self.dir, args);
        command.arg("--config").arg(&self.file);
        command
    }

    /// Runs a command to its end.
    pub(crate) async fn musterd(&self, args: &[&str]) -> Output {
        finish(self.command(args)).await
    }
}

/// Runs `musterd ARGS` without a configuration to its end, in an environment that has nothing of the caller's.
pub(crate) async fn musterd(args: &[&str]) -> Output {
    finish(command(&run::new_dir("musterd"), args)).await
}

/// The same in a directory that the test looks into afterwards.
pub(crate) async fn musterd_in(dir: &Path, args: &[&str]) -> Output {
    finish(command(dir, args)).await
}

/// `musterd ARGS` at home in `dir`, in an environment that has nothing of the caller's but where programs are.
pub(crate) fn command(dir: &Path, args: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_musterd"));
    command.args(args).current_dir(dir).env_clear().env("HOME", dir).env("XDG_STATE_HOME", dir.join("state"));
    // The second names the PostgreSQL of the run: `musterd dev` is to start the same one as the tests do.
    for name in ["PATH", "MUSTERD_PG_BIN", "MUSTERD_MUTANT"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    command
}

/// Runs a command to its end.
pub(crate) async fn finish(command: Command) -> Output {
    let what = format!("{command:?}");
    let mut command = tokio::process::Command::from(command);
    command.stdin(std::process::Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(COMMAND_LIMIT, command.output()).await {
        Ok(output) => output.unwrap(),
        Err(_) => panic!("not done after {COMMAND_LIMIT:?}: {what}"),
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a command printed with `--json`.
pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Set by `make test-pooler`: whatever a test does not connect by itself goes through PgBouncer, with a way past it
/// (`direct`) or without (`polling`).
static POOLER: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("MUSTERD_TEST_POOLER").ok());

/// Set by `make test-cluster`: whatever a test does not say about liveness by itself has a Redis Cluster whose masters die.
static CLUSTER: LazyLock<bool> = LazyLock::new(|| match std::env::var("MUSTERD_TEST_REDIS").as_deref() {
    Err(_) => false,
    Ok("cluster") => true,
    Ok(other) => panic!("MUSTERD_TEST_REDIS is {other:?}: cluster"),
});

fn pooled(table: &mut Table, db: &TestDb, way: &str) {
    default(table, "database", "url", &pgbouncer::shared().url(db));
    match way {
        "direct" => drop(default(table, "database", "direct_url", db.url())),
        "polling" => polling(table),
        other => panic!("MUSTERD_TEST_POOLER is {other:?}: direct or polling"),
    }
}

/// Nobody wakes a worker that polls, and its death is told by its heartbeat alone: both as often as a test can wait for.
fn polling(table: &mut Table) {
    default(table, "database", "pooler", "transaction");
    let claim = table.entry("claim").or_insert_with(|| Table::new().into()).as_table_mut().unwrap();
    claim.insert("poll_interval".into(), "50ms".into());
    if !["backend", "heartbeat_ttl", "heartbeat_interval"].iter().any(|key| has(table, "liveness", key)) {
        default(table, "liveness", "heartbeat_interval", "1s");
        default(table, "liveness", "heartbeat_ttl", "10s");
        default(table, "liveness", "recovery_interval", "1s");
    }
}

/// Whether workers share the sessions of a pooler.
pub(crate) fn is_pooled() -> bool {
    POOLER.is_some()
}

/// Whether workers have no session of their own: what they do with it is not there then.
pub(crate) fn is_polling() -> bool {
    POOLER.as_deref() == Some("polling")
}

fn has(table: &Table, section: &str, key: &str) -> bool {
    table.get(section).and_then(|section| section.get(key)).is_some()
}

/// Sets `section.key` unless it is there; what it is then.
fn default(table: &mut Table, section: &str, key: &str, value: &str) -> String {
    let section = table.entry(section).or_insert_with(|| Table::new().into()).as_table_mut().unwrap();
    section.entry(key).or_insert_with(|| value.into()).as_str().unwrap().to_owned()
}
