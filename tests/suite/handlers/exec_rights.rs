//! `exec`: what a program may read, become and use up, and how long it lives.

use std::collections::HashSet;
use std::path::Path;

use serde_json::{Value, json};

use super::exec_outage::children;
use super::{Ended, SOON, Site, all_succeeded, exec_config, program, python};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::eventually;

const ALONE: &str = "processes = 1\n[queues.default]\nfibers = 1\n";

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: only root can start programs as another user");
    }
    root
}

fn result(rows: &[Ended]) -> &Value {
    rows[0].result.as_ref().unwrap_or_else(|| panic!("{rows:?}"))
}

/// Everything about its parent that a program could look at, as far as it can be read.
const SPY: &str = "import glob\n\
     found = b''\n\
     for name in ['environ', 'mem', 'maps', 'auxv', 'fd/0']:\n\
     \x20   try:\n        found += open(f'/proc/{os.getppid()}/{name}', 'rb').read(100000)\n\
     \x20   except OSError as error:\n        found += type(error).__name__.encode()\n\
     reply['result'] = {'secret': b'canary' in found, 'found': found.decode('latin1')[:300].replace('\\0', ' '), 'uid': os.getuid(), 'groups': os.getgroups()}";

/// The program must be read by another user than the one that runs the tests.
fn open_to_all(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    for dir in file.ancestors().take_while(|dir| *dir != Path::new("/")) {
        // Not all of them are ours.
        if let Ok(found) = std::fs::metadata(dir) {
            let mode = found.permissions().mode() | if found.is_dir() { 0o755 } else { 0o644 };
            let _ = std::fs::set_permissions(dir, PermissionsExt::from_mode(mode));
        }
    }
}

/// A daemon with a secret in its environment, run as an ordinary user.
async fn start_as_nobody(config: &str) -> Site {
    let db = TestDb::new().await;
    let mut daemon =
        Daemon::builder(&db, &format!("{}{config}", super::QUICK)).env("MUSTERD_SUITE_SECRET", "canary");
    if rustix::process::geteuid().is_root() {
        open_to_all(daemon.config().file());
        std::fs::set_permissions(daemon.config().dir(), std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        daemon = daemon.shell("set -- setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"");
    }
    let daemon = daemon.start();
    daemon.wait_ready().await;
    Site { client: db.client().await, daemon, db }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_of_the_same_user_reads_none_of_our_secrets() {
    let file = python(SPY);
    open_to_all(&file);
    let site = start_as_nobody(&exec_config(&file, ALONE)).await;
    let rows = site.run("work", 1).await;
    let result = result(&rows);
    assert_ne!(result["uid"], json!(0), "the case that matters");
    assert_eq!(result["secret"], json!(false), "{result}");
    assert!(result["found"].as_str().unwrap().contains("PermissionError"), "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_runs_as_the_user_it_was_given_and_has_a_directory_of_its_own() {
    if !is_root() {
        return;
    }
    let body = format!(
        "{SPY}\nimport tempfile, resource\ntemp = tempfile.gettempdir()\nopen(temp + '/mine', 'w').close()\n\
         reply['result'].update(temp=temp, mode=oct(os.stat(temp).st_mode & 0o777), privs=open('/proc/self/status').read())"
    );
    let file = python(&body);
    open_to_all(&file);
    let site = Site::start(&exec_config(&file, &format!("user = \"nobody\"\n{ALONE}"))).await;
    let rows = site.run("work", 1).await;
    let result = result(&rows);
    assert_eq!((&result["uid"], &result["groups"]), (&json!(65534), &json!([])));
    assert_eq!((&result["secret"], &result["mode"]), (&json!(false), &json!("0o700")));
    assert!(result["privs"].as_str().unwrap().contains("NoNewPrivs:\t1"), "{result}");
    let temp = Path::new(result["temp"].as_str().unwrap()).to_owned();
    assert!(temp.join("mine").exists(), "{temp:?}");
    // Even when musterd is killed.
    site.daemon.signal(rustix::process::Signal::KILL);
    eventually(SOON, "it is removed", async || (!temp.exists()).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_cannot_be_had_stops_the_worker_and_says_so() {
    let db = TestDb::new().await;
    let config = exec_config(&python(""), "user = \"no-such-user\"\n");
    let daemon = Daemon::builder(&db, &config).start();
    assert!(!daemon.wait_exit(SOON).await.success());
    let log = daemon.log().join("\n");
    assert!(log.contains("handlers.work.user") && log.contains("no such user"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_the_kernel_are_kept() {
    let file = python(
        "import resource\n\
         of = lambda what: resource.getrlimit(what)[1]\n\
         reply['result'] = [of(resource.RLIMIT_CPU), of(resource.RLIMIT_NOFILE), of(resource.RLIMIT_FSIZE), of(resource.RLIMIT_NPROC)]\n\
         if n == 2:\n    while True:\n        pass",
    );
    let limits =
        "max_cpu_time = \"2s\"\nmax_open_files = 50\nmax_file_size = 1000\nmax_user_processes = 100000\n";
    let site = Site::start(&exec_config(&file, &format!("{limits}{ALONE}"))).await;
    let rows = site.run("work", 2).await;
    let limits: Vec<i64> = serde_json::from_value(result(&rows).clone()).unwrap();
    assert_eq!(limits[..3], [2, 50, 1000]);
    // Not above what musterd itself may have.
    assert!((1..=100_000).contains(&limits[3]), "{limits:?}");
    assert_eq!(rows[1].state, "failed");
    assert!(rows[1].error.contains("signal"), "{rows:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_are_replaced_after_so_many_requests_and_end_by_themselves() {
    // It says goodbye when its input ends, as a program should that was not killed.
    let done = run::new_dir("done");
    let text = std::fs::read_to_string(python("reply['result'] = os.getpid()")).unwrap();
    let file = program(&format!(
        "{text}open({:?} + str(os.getpid()), 'w').close()\n",
        format!("{}/", done.display())
    ));
    let site = Site::start(&exec_config(&file, &format!("max_requests = 10\n{ALONE}"))).await;
    let rows = site.run("work", 95).await;
    all_succeeded(&rows, 95);
    let pids: HashSet<i64> = rows.iter().map(|row| row.result.as_ref().unwrap().as_i64().unwrap()).collect();
    assert!(pids.len() >= 10, "{pids:?}");
    for pid in &pids {
        let given = rows.iter().filter(|row| row.result == Some(json!(pid))).count();
        assert!(given <= 10, "{given} rows for {pid}");
    }
    eventually(SOON, "nine have ended by themselves", async || {
        (std::fs::read_dir(&done).unwrap().count() >= 9).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_too_old_is_replaced() {
    let file = python("reply['result'] = os.getpid()");
    let site = Site::start(&exec_config(&file, &format!("max_age = \"1ms\"\n{ALONE}"))).await;
    let pids: HashSet<String> = [
        site.task("work", &json!({})).await.1.unwrap().to_string(),
        site.task("work", &json!({})).await.1.unwrap().to_string(),
    ]
    .into();
    assert_eq!(pids.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_that_keeps_stderr_open_keeps_nothing_of_ours() {
    let file = python(
        "child = subprocess.Popen(['sleep', '30'], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n\
         if row['attempt'] == 1:\n    print('noise')",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let open = || std::fs::read_dir(format!("/proc/{}/fd", site.daemon.pid())).unwrap().count();
    all_succeeded(&site.run("work", 1).await, 1);
    let before = open();
    all_succeeded(&site.run("work", 30).await, 30);
    eventually(SOON, "no pipes are left", async || (open() < before + 10).then_some(())).await;
    assert!(children(site.daemon.pid()).len() < 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_says_of_its_input_is_no_warning() {
    let file = python(
        "if n == 1:\n    print('canary-noise', flush=True)\n\
         if n == 2:\n    raise ValueError('canary-stderr')",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let rows = site.run("work", 3).await;
    // The row's own error has it: that is for those who may see the row.
    assert!(rows[0].error.contains("canary-noise") && rows[1].error.contains("canary-stderr"), "{rows:?}");
    let loud = |line: &&String| !line.contains("\"DEBUG\"") && !line.contains("the program says");
    let log = site.daemon.log();
    let told: Vec<&String> = log.iter().filter(loud).filter(|line| line.contains("canary")).collect();
    assert!(told.is_empty(), "{told:?}");
    assert!(log.iter().any(|line| line.contains("a process was replaced") && line.contains("exit status 1")));
}
