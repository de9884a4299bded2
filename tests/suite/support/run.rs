//! One run of the suite: its temporary directory, and the watchdog that clears up after it however it ends.
//!
//! The test runner never drops statics and can be killed, so clearing up cannot be left to this process. A small
//! shell reads a pipe that only we hold open; when it closes, we are gone.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

/// The shell kills what it was told of, waits for the end of it, and removes what it was told of.
const WATCHDOG: &str = r#"
pids= ; dir=
while read -r verb argument; do
    case $verb in
        kill) pids="$pids $argument" ;;
        forget) pids=$(for pid in $pids; do [ "$pid" = "$argument" ] || echo "$pid"; done) ;;
        remove) dir=$argument ;;
    esac
done
# A zombie answers to its number until somebody reaps it, and has nothing left to wait for.
runs() { kill -0 "$1" 2>/dev/null && ! grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
for pid in $pids; do kill -QUIT "$pid" 2>/dev/null; done
tries=0
while [ $tries -lt 100 ]; do
    alive=
    for pid in $pids; do runs "$pid" && alive="$alive $pid"; done
    [ -z "$alive" ] && break
    [ $tries -gt 50 ] && kill -KILL $alive 2>/dev/null
    tries=$((tries + 1))
    sleep 0.1
done
[ -n "$dir" ] || exit
# The small disks of a torture are mounted where only it and we see them.
for disk in "$dir"/disk-*; do [ -d "$disk" ] && umount "$disk" 2>/dev/null; done
rm -rf "$dir"
"#;

struct Run {
    dir: PathBuf,
    watchdog: Mutex<ChildStdin>,
    watchdog_pid: u32,
}

static RUN: LazyLock<Run> = LazyLock::new(|| {
    let dir = tempfile::Builder::new().prefix("musterd-suite-").tempdir().unwrap().keep();
    // The PostgreSQL of a run by root has a user of its own, who must get through.
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o711)).unwrap();
    #[expect(clippy::zombie_processes, reason = "it outlives us: our end is what it waits for")]
    let mut shell = Command::new("sh")
        .args(["-c", WATCHDOG])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Out of reach of Ctrl-C, which ends us and leaves it to clear up.
        .process_group(0)
        .current_dir("/")
        .spawn()
        .unwrap();
    let run = Run { dir, watchdog: Mutex::new(shell.stdin.take().unwrap()), watchdog_pid: shell.id() };
    tell(&run, &format!("remove {}", run.dir.display()));
    run
});

/// The directory of this run; removed at its end.
pub(crate) fn dir() -> &'static Path {
    &RUN.dir
}

/// The process that clears up.
pub(crate) fn watchdog_pid() -> u32 {
    RUN.watchdog_pid
}

/// Has process `pid` killed at the end of the run.
pub(crate) fn kill_at_end(pid: u32) {
    tell(&RUN, &format!("kill {pid}"));
}

/// Process `pid` has ended: its number may become somebody else's.
pub(crate) fn forget(pid: u32) {
    tell(&RUN, &format!("forget {pid}"));
}

/// A word that no other test of this run has, fit for a database, a bucket or a key.
pub(crate) fn unique(what: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{what}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A new empty directory of this run.
pub(crate) fn new_dir(what: &str) -> PathBuf {
    let dir = dir().join(unique(what));
    std::fs::create_dir(&dir).unwrap();
    dir
}

fn tell(run: &Run, line: &str) {
    writeln!(run.watchdog.lock().unwrap(), "{line}").unwrap();
}
