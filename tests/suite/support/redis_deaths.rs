//! One Redis Cluster for all tests of a run, whose masters die one after another for as long as the run lasts.
//!
//! Only with `make test-cluster`: it keeps six servers busy beside the tests.

use std::io::Write;
use std::path::Path;
use std::sync::{LazyLock, mpsc};
use std::time::Duration;

use super::redis::Maker;
use super::redis_kinds::Cluster;

/// All is well for this long between two deaths.
const PEACE: Duration = Duration::from_secs(1);

/// How to get to it.
pub(crate) fn url() -> &'static str {
    static URL: LazyLock<String> = LazyLock::new(|| {
        let (report, url) = mpsc::channel();
        // A thread and a runtime of its own: those of the test that happens to ask first end with that test.
        std::thread::Builder::new().name("redis-deaths".into()).spawn(move || reign(report)).unwrap();
        url.recv().expect("the cluster starts")
    });
    &URL
}

fn reign(report: mpsc::Sender<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(kill(report))));
    let _ = writeln!(std::io::stderr(), "the Redis Cluster of this run broke down: {unwound:?}");
    #[expect(clippy::disallowed_methods, reason = "without deaths the tests would prove nothing, and pass")]
    std::process::exit(1);
}

async fn kill(report: mpsc::Sender<String>) {
    let mut cluster = Cluster::start(Maker::Redis, 1).await;
    report.send(cluster.url()).unwrap();
    loop {
        tokio::time::sleep(PEACE).await;
        let port = cluster.replace_a_master().await;
        count(port);
    }
}

/// A line for each death. The test runner says no last words, so whoever started it counts them.
fn count(port: u16) {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("redis-failovers");
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    writeln!(file, "the master on port {port} died and was replaced").unwrap();
}
