//! No program outlives musterd, and no program's program does, however musterd dies.

use rustix::process::Signal;
use serde_json::json;

use super::{SOON, Site, exec_config, python};
use crate::suite::support::wait::{eventually, process_runs};

/// Starts a grandchild that would sleep on, and never answers row 1.
pub(super) const BROOD: &str = "child = subprocess.Popen(['sleep', '600'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n\
     open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n\
     os.rename('pids', 'ready')\n\
     time.sleep(600)";

pub(super) async fn brood(site: &Site) -> Vec<u32> {
    let file = site.daemon.config().dir().join("ready");
    eventually(SOON, "the program has started its own", async || {
        let text = std::fs::read_to_string(&file).ok()?;
        let pids: Vec<u32> = text.split(' ').map(|pid| pid.parse().unwrap()).collect();
        assert!(pids.iter().all(|pid| process_runs(*pid)), "{pids:?}");
        Some(pids)
    })
    .await
}

pub(super) async fn all_gone(pids: &[u32]) {
    eventually(SOON, "nobody is left", async || pids.iter().all(|pid| !process_runs(*pid)).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigkill_of_musterd_leaves_no_child_and_no_grandchild() {
    let site = Site::start(&exec_config(&python(BROOD), "")).await;
    site.submit_rows("work", &json!([{ "n": 1 }])).await;
    let pids = brood(&site).await;
    site.daemon.signal(Signal::KILL);
    all_gone(&pids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_ends_the_grandchildren_too() {
    let site = Site::start(&exec_config(&python(BROOD), "").replace("30s", "2s")).await;
    site.submit_rows("work", &json!([{ "n": 1 }])).await;
    let pids = brood(&site).await;
    all_gone(&pids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_leaves_nobody_either() {
    let site = Site::start(&exec_config(&python(BROOD), "[shutdown]\ngrace = \"200ms\"\n")).await;
    site.submit_rows("work", &json!([{ "n": 1 }])).await;
    let pids = brood(&site).await;
    site.daemon.signal(Signal::TERM);
    assert!(site.daemon.wait_exit(SOON).await.success());
    all_gone(&pids).await;
    let owned: i64 = site
        .client
        .query_one("SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(owned, 0);
}
