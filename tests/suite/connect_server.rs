//! A PostgreSQL of a test's own, with or without TLS and with certificates made on the spot.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use musterd::store::connect::{OneShot, Target};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::support::services::free_port;
use crate::suite::support::wait::SOON;

/// The superuser's password; with a space and a word to look for in what must not show it.
pub(crate) const PASSWORD: &str = "s3cret canary";

/// Whether the server speaks TLS.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tls {
    On,
    Off,
}

/// A running server; it ends with this value.
pub(crate) struct Server {
    pub(crate) port: u16,
    dir: TempDir,
    process: Child,
}

impl Server {
    pub(crate) async fn start(tls: Tls) -> Self {
        let dir = tempfile::Builder::new().prefix("musterd-pg-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        fs::write(dir.path().join("password"), PASSWORD).unwrap();
        certificates(dir.path());
        give_to_server(dir.path());
        run(server_command("initdb", dir.path())
            .args(["-D", "data", "-U", "postgres", "--no-sync", "-E", "UTF8"])
            .args(["--locale=C", "--pwfile=password", "--auth=scram-sha-256"]));
        fs::write(dir.path().join("data/pg_hba.conf"), HBA).unwrap();
        let port = free_port();
        let process = postgres(dir.path(), port, tls);
        let mut server = Self { port, dir, process };
        server.wait_until_ready().await;
        server
    }

    /// A file of the server's directory: `ca.pem`, `other-ca.pem`, `server.pem`, `client.pem`, `client.key`.
    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// The server by name, as `user`, with more parameters in libpq's `key=value` form.
    pub(crate) fn target(&self, user: &str, more: &str) -> Target {
        let at = format!("host=localhost hostaddr=127.0.0.1 port={}", self.port);
        Target::parse(&format!("{at} user={user} password='{PASSWORD}' dbname=postgres {more}")).unwrap()
    }

    pub(crate) async fn superuser(&self, database: &str) -> OneShot {
        let more = format!("dbname={database} sslmode=disable");
        self.target("postgres", &more).open("superuser").await.unwrap()
    }

    pub(crate) async fn execute(&self, sql: &str) {
        let client = self.superuser("postgres").await;
        // One by one: CREATE DATABASE may not share a transaction.
        for statement in sql.split(';').filter(|statement| !statement.trim().is_empty()) {
            client.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
        }
        client.close().await;
    }

    /// Replaces all its certificates, the authority's, its own and the client's, and ends all sessions of the old ones.
    pub(crate) async fn rotate(&self) {
        certificates(self.dir.path());
        give_to_server(self.dir.path());
        self.execute(
            "SELECT pg_reload_conf();
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename IS NOT NULL",
        )
        .await;
    }

    async fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + SOON;
        let target = self.target("postgres", "sslmode=disable");
        while let Err(error) = target.open("ready?").await {
            let log = || fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default();
            assert!(self.process.try_wait().unwrap().is_none(), "PostgreSQL ended: {}", log());
            assert!(Instant::now() < deadline, "PostgreSQL is not ready: {error}: {}", log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGQUIT: end at once, children included; the data is thrown away anyway.
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::QUIT);
        }
        let _ = self.process.wait();
    }
}

const HBA: &str = "\
hostssl all certified 127.0.0.1/32 cert
host    all all       127.0.0.1/32 scram-sha-256
local   all all                    scram-sha-256
";

/// A CA with a server's and a client's certificate, and a CA that signed neither.
fn certificates(dir: &Path) {
    let ca = authority("musterd test CA");
    let other = authority("somebody else's CA");
    fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
    fs::write(dir.join("other-ca.pem"), other.pem()).unwrap();
    for (file, name, sans) in
        [("server", "localhost", vec!["localhost".to_string()]), ("client", "certified", vec![])]
    {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(sans).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        fs::write(dir.join(format!("{file}.pem")), params.signed_by(&key, &ca).unwrap().pem()).unwrap();
        let path = dir.join(format!("{file}.key"));
        fs::write(&path, key.serialize_pem()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn postgres(dir: &Path, port: u16, tls: Tls) -> Child {
    let log = fs::File::create(dir.join("server.log")).unwrap();
    let mut settings = vec![
        format!("port={port}"),
        "listen_addresses=127.0.0.1".to_string(),
        format!("unix_socket_directories={}", dir.display()),
        "fsync=off".to_string(),
    ];
    if tls == Tls::On {
        let path = |name: &str| dir.join(name).display().to_string();
        settings.push("ssl=on".to_string());
        settings.push(format!("ssl_cert_file={}", path("server.pem")));
        settings.push(format!("ssl_key_file={}", path("server.key")));
        settings.push(format!("ssl_ca_file={}", path("ca.pem")));
    }
    let mut command = server_command("postgres", dir);
    command.args(["-D", "data"]).args(settings.iter().flat_map(|setting| ["-c", setting.as_str()]));
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// A program of PostgreSQL, as a user that is not root: it refuses to be.
fn server_command(program: &str, dir: &Path) -> Command {
    let mut command = Command::new(bin_dir().join(program));
    command.current_dir(dir).env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::null());
    if let Some((uid, gid)) = server_user() {
        command.uid(uid).gid(gid);
    }
    command
}

fn give_to_server(dir: &Path) {
    let Some((uid, gid)) = server_user() else { return };
    chown(dir, Some(uid), Some(gid)).unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        chown(entry.unwrap().path(), Some(uid), Some(gid)).unwrap();
    }
}

/// `postgres` of `/etc/passwd` when we are root; ourselves otherwise.
fn server_user() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let line = users.lines().find(|line| line.starts_with("postgres:")).expect("a user postgres");
    let fields: Vec<_> = line.split(':').collect();
    Some((fields[2].parse().unwrap(), fields[3].parse().unwrap()))
}

fn bin_dir() -> PathBuf {
    let installed = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL's Debian package");
    let version = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    let newest = installed.map(|entry| entry.unwrap().path()).max_by_key(version);
    newest.expect("PostgreSQL's Debian package").join("bin")
}

fn run(command: &mut Command) {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
