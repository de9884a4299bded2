//! The container, as a runtime would start it: process 1 of its own, not root, on a root that nobody can write.
//!
//! `make image` builds the real image and runs this on it. Otherwise a stand-in is made of the binary under test and the
//! libraries it needs, which the image's static binary does without.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use musterd::tether::Tether;
use rustix::process::{Pid, Signal, kill_process};

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::{Log, http_get};
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::run_it;
use crate::suite::support::run;
use crate::suite::support::wait::eventually;
use crate::suite::support::work::Ledger;

const SOON: Duration = Duration::from_secs(60);

/// What a runtime does: a read-only root, a scratch directory, the devices that every container has, process 1, the user of
/// the Dockerfile, no new privileges. What is mounted keeps the options it has: only root may take them away.
const RUNTIME: &str = r#"
set -e
mount --bind "$ROOT" "$ROOT"
options=$(findmnt -no VFS-OPTIONS --mountpoint "$ROOT" | sed 's/^rw/ro/')
mount -t tmpfs devices "$ROOT/dev"
for device in null zero full random urandom tty; do
    touch "$ROOT/dev/$device"
    mount --bind "/dev/$device" "$ROOT/dev/$device"
done
mount -t tmpfs -o "uid=$OWNER,gid=$OWNER,mode=0750" scratch "$ROOT/var/lib/musterd"
mount -t proc proc "$ROOT/proc"
mount -o "remount,bind,$options" "$ROOT"
exec setpriv --no-new-privs $ENTER /musterd "$@"
"#;

/// Who makes the namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Root,
    /// Anybody, in a namespace of users: root in it is he himself outside, and so is, one further in, 65532.
    Anybody,
}

impl Maker {
    /// `None`: the kernel, or what we run in, does not let this user have them.
    fn find() -> Option<Self> {
        let maker = if rustix::process::geteuid().is_root() { Self::Root } else { Self::Anybody };
        let mut probe = maker.command("mount -t proc proc /proc && $ENTER true", Path::new("/"));
        let may = probe.output().is_ok_and(|output| output.status.success());
        if !may {
            println!("SKIPPED: no namespaces for this user");
        }
        may.then_some(maker)
    }

    fn command(self, script: &str, root: &Path) -> Command {
        let (namespaces, owner, enter) = match self {
            Self::Root => ("-mpf", "65532", "chroot --userspec=65532:65532"),
            Self::Anybody => ("-Urmpf", "0", "unshare -U --map-user=65532 --map-group=65532 --wd=/ --root"),
        };
        let mut command = Command::new("unshare");
        command.args([namespaces, "--kill-child", "sh", "-c", script, "sh"]);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("ROOT", root).env("OWNER", owner).env("ENTER", format!("{enter} {}", root.display()));
        command
    }

    /// The user of a process as the container sees it.
    fn user_of(self, process: Pid) -> String {
        let file = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", process.as_raw_nonzero())).unwrap()
        };
        let (status, map) = (file("status"), file("uid_map"));
        let outside = status.lines().find_map(|line| line.strip_prefix("Uid:\t")).unwrap();
        match self {
            Self::Root => outside.split('\t').next().unwrap().to_owned(),
            Self::Anybody => map.split_whitespace().next().unwrap().to_owned(),
        }
    }
}

/// A root file system to start from: that of the image, or one that serves as well.
fn root_file_system() -> PathBuf {
    let dir = run::new_dir("container");
    match std::env::var_os("MUSTERD_TEST_ROOTFS") {
        Some(image) => drop(run_it(Command::new("cp").arg("-a").arg(Path::new(&image).join(".")).arg(&dir))),
        None => stand_in(&dir),
    }
    for mount in ["dev", "proc", "etc/musterd", "var/lib/musterd"] {
        std::fs::create_dir_all(dir.join(mount)).unwrap();
    }
    // The runtime's part: names, and the configuration.
    std::fs::write(dir.join("etc/hosts"), "127.0.0.1 localhost database\n").unwrap();
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
    dir
}

fn stand_in(dir: &Path) {
    let binary = env!("CARGO_BIN_EXE_musterd");
    std::fs::copy(binary, dir.join("musterd")).unwrap();
    let listed = run_it(Command::new("ldd").arg(binary)).stdout;
    let listed = String::from_utf8(listed).unwrap();
    for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let copy = dir.join(&library[1..]);
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::copy(library, copy).unwrap();
    }
}

/// The first process of the container, as this side numbers it.
async fn first_process(runtime: u32) -> Pid {
    let file = format!("/proc/{runtime}/task/{runtime}/children");
    eventually(SOON, "the container's first process is there", async || {
        let children = std::fs::read_to_string(&file).ok()?;
        Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn as_process_1_without_rights_on_a_read_only_root_it_works_and_drains() {
    let Some(maker) = Maker::find() else { return };
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let dir = root_file_system();
    let toml = format!(
        "[database]\nurl = {:?}\n[handlers.sleep]\nduration = \"20ms\"\n[log]\nformat = \"json\"",
        db.url().replace("127.0.0.1", "database")
    );
    let config = TestConfig::new(&db, &toml);
    std::fs::copy(config.file(), dir.join("etc/musterd/musterd.toml")).unwrap();

    let mut command = maker.command(RUNTIME, &dir);
    command.args(["run", "--config", "/etc/musterd/musterd.toml"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tether = Tether::spawn(command, Signal::KILL).unwrap();
    let log = Log::default();
    log.follow("out", tether.stdout.take().unwrap());
    log.follow("err", tether.stderr.take().unwrap());
    let ready = async || {
        http_get(config.http_port(), "/readyz").await.is_ok_and(|(status, _)| status == 200).then_some(())
    };
    eventually(SOON, "the container is ready", async || {
        assert!(tether.status().is_none(), "it ended: {:?}", log.lines_from(0));
        ready().await
    })
    .await;

    let process = first_process(tether.pid()).await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).unwrap();
    let line = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("NSpid:").ends_with("\t1"), "{}", line("NSpid:"));
    assert_eq!(maker.user_of(process), "65532");
    assert_eq!(line("CapEff:"), "CapEff:\t0000000000000000");
    let mounts = std::fs::read_to_string(format!("/proc/{}/mounts", process.as_raw_nonzero())).unwrap();
    let of_root = mounts.lines().find(|line| line.split(' ').nth(1) == Some("/")).unwrap();
    assert!(of_root.split(' ').nth(3).unwrap().split(',').any(|option| option == "ro"), "{of_root}");

    let batch = ledger.submit("sleep", 2_000).await;
    ledger.has_results(batch, 100, SOON).await;
    kill_process(process, Signal::TERM).unwrap();
    let wait = tether.waiter();
    let ended = tokio::task::spawn_blocking(move || wait(SOON)).await.unwrap().expect("it drains");
    assert!(ended.success(), "{ended}: {:?}", log.lines_from(0));
    assert_eq!((ledger.owned().await, ledger.dead().await), (0, 0));
    let again = "SELECT count(*) FROM musterd.results WHERE attempt <> 1";
    assert_eq!(ledger.number(again).await, 0);
}
