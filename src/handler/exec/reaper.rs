//! Process 1 inherits what the programs' own programs leave behind: dead children that no process waits for are reaped.
//!
//! Children of ours are waited for by their own threads, at once; what is still a zombie at the second look is an orphan.

#[cfg(target_os = "linux")]
use rustix::process::{Pid, WaitId, WaitIdOptions};
#[cfg(target_os = "linux")]
use std::{collections::HashSet, time::Duration};

/// Time between two looks.
#[cfg(target_os = "linux")]
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts to reap, if orphans come to this process at all.
#[cfg(target_os = "linux")]
pub fn start() {
    let is_first = rustix::process::getpid() == Pid::INIT;
    let is_subreaper = matches!(rustix::process::child_subreaper(), Ok(Some(_)));
    if !is_first && !is_subreaper {
        return;
    }
    let started = std::thread::Builder::new().name("reaper".into()).spawn(|| {
        let mut seen = HashSet::new();
        loop {
            std::thread::park_timeout(LOOK_EVERY);
            seen = reap(&seen);
        }
    });
    if let Err(error) = started {
        tracing::warn!(%error, "orphans are not reaped: zombies may gather until the limit of processes is met");
    }
}

#[cfg(not(target_os = "linux"))]
pub fn start() {}

/// Reaps zombies that were there at the last look, too. Those that are new now are returned.
#[cfg(target_os = "linux")]
fn reap(seen: &HashSet<(i32, u64)>) -> HashSet<(i32, u64)> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // One system call says that there is nothing to look for.
    if !matches!(rustix::process::waitid(WaitId::All, options), Ok(Some(_))) {
        return HashSet::new();
    }
    let mut new = HashSet::new();
    for zombie in zombies() {
        let Some(pid) = Pid::from_raw(zombie.0).filter(|pid| !super::watch::knows(*pid)) else { continue };
        if seen.contains(&zombie) {
            // Reaped by another thread meanwhile is fine.
            let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        } else {
            new.insert(zombie);
        }
    }
    new
}

/// Our children that have ended and are not reaped: number and beginning.
#[cfg(target_os = "linux")]
fn zombies() -> Vec<(i32, u64)> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let of = |number: i32| {
        let line = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // Behind the name, which may hold anything: state, parent, and, 19 further than the state, the beginning.
        let fields: Vec<&str> = line.rsplit_once(')')?.1.split_whitespace().collect();
        let is_ours = *fields.first()? == "Z" && fields.get(1)?.parse() == Ok(own);
        is_ours.then_some((number, fields.get(19)?.parse().ok()?))
    };
    numbers.filter_map(of).collect()
}
