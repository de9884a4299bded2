//! PostgreSQL with a synchronous standby: killed, promoted, given a new standby, and short of disk.
//!
//! The data of each server is on a small disk of its own where that can be had, its WAL is not: a full disk then refuses rows, as it
//! does where the two are kept apart, instead of ending the server.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use musterd::embedded::find_binaries;
use musterd::passwd::ids_of;
use musterd::tether::Tether;
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use crate::suite::support::{run, services};

/// What one server may store, so that it can be filled.
const DISK: &str = "3g";
const PATIENCE: Duration = Duration::from_secs(60);

const SETTINGS: &[&str] = &[
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    // Only the servers die here, never the machine.
    "fsync=off",
    "full_page_writes=off",
    "max_connections=250",
    "shared_buffers=128MB",
    "max_wal_size=2GB",
    "wal_keep_size=512MB",
    "wal_retrieve_retry_interval=200ms",
    "synchronous_standby_names=ANY 1 (*)",
    "autovacuum_naptime=5s",
    "log_min_messages=warning",
    "log_line_prefix=%m [%p] %a ",
    "log_min_error_statement=panic",
];

/// One server.
#[derive(Debug)]
struct Node {
    dir: PathBuf,
    port: u16,
    tether: Tether,
}

/// A primary and, most of the time, its standby.
#[derive(Debug)]
pub(crate) struct Cluster {
    programs: PathBuf,
    user: Option<(u32, u32)>,
    primary: Node,
    standby: Option<Node>,
    made: u32,
    pub(crate) has_disks: bool,
    ballast: Option<PathBuf>,
}

/// A connection; ends when dropped.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    connection: JoinHandle<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl std::ops::Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// Connects; fails instead of waiting for ever.
pub(crate) async fn open(url: &str) -> Result<Session> {
    let connect = tokio_postgres::connect(url, NoTls);
    let (client, connection) = tokio::time::timeout(Duration::from_secs(10), connect).await??;
    #[expect(clippy::disallowed_methods, reason = "the handle is kept beside the client")]
    let connection = tokio::spawn(async move {
        // The client's next call says so.
        let _ = connection.await;
    });
    Ok(Session { client, connection })
}

impl Cluster {
    pub(crate) async fn start(has_disks: bool) -> Result<Self> {
        let postgres = fs::canonicalize(find_binaries()?.program("postgres"))?;
        // What a link leads to has pg_basebackup beside it; the link may have not.
        let programs = postgres.parent().context("no directory")?.to_owned();
        let passwd = fs::read_to_string("/etc/passwd")?;
        let user = if rustix::process::geteuid().is_root() { ids_of(&passwd, "postgres") } else { None };
        let (dir, wal) = places(0, user, has_disks)?;
        let mut command = Command::new(programs.join("initdb"));
        command.args(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync", "--locale=C"]);
        command.arg("-D").arg(&dir).arg("--waldir").arg(&wal);
        finish(command, user).await?;
        let primary = Node::start(&programs, user, dir)?;
        let mut cluster = Self { programs, user, primary, standby: None, made: 0, has_disks, ballast: None };
        cluster.wait_ready().await?;
        cluster.add_standby().await?;
        Ok(cluster)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.primary.port).into()
    }

    /// Of the primary, past every proxy, as a superuser whom `default_transaction_read_only` does not concern.
    pub(crate) fn url(&self, database: &str) -> String {
        format!(
            "postgres://postgres:secret@127.0.0.1:{}/{database}?options=-c%20default_transaction_read_only%3Doff",
            self.primary.port
        )
    }

    pub(crate) fn logs() -> PathBuf {
        run::dir().join("postgres-logs")
    }

    pub(crate) async fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match open(&self.url("postgres")).await {
                Ok(_) => return Ok(()),
                Err(error) => ensure!(Instant::now() < deadline, "PostgreSQL does not answer: {error:#}"),
            }
            ensure!(self.primary.tether.status().is_none(), "PostgreSQL ended: see {:?}", Self::logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends the primary as a crash would, and starts it again.
    pub(crate) async fn crash_and_restart(&mut self) -> Result<()> {
        self.primary.stop();
        self.primary.restart(&self.programs, self.user)?;
        self.wait_ready().await
    }

    /// Starts the primary again if it has ended by itself, which it may for want of disk.
    pub(crate) async fn revive(&mut self) -> Result<bool> {
        if self.primary.tether.status().is_none() {
            return Ok(false);
        }
        self.primary.restart(&self.programs, self.user)?;
        self.wait_ready().await?;
        Ok(true)
    }

    /// Ends the primary for good and makes the standby the primary. There is no standby then.
    pub(crate) async fn promote(&mut self) -> Result<()> {
        self.wait_for_standby().await?;
        let standby = self.standby.take().context("no standby")?;
        self.primary.stop();
        let old = std::mem::replace(&mut self.primary, standby);
        let session = open(&self.url("postgres")).await?;
        session.execute("SELECT pg_promote(true, 60)", &[]).await?;
        drop(old);
        Ok(())
    }

    pub(crate) async fn add_standby(&mut self) -> Result<()> {
        self.made += 1;
        let (dir, wal) = places(self.made, self.user, self.has_disks)?;
        let mut command = Command::new(self.programs.join("pg_basebackup"));
        command.args(["-h", "127.0.0.1", "-U", "postgres", "--checkpoint=fast", "--wal-method=stream"]);
        command.args(["--no-sync", "--write-recovery-conf"]);
        command.arg("-p").arg(self.primary.port.to_string()).arg("-D").arg(&dir).arg("--waldir").arg(&wal);
        finish(command, self.user).await?;
        self.standby = Some(Node::start(&self.programs, self.user, dir)?);
        self.wait_for_standby().await
    }

    /// Waits until the standby has everything that was committed.
    pub(crate) async fn wait_for_standby(&self) -> Result<()> {
        const CAUGHT_UP: &str = "SELECT EXISTS (SELECT FROM pg_stat_replication
             WHERE state = 'streaming' AND sync_state <> 'async' AND flush_lsn >= pg_current_wal_flush_lsn() - 65536)";
        let deadline = Instant::now() + PATIENCE;
        let session = open(&self.url("postgres")).await?;
        while !session.query_one(CAUGHT_UP, &[]).await?.get::<_, bool>(0) {
            ensure!(Instant::now() < deadline, "the standby does not catch up");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Takes all that is left of the primary's disk.
    pub(crate) fn fill_disk(&mut self) -> Result<()> {
        let file = self.primary.dir.parent().context("no parent")?.join("ballast");
        let mut size = rustix::fs::statvfs(&self.primary.dir)?.f_bavail * 4096;
        self.ballast = Some(file.clone());
        let ballast = fs::File::create(&file)?;
        // The server takes some of it meanwhile: then a little less.
        while size > 0
            && rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, size).is_err()
        {
            size = size.saturating_sub(1 << 20);
        }
        Ok(())
    }

    pub(crate) fn empty_disk(&mut self) {
        if let Some(file) = self.ballast.take() {
            let _ = fs::remove_file(file);
        }
    }
}

impl Node {
    fn start(programs: &Path, user: Option<(u32, u32)>, dir: PathBuf) -> Result<Self> {
        let port = services::free_port();
        fs::create_dir_all(Cluster::logs())?;
        let tether = launch(programs, user, &dir, port)?;
        Ok(Self { dir, port, tether })
    }

    fn stop(&self) {
        let _ = self.tether.signal(Signal::QUIT);
        if self.tether.wait(PATIENCE).is_none() {
            let _ = self.tether.signal(Signal::KILL);
        }
        run::forget(self.tether.pid());
    }

    fn restart(&mut self, programs: &Path, user: Option<(u32, u32)>) -> Result<()> {
        self.tether = launch(programs, user, &self.dir, self.port)?;
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

fn launch(programs: &Path, user: Option<(u32, u32)>, dir: &Path, port: u16) -> Result<Tether> {
    let log =
        fs::File::options().create(true).append(true).open(Cluster::logs().join(format!("{port}.log")))?;
    let mut command = Command::new(programs.join("postgres"));
    command.arg("-D").arg(dir).arg("-p").arg(port.to_string());
    for setting in SETTINGS {
        command.args(["-c", setting]);
    }
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    let tether = Tether::spawn(command, Signal::QUIT)?;
    run::kill_at_end(tether.pid());
    Ok(tether)
}

/// Where the data and the WAL of a server go.
fn places(number: u32, user: Option<(u32, u32)>, has_disks: bool) -> Result<(PathBuf, PathBuf)> {
    let (disk, wal) = (run::dir().join(format!("disk-{number}")), run::dir().join(format!("wal-{number}")));
    for dir in [&disk, &wal] {
        fs::create_dir(dir)?;
    }
    if has_disks {
        mount(&disk)?;
    }
    let data = disk.join("data");
    fs::create_dir(&data)?;
    fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    if let Some((uid, gid)) = user {
        for dir in [&disk, &data, &wal] {
            chown(dir, Some(uid), Some(gid))?;
        }
    }
    Ok((data, wal))
}

fn mount(dir: &Path) -> Result<()> {
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", &format!("size={DISK}"), "tmpfs"])
        .arg(dir)
        .status()?;
    ensure!(status.success(), "mount: {status}");
    Ok(())
}

async fn finish(mut command: Command, user: Option<(u32, u32)>) -> Result<()> {
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    command.current_dir("/");
    let what = format!("{:?}", command.get_program());
    let output =
        tokio::process::Command::from(command).kill_on_drop(true).output().await.context(what.clone())?;
    ensure!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
