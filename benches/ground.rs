//! What every benchmark stands on: a private PostgreSQL that syncs to disk, a fresh database for each measurement.

use anyhow::{Context, Result};
use musterd::{
    embedded::{self, EmbeddedPostgres, Options},
    store::{
        connect::{OneShot, Target},
        migrate,
    },
};
use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

const TEMPLATE: &str = "bench_template";

/// The server of one run. Its directory goes with it.
pub(crate) struct Ground {
    server: EmbeddedPostgres,
    databases: AtomicU32,
}

/// A database with Muster's schema and nothing in it.
pub(crate) struct Database {
    pub(crate) name: String,
    pub(crate) url: String,
}

/// What the server had counted at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wal(i64);

impl Ground {
    /// A server, with these settings over the usual ones, whose databases have the schema of this library.
    pub(crate) async fn prepare(settings: &[(&str, &str)]) -> Result<Self> {
        Self::prepare_by(settings, async |url| {
            let mut client = connect(url).await?;
            migrate::migrate(&mut client).await?;
            client.close().await;
            Ok(())
        })
        .await
    }

    /// The same, with the schema that `migrate` makes at the URL it is given.
    pub(crate) async fn prepare_by(
        settings: &[(&str, &str)],
        migrate: impl AsyncFnOnce(&str) -> Result<()>,
    ) -> Result<Self> {
        // Every TLS connection of a process needs a provider; a second call finds the first one's.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut options = Options::ephemeral(embedded::ephemeral_dir());
        for (name, value) in settings {
            options = options.setting(name, value);
        }
        let server = tokio::task::spawn_blocking(|| EmbeddedPostgres::start(options)).await??;
        let ground = Self { server, databases: AtomicU32::new(0) };
        ground.admin(&format!("CREATE DATABASE {TEMPLATE}")).await?;
        migrate(&ground.url_of(TEMPLATE)).await?;
        Ok(ground)
    }

    pub(crate) async fn database(&self) -> Result<Database> {
        let name = format!("bench_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.admin(&format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")).await?;
        Ok(Database { url: self.url_of(&name), name })
    }

    pub(crate) async fn drop_database(&self, database: Database) -> Result<()> {
        self.admin(&format!("DROP DATABASE {} WITH (FORCE)", database.name)).await
    }

    /// Writes what was loaded to disk, so that no measurement pays for the pages of another.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.admin("CHECKPOINT").await
    }

    /// Where the log of writes ends.
    pub(crate) async fn wal(&self) -> Result<Wal> {
        let client = connect(self.server.url()).await?;
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";
        let row = client.query_one(sql, &[]).await?;
        client.close().await;
        Ok(Wal(row.get(0)))
    }

    /// Transactions and deadlocks of a database, counted when the last of its sessions is gone: before that they
    /// keep some of their counts to themselves.
    pub(crate) async fn transactions(&self, database: &Database) -> Result<Transactions> {
        self.sessions_ended(database).await?;
        let client = connect(self.server.url()).await?;
        let sql = "SELECT xact_commit, xact_rollback, deadlocks FROM pg_stat_database WHERE datname = $1";
        let row = client.query_one(sql, &[&database.name]).await?;
        client.close().await;
        Ok(Transactions { committed: row.get(0), rolled_back: row.get(1), deadlocks: row.get(2) })
    }

    /// Waits until the processes of all sessions of a database are gone. A session leaves the server's own list earlier than
    /// the kernel's, and its processor time counts only then.
    async fn sessions_ended(&self, database: &Database) -> Result<()> {
        // "postgres: USER DATABASE HOST …"; a process that is ending has an empty command line for a moment.
        let name = format!(" {} ", database.name);
        let is_session =
            |line: &str| line.is_empty() || (line.contains(&name) && !line.contains(" autovacuum worker "));
        for _ in 0..1000 {
            if !child_command_lines(self.server.pid())?.iter().any(|line| is_session(line)) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("the sessions of {} did not end", database.name)
    }

    /// Processor time of all sessions that have ended, in seconds; other load on the machine changes it little.
    pub(crate) fn processor_time(&self) -> Result<f64> {
        let [user, system, ended_user, ended_system] = processor_times(self.server.pid())?;
        Ok(user + system + ended_user + ended_system)
    }

    pub(crate) async fn version(&self) -> Result<String> {
        let client = connect(self.server.url()).await?;
        let row = client.query_one("SHOW server_version", &[]).await?;
        client.close().await;
        Ok(row.get(0))
    }

    pub(crate) async fn stop(self) -> Result<()> {
        tokio::task::spawn_blocking(|| self.server.stop()).await?.context("stop the private PostgreSQL")
    }

    async fn admin(&self, sql: &str) -> Result<()> {
        let client = connect(self.server.url()).await?;
        client.batch_execute(sql).await.with_context(|| sql.to_owned())?;
        client.close().await;
        Ok(())
    }

    fn url_of(&self, database: &str) -> String {
        let (server, _) = self.server.url().rsplit_once('/').unwrap_or((self.server.url(), ""));
        format!("{server}/{database}")
    }
}

impl Wal {
    pub(crate) fn bytes_since(self, earlier: Self) -> f64 {
        (self.0 - earlier.0) as f64
    }
}

/// What became of a database's transactions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transactions {
    pub(crate) committed: i64,
    pub(crate) rolled_back: i64,
    pub(crate) deadlocks: i64,
}

fn child_command_lines(pid: u32) -> Result<Vec<String>> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    // A child that is gone by now is none.
    let line = |child: &str| std::fs::read(format!("/proc/{child}/cmdline")).ok();
    Ok(children
        .split_whitespace()
        .filter_map(line)
        .map(|line| String::from_utf8_lossy(&line).into_owned())
        .collect())
}

/// Processor time of a process and of its children that have ended, user and system, in seconds.
pub(crate) fn processor_times(pid: u32) -> Result<[f64; 4]> {
    // Linux reports hundredths of a second here, whatever it counts in itself.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is a name in parentheses and may contain anything; the fourteenth is the first we want.
    let (_, fields) = stat.rsplit_once(") ").context("no such process")?;
    let mut times = fields.split(' ').skip(11).map(|ticks| ticks.parse::<f64>().map(|ticks| ticks / TICKS));
    let mut next = || anyhow::Ok(times.next().context("too few fields")??);
    Ok([next()?, next()?, next()?, next()?])
}

pub(crate) async fn connect(url: &str) -> Result<OneShot> {
    Ok(Target::parse(url)?.open("musterd bench").await?)
}

/// Runs a benchmark to its end, or to the first signal; either way the server and its directory are gone after it.
pub(crate) async fn bounded<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        done = tokio::time::timeout(limit, work) => done.context("the benchmark took too long")?,
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    }
}

#[expect(clippy::print_stderr, reason = "progress for the person who waits; the result goes to stdout")]
pub(crate) fn say(text: &str) {
    eprintln!("bench: {text}");
}
