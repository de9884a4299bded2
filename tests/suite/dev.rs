//! `musterd dev`: found by the other commands, and however it ends nothing runs on and the data stays.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use musterd::embedded::find_binaries;
use rustix::process::Signal;

use crate::suite::support::config::{command, finish, json, stderr, stdout};
use crate::suite::support::database::connect;
use crate::suite::support::process::Process;
use crate::suite::support::run;
use crate::suite::support::wait::{SOON, eventually, process_runs};

/// A user's home, in which no other dev runs.
pub(crate) struct Home(pub(crate) PathBuf);

impl Home {
    pub(crate) fn new() -> Self {
        Self(run::new_dir("home"))
    }

    fn dir(&self) -> PathBuf {
        self.0.join("dev")
    }

    fn start(&self, more: &[&str]) -> Dev {
        self.start_with(more, |_| {})
    }

    /// With an environment that the caller adds to.
    pub(crate) fn start_with(&self, more: &[&str], change: impl FnOnce(&mut Command)) -> Dev {
        let dir = self.dir();
        let mut args = vec!["dev", "--dir", dir.to_str().unwrap()];
        args.extend(more);
        let mut command = command(&self.0, &args);
        change(&mut command);
        Dev { process: Process::start(command), dir, running: self.0.join("state/musterd/running-dev.json") }
    }

    pub(crate) async fn musterd(&self, args: &[&str]) -> Output {
        finish(command(&self.0, args)).await
    }
}

pub(crate) struct Dev {
    pub(crate) process: Process,
    dir: PathBuf,
    running: PathBuf,
}

impl Dev {
    /// How other commands connect, once it is ready. What it prints is without the password: nobody sees it.
    pub(crate) async fn url(&self) -> String {
        let line = self.process.out.wait_for(SOON, |line| line.starts_with("PostgreSQL ")).await;
        self.process.out.wait_for(SOON, |line| line.starts_with("Ctrl-C")).await;
        assert!(line.contains(":[redacted]@"), "{line}");
        let running: serde_json::Value = serde_json::from_slice(&fs::read(&self.running).unwrap()).unwrap();
        running["url"].as_str().unwrap().to_owned()
    }

    /// The server's process id, once there is one.
    async fn server(&self) -> u32 {
        let file = self.dir.join("data/postmaster.pid");
        eventually(SOON, "the server writes its pid", async || {
            fs::read_to_string(&file).ok()?.lines().next()?.parse().ok()
        })
        .await
    }

    pub(crate) async fn ends_well(&self) {
        let status = self.process.wait_exit(SOON).await;
        assert_eq!(status.code(), Some(0), "{status}");
        assert_eq!(runs_on(&self.dir), Vec::<String>::new());
    }
}

/// The commands of all processes that name `dir`.
fn runs_on(dir: &Path) -> Vec<String> {
    let wanted = dir.to_str().unwrap();
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| process_runs(*pid))
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/cmdline")).ok())
        .filter(|line| line.contains(wanted))
        .collect()
}

async fn nothing_runs_on(dir: &Path) {
    eventually(SOON, "everything ends", async || runs_on(dir).is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn others_find_it_and_sigterm_ends_it_with_its_server() {
    let home = Home::new();
    let dev = home.start(&[]);
    let url = dev.url().await;
    let server = dev.server().await;
    let (client, _connection) = connect(&url).await;
    let version: String = client.query_one("SHOW server_version_num", &[]).await.unwrap().get(0);
    let major = version.parse::<u32>().unwrap() / 10_000;
    assert_eq!(major, find_binaries().unwrap().major(), "the PostgreSQL that this run is about");

    let shown = json(&home.musterd(&["config", "show", "--json"]).await);
    assert_eq!(shown["sources"]["database.url"], "the running `musterd dev`");
    assert!(!shown.to_string().contains(url.split([':', '@']).nth(2).unwrap()), "the password is shown");
    // A file that names no database means the same one, and adds what it has.
    let file = home.0.join("mine.toml");
    std::fs::write(&file, "[handlers.mine]\nkind = \"builtin\"\nbuiltin = \"noop\"\n").unwrap();
    let args = ["config", "show", "--json", "--config", file.to_str().unwrap()];
    let with_file = json(&home.musterd(&args).await);
    assert_eq!(with_file["sources"]["database.url"], "the running `musterd dev`");
    assert_eq!(with_file["config"]["handlers"]["mine"]["builtin"], "noop", "{with_file}");
    let doctor = home.musterd(&["doctor", "--strict", "--json"]).await;
    assert!(doctor.status.success(), "{}", stdout(&doctor));
    // Who names a database means that one, and nothing of the dev beside it.
    let other =
        home.musterd(&["config", "show", "--json", "--set", "database.url=postgres://elsewhere/x"]).await;
    assert_eq!(json(&other)["sources"]["liveness.backend"], "default");

    let second = finish(command(&home.0, &["dev", "--dir", dev.dir.to_str().unwrap()])).await;
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    let held = format!("is in use by process {}", dev.process.pid());
    assert!(stderr(&second).contains(&held) && stdout(&second).is_empty(), "{second:?}");

    dev.process.signal(Signal::TERM);
    dev.ends_well().await;
    assert!(!process_runs(server));
    let shown = json(&home.musterd(&["config", "show", "--json"]).await);
    assert_eq!(shown["sources"]["database.url"], "default", "what has ended is not found");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_database_and_without_dev_a_command_says_that_there_is_neither() {
    let output = Home::new().musterd(&["batch", "list"]).await;
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no `musterd dev` is running, and no database.url is given"), "{said}");
    assert!(said.contains("localhost:5432") && said.lines().count() == 1, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigkill_the_server_goes_and_the_next_start_has_the_data() {
    let home = Home::new();
    let rows = home.0.join("rows.ndjson");
    fs::write(&rows, "1\n2\n3\n").unwrap();
    let dev = home.start(&[]);
    dev.url().await;
    let (server, file) = (dev.server().await, rows.to_str().unwrap());
    let submitted = home.musterd(&["submit", file, "--command", "noop", "--hold", "--json"]).await;
    assert!(submitted.status.success(), "{submitted:?}");
    let id = json(&submitted)["id"].to_string();

    dev.process.signal(Signal::KILL);
    assert_eq!(dev.process.wait_exit(SOON).await.signal(), Some(Signal::KILL.as_raw()));
    // At once: the old server may still be ending.
    let again = home.start(&[]);
    again.url().await;
    assert!(!process_runs(server));
    let batch = json(&home.musterd(&["batch", "show", &id, "--json"]).await);
    assert_eq!((&batch["rows"], &batch["state"]), (&3.into(), &"held".into()));
    again.process.signal(Signal::INT);
    again.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_one_leaves_nothing() {
    let home = Home::new();
    // Another test's dev may have the usual port, and give it up at any moment: it must be ours to be taken for sure.
    let _usual = eventually(SOON, "the usual port is ours", async || {
        std::net::TcpListener::bind("127.0.0.1:9464").ok()
    })
    .await;
    let dev = home.start(&["--ephemeral"]);
    let url = dev.url().await;
    let health = dev.process.out.wait_for(SOON, |line| line.starts_with("health ")).await;
    assert!(health.contains("http://127.0.0.1:") && !health.contains(":9464/"), "{health}");
    let done = home.musterd(&["migrate"]).await;
    assert!(stdout(&done).starts_with("nothing to do"), "{url}: {done:?}");
    dev.process.signal(Signal::INT);
    dev.ends_well().await;
    assert!(!dev.dir.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_it_makes_the_database_leaves_nothing_running() {
    for signal in [Signal::TERM, Signal::KILL] {
        let home = Home::new();
        let dev = home.start(&[]);
        eventually(SOON, "initdb has begun", async || dev.dir.join("data.new").exists().then_some(())).await;
        dev.process.signal(signal);
        if signal == Signal::TERM {
            dev.ends_well().await;
        }
        dev.process.wait_exit(SOON).await;
        nothing_runs_on(&dev.dir).await;
        assert_eq!(dev.process.out.lines_from(0), Vec::<String>::new(), "it never was ready");
        let again = home.start(&[]);
        again.url().await;
        again.process.signal(Signal::TERM);
        again.ends_well().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_between_server_and_readiness_ends_both() {
    let home = Home::new();
    let dev = home.start(&["--ephemeral"]);
    dev.server().await;
    dev.process.signal(Signal::TERM);
    dev.ends_well().await;
    assert!(!dev.dir.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistake_in_the_configuration_is_told_before_anything_is_made() {
    let home = Home::new();
    let dev = home.start(&["--set", "batcher.max_sise=3"]);
    assert_eq!(dev.process.wait_exit(SOON).await.code(), Some(2));
    dev.process.err.wait_for(SOON, |line| line.contains("did you mean batcher.max_size?")).await;
    assert!(!dev.dir.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_its_server_ends_it_with_a_reason() {
    let home = Home::new();
    let dev = home.start(&["--ephemeral"]);
    dev.url().await;
    let server = i32::try_from(dev.server().await).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(server, Signal::QUIT).unwrap();
    assert_eq!(dev.process.wait_exit(SOON).await.code(), Some(1));
    dev.process.err.wait_for(SOON, |line| line.contains("the private PostgreSQL ended by itself")).await;
    nothing_runs_on(&dev.dir).await;
}
