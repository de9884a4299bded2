//! What is left when the replicas have been asked to end: nothing that is theirs.

use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;

use super::super::world::World;
use super::{Figures, Findings};

/// The most memory that a replica may ever have used, in MiB.
const MEMORY: u64 = 1024;
const GRACE: Duration = Duration::from_secs(30);

pub(crate) async fn check(world: &World, findings: &mut Findings, figures: &mut Figures) -> Result<()> {
    for replica in &world.replicas {
        replica.want(false);
        let Some(pid) = replica.signal(Signal::TERM) else { continue };
        let number = replica.kind.number;
        match replica.wait_exit(pid, GRACE).await {
            Some(status) if status.success() => {}
            Some(status) => {
                findings.wrong.push(format!("replica {number} ended with {status} after SIGTERM"))
            }
            None => findings.stuck.push(format!("replica {number} is still there {GRACE:?} after SIGTERM")),
        }
    }
    let session = world.admin().await?;
    let owned = "SELECT (SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL) + (SELECT count(*) FROM musterd.task_claims)";
    let owned: i64 = session.query_one(owned, &[]).await?.get(0);
    if owned > 0 {
        findings.wrong.push(format!("{owned} blocks and claims are owned by replicas that have ended well"));
    }
    let connections = "SELECT count(*) FROM pg_stat_activity
                        WHERE datname = current_database() AND application_name LIKE 'musterd%' AND backend_type = 'client backend'";
    let mut open: i64 = 0;
    for _ in 0..50 {
        open = session.query_one(connections, &[]).await?.get(0);
        if open == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // PgBouncer keeps its own for a while.
    figures.insert("connections left".into(), open.into());
    let programs = programs_left();
    figures.insert("programs left".into(), programs.len().into());
    if !programs.is_empty() {
        findings.wrong.push(format!("programs of handlers are left: {programs:?}"));
    }
    let mut files = 0;
    for replica in &world.replicas {
        files += std::fs::read_dir(replica.dir.join("tmp"))?.count();
    }
    figures.insert("temporary files left".into(), files.into());
    let memory = world.replicas.iter().map(|replica| replica.memory()).max().unwrap_or(0);
    figures.insert("most memory of a replica, MiB".into(), memory.into());
    if memory > MEMORY {
        findings.wrong.push(format!("a replica used {memory} MiB"));
    }
    for replica in &world.replicas {
        let panics = replica.log().lines().filter(|line| is_panic(line)).count();
        if panics > 0 {
            findings
                .wrong
                .push(format!("replica {} panicked {panics} times: see its log", replica.kind.number));
        }
        let ends = replica.ends.lock().unwrap();
        figures.insert(format!("replica {} ended by itself", replica.kind.number), ends.len().into());
    }
    Ok(())
}

/// Rows of `panics` do so on purpose, and their panics are caught.
fn is_panic(line: &str) -> bool {
    line.contains("panicked")
        && !line.contains("was asked to fail")
        && !line.contains("src/handler/builtin.rs")
}

/// Processes of handlers, which carry our name and their word.
fn programs_left() -> Vec<String> {
    let ours = std::env::current_exe().unwrap_or_default();
    let mut left = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        if command.contains(" __exec ") && command.starts_with(&*ours.to_string_lossy()) {
            left.push(command);
        }
    }
    left
}
