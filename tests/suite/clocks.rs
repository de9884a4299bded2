//! S20: no decision uses a worker's clock, or what a role has by default.

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger};

const CONFIG: &str = "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"5s\"\nrecovery_interval = \"500ms\"\n\
                      rows_ttl = \"1m\"\nsettle = \"1s\"\n[handlers.sleep]\nduration = \"100ms\"";

/// Two hours between two workers, sessions serializable by default, and one of them dies.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_clocks_and_a_serializable_role_change_nothing() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let serializable =
        format!("ALTER DATABASE {:?} SET default_transaction_isolation = 'serializable'", db.name());
    ledger.client.batch_execute(&serializable).await.unwrap();
    let Some(library) = faketime() else {
        assert!(std::env::var_os("CI").is_none(), "libfaketime is missing: make setup-test");
        println!(
            "SKIPPED the wrong clocks: libfaketime is not installed (Debian: apt-get install libfaketime)"
        );
        return works(&ledger, [Daemon::builder(&db, CONFIG).start(), Daemon::builder(&db, CONFIG).start()])
            .await;
    };
    let off = |by: &str| {
        Daemon::builder(&db, CONFIG)
            .env("LD_PRELOAD", &library)
            .env("FAKETIME", by)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start()
    };
    works(&ledger, [off("+1h"), off("-1h")]).await;
}

fn faketime() -> Option<String> {
    let places =
        ["/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib64/faketime"];
    places
        .iter()
        .map(|dir| format!("{dir}/libfaketime.so.1"))
        .find(|path| std::path::Path::new(path).exists())
}

async fn works(ledger: &Ledger, [one, other]: [Daemon; 2]) {
    one.wait_ready().await;
    other.wait_ready().await;
    // Longer than the TTL: whoever judged by its own clock would have found the other dead.
    let batch = ledger.submit("sleep", 1200).await;
    assert_eq!(ledger.end_of(batch, SOON * 2).await, End::succeeded(1200));
    assert_eq!((ledger.dead().await, ledger.claimed_again().await), (0, 0));
    let both = "SELECT count(DISTINCT worker) FROM public.claims";
    assert_eq!(ledger.number(both).await, 2);

    let batch = ledger.submit("sleep", 400).await;
    ledger.has_results(batch, 50, SOON).await;
    let worker = ledger.worker_of(&one).await;
    one.signal(Signal::KILL);
    ledger.worker_is(&worker, "dead", SOON).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(400));
    assert_eq!((ledger.dead().await, ledger.deadlocks().await), (1, 0));
}

/// A server's clock that is set forward makes every worker look silent, the judges as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_clock_that_is_set_forward_makes_no_worker_dead() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    // Judges look far more often than anyone beats, and there is no lock to speak for the living.
    let config = "[database]\npooler = \"transaction\"\n[liveness]\nheartbeat_interval = \"3s\"\nheartbeat_ttl = \"6s\"\n\
                  recovery_interval = \"100ms\"\nrows_ttl = \"1m\"\nsettle = \"100ms\"\n[handlers.sleep]\nduration = \"100ms\"";
    let daemons = [Daemon::builder(&db, config).start(), Daemon::builder(&db, config).start()];
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    // As the judges see it, an hour passes in a moment; and once it is only a little more than a worker may be silent.
    for jump in ["1 hour", "5 seconds", "1 hour", "5 seconds"] {
        let set =
            "UPDATE musterd.workers SET seen_at = seen_at - $1::text::interval WHERE musterd.is_alive(state)";
        ledger.client.execute(set, &[&jump]).await.unwrap();
        let beats = ledger.number("SELECT count(*) FROM public.beats").await;
        eventually(SOON, "everybody has beaten again", async || {
            (ledger.number("SELECT count(*) FROM public.beats").await >= beats + 5).then_some(())
        })
        .await;
        assert_eq!(ledger.dead().await, 0, "{jump}");
    }
    // Judges that judge: one that is gone is found.
    let [one, other] = daemons;
    let worker = ledger.worker_of(&one).await;
    one.signal(Signal::KILL);
    ledger.worker_is(&worker, "dead", SOON).await;
    drop(other);
}
