//! A Redis, or a Valkey, of a test's own: started, killed, and started again where it was.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use musterd::tether::Tether;
use rustix::process::Signal;

use super::wait::SOON;
use super::{manifests, run, services};

/// Whose server it is. They speak one protocol, and a worker must do as well with either.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Maker {
    Redis,
    /// Only where `manifests::has("valkey")`.
    Valkey,
}

impl Maker {
    fn program(self) -> PathBuf {
        match self {
            Self::Redis => "redis-server".into(),
            Self::Valkey => manifests::root().join("target/valkey/valkey-server"),
        }
    }
}

/// A private server; ends when dropped, or with the run.
#[derive(Debug)]
pub(crate) struct Redis {
    tether: Tether,
    port: u16,
    program: PathBuf,
    args: Vec<String>,
}

impl Redis {
    /// A server on `port` with these options beside the usual ones. It keeps nothing on disk but what a cluster's node
    /// knows of the others.
    pub(crate) fn start(maker: Maker, port: u16, options: &[&str]) -> Self {
        let number = port.to_string();
        let mut args = words(&["--port", &number, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        args.extend(words(options));
        Self::launch(maker.program(), args, port, &run::new_dir("redis"))
    }

    /// A Sentinel that watches what these lines of its configuration name.
    pub(crate) fn start_sentinel(watched: &str) -> Self {
        let (dir, port) = (run::new_dir("sentinel"), services::free_port());
        let config = dir.join("sentinel.conf");
        std::fs::write(&config, format!("port {port}\nbind 127.0.0.1\n{watched}")).unwrap();
        let args = words(&[config.to_str().unwrap(), "--sentinel"]);
        Self::launch(Maker::Redis.program(), args, port, &dir)
    }

    /// `redis://127.0.0.1:PORT`
    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.tether.pid()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.tether.signal(signal).unwrap();
    }

    /// Ends it at once, as a crash would.
    pub(crate) fn stop(&self) {
        self.signal(Signal::KILL);
        self.tether.wait(SOON).expect("nothing survives SIGKILL");
        run::forget(self.pid());
    }

    /// Starts it again after its end: the same port and directory, and no data.
    pub(crate) fn restart(&mut self) {
        assert!(self.tether.status().is_some(), "it still runs");
        self.tether = spawn(&self.program, &self.args);
        self.wait_ready();
    }

    fn launch(program: PathBuf, mut args: Vec<String>, port: u16, dir: &Path) -> Self {
        let log = dir.join("redis.log");
        args.extend(words(&["--dir", dir.to_str().unwrap(), "--logfile", log.to_str().unwrap()]));
        let redis = Self { tether: spawn(&program, &args), port, program, args };
        redis.wait_ready();
        redis
    }

    fn wait_ready(&self) {
        let deadline = Instant::now() + SOON;
        while !self.answers() {
            assert!(Instant::now() < deadline, "Redis does not answer on port {}", self.port);
            // Waits for the process's end, which would be news; else it is merely time to look again.
            let ended = self.tether.wait(Duration::from_millis(10));
            assert!(ended.is_none(), "{} ended at once: {ended:?}", self.program.display());
        }
    }

    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(self.address()) else { return false };
        let mut answer = [0; 5];
        stream.write_all(b"PING\r\n").is_ok() && stream.read_exact(&mut answer).is_ok() && &answer == b"+PONG"
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.stop();
    }
}

fn words(args: &[&str]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

fn spawn(program: &Path, args: &[String]) -> Tether {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let tether = Tether::spawn(command, Signal::KILL)
        .unwrap_or_else(|error| panic!("{}: {error}; make setup-test installs it", program.display()));
    run::kill_at_end(tether.pid());
    tether
}
