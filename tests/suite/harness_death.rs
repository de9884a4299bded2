//! Nothing stays when the test process is killed. The process that is killed is this very program, started again.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use musterd::embedded::{EmbeddedPostgres, Options};
use musterd::tether::Tether;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;

use crate::suite::support::wait::{SOON, eventually, process_runs};
use crate::suite::support::{run, services};

/// Set in the process that is to be killed; says what it is to own.
const ROLE: &str = "MUSTERD_SUITE_ROLE";
const MARK: &str = "OWNED ";

/// What a process has started.
#[derive(Debug, Deserialize, Serialize)]
struct Owned {
    pids: Vec<u32>,
    dir: PathBuf,
}

/// Does nothing unless it is started by the tests below.
#[test]
fn the_process_that_is_killed() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let _kept;
    let owned = match role.strip_prefix("postgres ") {
        Some(dir) => {
            let server = EmbeddedPostgres::start(Options::kept(dir).setting("fsync", "off")).unwrap();
            let owned = Owned { pids: vec![server.pid()], dir: dir.into() };
            _kept = server;
            owned
        }
        None => {
            services::s3().new_bucket();
            let pids = vec![services::postgres().pid(), services::redis().pid(), run::watchdog_pid()];
            Owned { pids, dir: run::dir().into() }
        }
    };
    println!("\n{MARK}{}", serde_json::to_string(&owned).unwrap());
    loop {
        std::thread::park();
    }
}

/// Starts this program again in `role` and waits until it owns something.
fn start(role: &str) -> (Tether, Owned) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "suite::harness_death::the_process_that_is_killed", "--nocapture"])
        .env(ROLE, role);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = Tether::spawn(command, Signal::KILL).unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let owned = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix(MARK)?.to_owned()));
    let owned: Owned = serde_json::from_str(&owned.expect("the process says what it owns")).unwrap();
    assert!(owned.pids.iter().all(|pid| process_runs(*pid)), "{owned:?}");
    (process, owned)
}

async fn all_end(owned: &Owned) {
    eventually(SOON, &format!("all of it ends: {owned:?}"), async || {
        owned.pids.iter().all(|pid| !process_runs(*pid)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_and_files_of_a_killed_run_disappear() {
    let (process, owned) = start("run");
    assert!(owned.dir.join("s3").exists());
    process.signal(Signal::KILL).unwrap();
    all_end(&owned).await;
    assert!(!owned.dir.exists(), "{owned:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_of_a_killed_owner_ends_and_the_next_owner_starts() {
    let root = tempfile::tempdir().unwrap();
    open_to_all(root.path());
    let dir = root.path().join("dev");
    let role = format!("postgres {}", dir.display());
    let (process, owned) = start(&role);
    process.signal(Signal::KILL).unwrap();
    all_end(&owned).await;

    let (process, owned) = start(&role);
    process.signal(Signal::KILL).unwrap();
    process.wait(SOON).unwrap();
    // Not waiting for the old server's end: the new owner does that.
    let server = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(Options::kept(dir)).unwrap());
    let server = server.await.unwrap();
    all_end(&owned).await;
    let (client, connection) = tokio_postgres::connect(server.url(), NoTls).await.unwrap();
    let answer = async { client.query_one("SELECT 1", &[]).await.unwrap().get::<_, i32>(0) };
    tokio::select! {
        answer = answer => assert_eq!(answer, 1),
        ended = connection => panic!("{ended:?}"),
    }
    tokio::task::spawn_blocking(move || server.stop().unwrap()).await.unwrap();
}

/// The server's user must get through, when the tests are run by root.
fn open_to_all(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
}
