//! The real daemon, in a process of its own: started, watched by its log, signalled, and gone with its test.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use musterd::tether::Tether;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::config::TestConfig;
use super::database::TestDb;
use super::wait::{SOON, eventually, within};

/// A daemon to be.
#[derive(Debug)]
pub(crate) struct DaemonBuilder {
    config: TestConfig,
    environment: Vec<(String, String)>,
    shell: Option<String>,
}

impl DaemonBuilder {
    /// Has a shell run `script` before it becomes the daemon, for limits and the like.
    pub(crate) fn shell(self, script: &str) -> Self {
        Self { shell: Some(script.into()), ..self }
    }

    /// For `RUST_LOG`.
    pub(crate) fn log(self, filter: &str) -> Self {
        self.env("RUST_LOG", filter)
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    pub(crate) fn config(&self) -> &TestConfig {
        &self.config
    }

    /// Starts `musterd run`.
    pub(crate) fn start(self) -> Daemon {
        let mut command = match self.shell {
            None => self.config.command(&["run"]),
            Some(script) => in_shell(&script, &self.config.command(&["run"])),
        };
        command.envs(self.environment);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The leader of a group, so that what it starts can be killed with it.
        command.process_group(0);
        let mut tether = Tether::spawn(command, Signal::KILL).unwrap();
        let log = Log::default();
        log.follow("out", tether.stdout.take().unwrap());
        log.follow("err", tether.stderr.take().unwrap());
        Daemon { tether, log, config: self.config }
    }
}

fn in_shell(script: &str, inner: &Command) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{script}; exec \"$@\""))
        .arg("sh")
        .arg(inner.get_program())
        .args(inner.get_args());
    command.env_clear().envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(inner.get_current_dir().unwrap());
    command
}

/// A running daemon. Dropping it kills its process group; when the test is failing, its log is shown.
#[derive(Debug)]
pub(crate) struct Daemon {
    tether: Tether,
    log: Log,
    config: TestConfig,
}

impl Daemon {
    /// A daemon on `db`, with `toml` beside what [`TestConfig`] fills in.
    pub(crate) fn builder(db: &TestDb, toml: &str) -> DaemonBuilder {
        let environment = vec![("RUST_LOG".into(), "info,musterd=debug".into())];
        DaemonBuilder { config: TestConfig::new(db, toml), environment, shell: None }
    }

    pub(crate) fn config(&self) -> &TestConfig {
        &self.config
    }

    pub(crate) fn pid(&self) -> u32 {
        self.tether.pid()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.tether.status().is_some()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.tether.signal(signal).unwrap();
    }

    /// Waits until `/readyz` answers 200.
    pub(crate) async fn wait_ready(&self) {
        eventually(SOON, "the daemon is ready", async || {
            if let Some(status) = self.tether.status() {
                panic!("the daemon ended before it was ready: {status}");
            }
            (self.get("/readyz").await.ok()?.0 == 200).then_some(())
        })
        .await;
    }

    /// The status and the whole answer, head and body, to `GET path`.
    pub(crate) async fn get(&self, path: &str) -> std::io::Result<(u16, String)> {
        http_get(self.config.http_port(), path).await
    }

    /// The value of a metric without labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        metric(self.config.http_port(), name).await
    }

    /// Memory in use now and at most so far, in MiB.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let of = |name: &str| -> u64 {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
        };
        (of("VmRSS:"), of("VmHWM:"))
    }

    /// Waits for a line of the log, earlier ones included, and gives it.
    pub(crate) async fn wait_for_log(&self, limit: Duration, wanted: impl FnMut(&str) -> bool) -> String {
        self.log.wait_for(limit, wanted).await
    }

    /// Everything it has said so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lines_from(0)
    }

    /// Waits for its end, and for its last words.
    pub(crate) async fn wait_exit(&self, limit: Duration) -> ExitStatus {
        let wait = self.tether.waiter();
        let ended = tokio::task::spawn_blocking(move || wait(limit)).await.unwrap();
        let ended = ended.unwrap_or_else(|| panic!("the daemon still runs after {limit:?}"));
        self.log.wait_for_end().await;
        ended
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.tether.signal_group(Signal::KILL);
        self.tether.wait(Duration::from_secs(10));
        if std::thread::panicking() {
            println!("--- log of the daemon {}\n{}\n---", self.pid(), self.log().join("\n"));
        }
    }
}

/// A plain `GET` on 127.0.0.1: the status and the whole answer.
pub(crate) async fn http_get(port: u16, path: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.map(|status| (status, answer)).ok_or_else(|| std::io::Error::other("not an HTTP answer"))
}

/// The value of a metric without labels.
pub(crate) async fn metric(port: u16, name: &str) -> f64 {
    let (_, text) = http_get(port, "/metrics").await.unwrap();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("no metric {name} in {text}"));
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

/// The lines of a process as they come; the count tells waiters of news.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    count: watch::Sender<usize>,
    /// Streams that are still read.
    open: watch::Sender<usize>,
}

impl Log {
    pub(crate) fn follow(&self, name: &str, stream: impl Read + Send + 'static) {
        let log = self.clone();
        log.open.send_modify(|open| *open += 1);
        let read = move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let mut lines = log.lines.lock().unwrap();
                lines.push(String::from_utf8_lossy(&line).into_owned());
                log.count.send_replace(lines.len());
            }
            log.open.send_modify(|open| *open -= 1);
        };
        std::thread::Builder::new().name(format!("log-{name}")).spawn(read).unwrap();
    }

    /// Waits until every line has been read: the process may have ended before its last words were.
    pub(crate) async fn wait_for_end(&self) {
        within(SOON, self.open.subscribe().wait_for(|open| *open == 0)).await.unwrap();
    }

    pub(crate) fn lines_from(&self, begin: usize) -> Vec<String> {
        self.lines.lock().unwrap()[begin..].to_vec()
    }

    /// Waits for a line, earlier ones included, and gives it.
    pub(crate) async fn wait_for(&self, limit: Duration, mut wanted: impl FnMut(&str) -> bool) -> String {
        let mut news = self.count.subscribe();
        let found = async {
            let mut seen = 0;
            loop {
                let count = *news.borrow_and_update();
                let lines = self.lines_from(seen);
                seen += lines.len();
                if let Some(line) = lines.into_iter().find(|line| wanted(line)) {
                    return line;
                }
                if seen >= count {
                    news.changed().await.unwrap();
                }
            }
        };
        tokio::time::timeout(limit, found)
            .await
            .unwrap_or_else(|_| panic!("the line did not come within {limit:?}"))
    }
}
