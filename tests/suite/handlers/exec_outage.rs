//! `exec`: what is the program's own fault, or that of the watch, costs no row an attempt, and everything else goes on.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::exec_death::{BROOD, all_gone, brood};
use super::{SOON, Site, all_succeeded, exec_config, python};
use crate::suite::support::config;
use crate::suite::support::run;
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::ask;

/// The watch of a daemon.
async fn watch_of(daemon: u32) -> u32 {
    eventually(SOON, "there is a watch", async || children(daemon).into_iter().find(|pid| is_watch(*pid)))
        .await
}

fn is_watch(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0__watch\0"))
}

pub(super) fn children(parent: u32) -> Vec<u32> {
    let number = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok()) == Some(parent)
    };
    std::fs::read_dir("/proc").unwrap().filter_map(number).filter(is_child).collect()
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
}

/// Waits until `musterd why` names this.
async fn why_says(site: &Site, batch: i64, words: &str) -> String {
    eventually(SOON, words, async || {
        let output = site.daemon.config().musterd(&["why", "batch", &batch.to_string()]).await;
        Some(config::stdout(&output)).filter(|said| said.contains(words))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_watch_fails_no_row_and_the_next_one_knows_who_lives() {
    let other = exec_config(&python(""), "processes = 1\n").replace("handlers.work", "handlers.quick");
    let site = Site::start(&format!("{}{other}", exec_config(&python(BROOD), ""))).await;
    site.submit_rows("work", &json!([{ "n": 1 }])).await;
    let living = brood(&site).await;
    let watch = watch_of(site.daemon.pid()).await;
    kill(watch);
    // Programs are started while there is no watch, and after.
    let rows = site.run("quick", 20).await;
    all_succeeded(&rows, 20);
    assert!(rows.iter().all(|row| row.attempt == 1), "{rows:?}");
    site.daemon
        .wait_for_log(SOON, |line| line.contains("the watch of the handlers' programs has ended"))
        .await;
    let next = eventually(SOON, "there is another watch", async || {
        children(site.daemon.pid()).into_iter().find(|pid| *pid != watch && is_watch(*pid))
    })
    .await;
    assert_eq!(site.daemon.get("/readyz").await.unwrap().0, 200);
    // Its list is written a moment after it is there.
    site.run("quick", 1).await;
    site.daemon.signal(Signal::KILL);
    all_gone(&living).await;
    all_gone(&[next]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_not_there_yet_costs_no_attempt_and_why_names_it() {
    let dir = run::new_dir("later");
    let file = dir.join("tool");
    let handlers = format!(
        "[handlers.work]\nkind = \"exec\"\nargv = [{:?}]\n[queues.default]\nfibers = 1\n",
        file.display().to_string()
    );
    let site = Site::start(&handlers).await;
    let batch = site.submit("work", 3_000).await;
    let task = "SELECT musterd.enqueue('work', '{\"n\": 7}')";
    let task: i64 = ask(&site.client, task).await;
    let said = why_says(&site, batch, "cannot start").await;
    assert!(said.contains(&file.display().to_string()) && said.contains("no attempt is charged"), "{said}");
    // Its only fiber serves others, and the batch is not cut up into blocks that all wait.
    all_succeeded(&site.run("noop", 50).await, 50);
    assert!(ask::<i64>(&site.client, "SELECT count(*) FROM musterd.blocks").await < 20);
    let state = format!("SELECT error LIKE 'cannot start%' FROM musterd.tasks WHERE id = {task}");
    eventually(SOON, "the task waits, too", async || {
        ask::<Option<bool>>(&site.client, &state).await.filter(|waits| *waits)
    })
    .await;
    install(&file);
    let rows = site.ended(batch).await;
    all_succeeded(&rows, 3_000);
    assert!(rows.iter().all(|row| row.attempt == 1));
    let state = format!("SELECT state::text FROM musterd.tasks WHERE id = {task}");
    eventually(SOON, "the task runs", async || {
        (ask::<String>(&site.client, &state).await == "succeeded").then_some(())
    })
    .await;
}

/// Makes a program that works.
fn install(file: &Path) {
    let text = std::fs::read_to_string(python("")).unwrap();
    let new = file.with_extension("new");
    std::fs::write(&new, format!("#!/usr/bin/env python3\n{text}")).unwrap();
    std::fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::rename(new, file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_dies_with_every_row_before_its_first_reply_charges_none() {
    let healed = run::new_dir("healed").join("healed");
    // It reads, and then finds that something it needs is missing.
    let body = format!(
        "if not os.path.exists({healed:?}):\n    sys.stderr.write('no licence\\n')\n    sys.exit(3)",
        healed = healed.display().to_string()
    );
    let site = Site::start(&exec_config(&python(&body), "[queues.default]\nfibers = 2\n")).await;
    let batch = site.submit("work", 40).await;
    let said = why_says(&site, batch, "exit status 3").await;
    assert!(said.contains("no licence"), "{said}");
    assert_eq!(ask::<i64>(&site.client, "SELECT count(*) FROM musterd.failures").await, 0);
    std::fs::write(&healed, "").unwrap();
    let rows = site.ended(batch).await;
    all_succeeded(&rows, 40);
    assert!(rows.iter().all(|row| row.attempt == 1), "{rows:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_row_that_kills_its_program_fails_and_the_others_prove_that_it_works() {
    let file = python("if n == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)");
    let site = Site::start(&exec_config(&file, "processes = 1\n[queues.default]\nfibers = 1\n")).await;
    let rows = site.run("work", 10).await;
    assert_eq!((rows[0].state.as_str(), rows[0].attempt), ("failed", 3));
    assert!(rows[0].error.contains("signal 11"), "{rows:?}");
    all_succeeded(&rows[1..], 9);
    assert!(rows[1..].iter().all(|row| row.attempt == 1), "{rows:?}");
}
