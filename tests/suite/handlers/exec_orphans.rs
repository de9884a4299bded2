//! As process 1 of a container, musterd inherits what its programs leave behind, and reaps it.

use std::process::{Command, Stdio};

use musterd::tether::Tether;
use rustix::process::{Pid, Signal, kill_process};

use super::exec_outage::children;
use super::{SOON, all_succeeded, ended, exec_config, python, submit_rows};
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Log;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;

/// What makes process 1 of the command behind it, as root or as an ordinary user.
const NAMESPACE: [&str; 3] = ["--fork", "--mount-proc", "--kill-child"];

fn namespace() -> Option<Vec<&'static str>> {
    let user = if rustix::process::geteuid().is_root() { "--pid" } else { "-Urp" };
    let arguments: Vec<&str> = [user].into_iter().chain(NAMESPACE).collect();
    let may = Command::new("unshare").args(&arguments).arg("true").output();
    let may = may.is_ok_and(|output| output.status.success());
    if !may {
        println!("SKIPPED: no namespaces for this user");
    }
    may.then_some(arguments)
}

fn zombies_of(parent: u32) -> usize {
    let is_zombie = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
    };
    children(parent).iter().filter(|pid| is_zombie(pid)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_reaped_by_process_1() {
    let Some(arguments) = namespace() else { return };
    let db = TestDb::new().await;
    // Each leaves one behind that ends when its parent does not wait for it any more.
    let file = python(
        "subprocess.run(['sh', '-c', 'setsid sleep 0.1 & exit'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    );
    let config = TestConfig::new(&db, &exec_config(&file, "processes = 1\n"));
    let inner = config.command(&["run"]);
    let mut command = Command::new("unshare");
    command.args(arguments).arg(inner.get_program()).args(inner.get_args());
    command.env_clear().envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("PATH", std::env::var_os("PATH").unwrap()).current_dir(inner.get_current_dir().unwrap());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut runtime = Tether::spawn(command, Signal::KILL).unwrap();
    let log = Log::default();
    log.follow("out", runtime.stdout.take().unwrap());
    log.follow("err", runtime.stderr.take().unwrap());
    let client = db.client().await;
    let rows: Vec<i32> = (1..=60).collect();
    let batch =
        submit_rows(&client, "work", &rows.iter().map(|n| serde_json::json!({ "n": n })).collect()).await;
    all_succeeded(&ended(&client, batch).await, 60);
    let musterd = children(runtime.pid())[0];
    eventually(SOON, "the orphans are reaped", async || {
        (children(musterd).len() < 10 && zombies_of(musterd) == 0).then_some(())
    })
    .await;
    // Our own children still work, and are waited for as before.
    let batch = submit_rows(&client, "work", &serde_json::json!([{ "n": 1 }])).await;
    all_succeeded(&ended(&client, batch).await, 1);
    // unshare itself ignores the signal.
    kill_process(Pid::from_raw(musterd.cast_signed()).unwrap(), Signal::TERM).unwrap();
    let ended = runtime.wait(SOON);
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}
