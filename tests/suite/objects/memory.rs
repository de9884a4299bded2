//! Memory does not grow with what is written: measured in a process that does nothing else.

use std::process::Command;

use super::source::{MIB, Source, Then};
use super::{benches, key};

const SHORT: u64 = 40 * MIB;
const LONG: u64 = 80 * MIB;
/// How much more the long one may take: the allocator's slack. (The server lives in the same process.)
const ROOM: u64 = 24 * MIB;

#[test]
fn a_long_stream_is_written_in_constant_memory() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "suite::objects::memory::in_constant_memory", "--ignored"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "runs as a child of a_long_stream_is_written_in_constant_memory"]
async fn in_constant_memory() {
    for bench in benches().await {
        bench.store.put_stream(&key("short"), Source::new(SHORT, Then::End)).await.unwrap();
        let before = peak();
        bench.store.put_stream(&key("long"), Source::new(LONG, Then::End)).await.unwrap();
        let grown = peak() - before;
        println!("{} MiB for {:?}", grown / MIB, bench.store);
        assert!(grown < ROOM, "{} MiB for {:?}", grown / MIB, bench.store);
    }
}

/// The most memory this process has ever held.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
