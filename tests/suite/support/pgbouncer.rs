//! The real PgBouncer, in transaction mode, in front of this run's PostgreSQL.

use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use musterd::tether::Tether;
use rustix::process::Signal;
use url::Url;

use super::database::TestDb;
use super::{run, services};

/// Server sessions of one database, far fewer than its clients: they have to be shared.
pub(crate) const SESSIONS: u32 = 6;
/// `nobody`: PgBouncer refuses root.
const NOBODY: u32 = 65534;

/// A running pooler; ends when dropped, or with the run.
#[derive(Debug)]
pub(crate) struct PgBouncer {
    tether: Tether,
    port: u16,
    ini: PathBuf,
    log: PathBuf,
}

impl PgBouncer {
    /// Before this run's PostgreSQL, with further lines of its configuration.
    pub(crate) fn start(settings: &str) -> Self {
        Self::before(services::postgres().url(), settings)
    }

    /// Before another server. The URL has the user and the password of clients and pooler alike.
    pub(crate) fn before(server: &str, settings: &str) -> Self {
        let port = services::free_port();
        let dir = run::new_dir("pgbouncer");
        let server = Url::parse(server).unwrap();
        let (user, password) = (server.username(), server.password().unwrap());
        let (users, ini, log) = (dir.join("users"), dir.join("pgbouncer.ini"), dir.join("pgbouncer.log"));
        std::fs::write(&users, format!("\"{user}\" \"{password}\"\n")).unwrap();
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\npool_mode = transaction\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\n\
             auth_file = {}\nmax_client_conn = 2000\ndefault_pool_size = {SESSIONS}\nserver_idle_timeout = 20\n\
             logfile = {}\n{settings}\n",
            server.port().unwrap(),
            users.display(),
            log.display(),
        );
        std::fs::write(&ini, config).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let pooler = Self { tether: launch(&ini), port, ini, log };
        pooler.wait_ready();
        pooler
    }

    /// Ends it at once, and starts it again with the same configuration.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.tether = launch(&self.ini);
        self.wait_ready();
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.tether.status().is_some()
    }

    /// How to get to a test's database through it.
    pub(crate) fn url(&self, db: &TestDb) -> String {
        if let Some(status) = self.tether.status() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            panic!("PgBouncer ended: {status}; its last words first: {last:#?}");
        }
        let mut url = Url::parse(db.url()).unwrap();
        url.set_port(Some(self.port)).unwrap();
        url.into()
    }

    fn has_met_its_issue_801(&self) -> bool {
        self.tether.status().is_some()
            && std::fs::read_to_string(&self.log)
                .is_ok_and(|log| log.contains("disconnect_client(): bad client state"))
    }

    fn stop(&self) {
        let _ = self.tether.signal(Signal::KILL);
        self.tether.wait(Duration::from_secs(20));
        run::forget(self.tether.pid());
    }

    fn wait_ready(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            assert!(Instant::now() < deadline, "PgBouncer does not listen on port {}", self.port);
            let ended = self.tether.wait(Duration::from_millis(10));
            assert!(ended.is_none(), "pgbouncer ended at once: {ended:?}");
        }
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn launch(ini: &Path) -> Tether {
    let mut command = Command::new(program());
    command.arg(ini).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let tether = Tether::spawn(command, Signal::KILL)
        .expect("pgbouncer cannot be started; install it (Debian: apt-get install pgbouncer)");
    run::kill_at_end(tether.pid());
    tether
}

/// One for all tests of the run. Every transaction gets the session that was idle longest: a statement that counts on
/// the last one's session fails at once, and not only under load.
///
/// PgBouncer 1.18 exits when a client that asked to cancel a query is gone before the request was passed on (its issue 801), and a test
/// that kills its daemon can be such a client. Started again, as a service manager would do, for the tests after that one.
pub(crate) fn shared() -> &'static PgBouncer {
    static SHARED: Mutex<Option<&PgBouncer>> = Mutex::new(None);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    match *shared {
        Some(pooler) if !pooler.has_met_its_issue_801() => pooler,
        _ => shared.insert(Box::leak(Box::new(PgBouncer::start("server_round_robin = 1")))),
    }
}

/// Debian puts it where only root looks.
fn program() -> &'static str {
    if Path::new("/usr/sbin/pgbouncer").exists() { "/usr/sbin/pgbouncer" } else { "pgbouncer" }
}
