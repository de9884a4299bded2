//! S19: a row that kills its process is found and failed; those beside it only have to wait.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::SOON;
use crate::suite::support::work::{End, Ledger};

/// The share of rows at which `fail` chooses exactly the first of `batch`'s lines in its order.
fn rate_of_one(batch: i64, lines: i32) -> (f64, i32) {
    let place = |line: i32| {
        let mut mixed = (batch as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (line as u64);
        mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        mixed ^= mixed >> 33;
        mixed as f64 / u64::MAX as f64
    };
    let mut places: Vec<(f64, i32)> = (1..=lines).map(|line| (place(line), line)).collect();
    places.sort_by(|one, other| one.0.total_cmp(&other.0));
    (f64::midpoint(places[0].0, places[1].0), places[0].1)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_kills_its_process_fails_alone() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let batch = ledger.submit_block("fail", 500).await;
    let (rate, killer) = rate_of_one(batch, 500);
    let mut innocent = Vec::new();
    for _ in 0..20 {
        innocent.push(ledger.submit("sleep", 1).await);
    }
    let config = format!(
        "[liveness]\nsettle = \"200ms\"\n[handlers.fail]\nfailure = \"abort\"\nrate = {rate}\nduration = \"2ms\"\n\
         [handlers.sleep]\nduration = \"1s\""
    );
    let limit = Instant::now() + Duration::from_secs(240);
    let mut deaths = 0;
    let mut daemon = Daemon::builder(&db, &config).log("info").start();
    while ledger.end(batch).await.is_none() {
        assert!(Instant::now() < limit, "not over after {deaths} deaths");
        if daemon.has_ended() {
            deaths += 1;
            daemon = Daemon::builder(&db, &config).log("info").start();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("a row that aborts the process in a block of 500: failed after {deaths} deaths");
    let end = ledger.end_of(batch, Duration::from_secs(1)).await;
    assert_eq!(end, End { state: "failed".into(), succeeded: 499, failed: 1 });
    for batch in innocent {
        assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(1));
    }
    let row = ledger
        .client
        .query_one("SELECT line, error FROM musterd.results WHERE state = 'failed'", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i32>(0), killer);
    assert!(
        row.get::<_, String>(1).contains("died 3 times while it ran this row"),
        "{}",
        row.get::<_, String>(1)
    );
    // 500, 63, 8, 1: three deaths to find it, three alone.
    assert!((6..=9).contains(&deaths), "{deaths} deaths");
    let alone =
        "SELECT count(*) FROM public.claims WHERE solo AND batch = (SELECT min(id) FROM musterd.batches)";
    assert!(ledger.number(alone).await >= 3);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(SOON).await.success());
    assert_eq!(ledger.owned().await, 0);
}

/// A worker that takes a solitary row finishes what it has, runs the row with nothing beside it, and goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_solitary_row_runs_with_nothing_beside_it() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let watch = "CREATE FUNCTION public.count_company() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO public.company SELECT count(*) FROM musterd.blocks WHERE worker = NEW.worker AND id <> NEW.id;
             RETURN NULL;
         END $$;
         CREATE TABLE public.company (others int);
         CREATE TRIGGER company AFTER UPDATE OF alone_at ON musterd.blocks FOR EACH ROW
             WHEN (NEW.alone_at IS NOT NULL) EXECUTE FUNCTION public.count_company()";
    ledger.client.batch_execute(watch).await.unwrap();
    let alone = ledger.submit_block("echo", 1).await;
    ledger.client.execute("UPDATE musterd.blocks SET crashes = 3, solo = true", &[]).await.unwrap();
    let busy = ledger.submit("sleep", 100).await;
    let daemon = Daemon::builder(&db, "[handlers.sleep]\nduration = \"100ms\"").start();
    assert_eq!(ledger.end_of(alone, SOON).await, End::succeeded(1));
    assert_eq!(ledger.end_of(busy, SOON).await, End::succeeded(100));
    let company: Vec<i32> = ledger
        .client
        .query("SELECT others FROM public.company", &[])
        .await
        .unwrap()
        .iter()
        .map(|r| r.get(0))
        .collect();
    assert_eq!(company, [0]);
    drop(daemon);
}

/// Should the process die again, few are to blame.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_holds_one_suspect_at_a_time() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let watch = "CREATE TABLE public.company (others int);
         CREATE FUNCTION public.count_company() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO public.company
             SELECT count(*) FROM musterd.blocks WHERE worker = NEW.worker AND crashes > 0 AND id <> NEW.id;
             RETURN NULL;
         END $$;
         CREATE TRIGGER company AFTER UPDATE OF worker ON musterd.blocks FOR EACH ROW
             WHEN (NEW.worker IS NOT NULL AND NEW.crashes > 0) EXECUTE FUNCTION public.count_company()";
    ledger.client.batch_execute(watch).await.unwrap();
    let mut batches = Vec::new();
    for _ in 0..6 {
        batches.push(ledger.submit_block("sleep", 2).await);
    }
    ledger.client.execute("UPDATE musterd.blocks SET crashes = 1", &[]).await.unwrap();
    let innocent = ledger.submit("sleep", 20).await;
    let daemon =
        Daemon::builder(&db, "[claim]\npoll_interval = \"100ms\"\n[handlers.sleep]\nduration = \"100ms\"")
            .start();
    for batch in batches {
        assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(2));
    }
    assert_eq!(ledger.end_of(innocent, SOON).await, End::succeeded(20));
    assert_eq!(ledger.number("SELECT max(others)::bigint FROM public.company").await, 0);
    assert_eq!(ledger.number("SELECT count(*) FROM public.company").await, 6);
    drop(daemon);
}
