//! S19: a row that kills its process is found and failed; those beside it only have to wait.

use std::time::{Duration, Instant};

use musterd::handler::builtin::place;
use musterd::store::tasks::{self, Hint, Scope, WantedTasks};
use rustix::process::Signal;
use uuid::Uuid;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::session;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger};

/// The share of rows at which `fail` chooses exactly the first of `batch`'s lines in its order.
fn rate_of_one(batch: i64, lines: i32) -> (f64, i32) {
    let mut places: Vec<(f64, i32)> = (1..=lines).map(|line| (place(batch, line.into()), line)).collect();
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
    let alone = ledger.submit_solo("echo").await;
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

/// A worker with a long task, and a row that is to run alone.
async fn long_task_and_solo_row(db: &TestDb, ledger: &Ledger, config: &str) -> (Daemon, i64) {
    let daemon = Daemon::builder(db, config).start();
    ledger.client.execute("SELECT musterd.enqueue('long')", &[]).await.unwrap();
    let runs = "SELECT count(*) FROM musterd.tasks WHERE command = 'long' AND state = 'running'";
    eventually(SOON, "the long task runs", async || (ledger.number(runs).await == 1).then_some(())).await;
    let solo = ledger.submit_solo("echo").await;
    (daemon, solo)
}

const LONG_TASK: &str = "[queues.default]\nfibers = 4\n[claim]\npoll_interval = \"100ms\"\n\
    [handlers.long]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"25s\"";

async fn long_task_runs(ledger: &Ledger) -> bool {
    let runs = "SELECT count(*) FROM musterd.tasks WHERE command = 'long' AND state = 'running'";
    ledger.number(runs).await == 1
}

/// A solitary row keeps nothing else from running while it cannot be alone, and runs when it can.
#[tokio::test(flavor = "multi_thread")]
async fn a_solitary_row_beside_a_long_task_holds_up_nothing() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let (daemon, solo) = long_task_and_solo_row(&db, &ledger, LONG_TASK).await;
    let taken = "SELECT count(*) FROM public.claims WHERE solo";
    eventually(SOON, "the worker waits to be alone", async || (ledger.number(taken).await > 0).then_some(()))
        .await;
    let batch = ledger.submit("noop", 100).await;
    let task: i64 = ledger.client.query_one("SELECT musterd.enqueue('noop')", &[]).await.unwrap().get(0);
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(100));
    let ended = format!("SELECT count(*) FROM musterd.tasks WHERE id = {task} AND state = 'succeeded'");
    eventually(SOON, "the task ends", async || (ledger.number(&ended).await == 1).then_some(())).await;
    assert!(long_task_runs(&ledger).await, "everything waited for the long task");
    assert_eq!(ledger.end(solo).await, None);
    assert_eq!(ledger.end_of(solo, SOON).await, End::succeeded(1));
    assert!(!long_task_runs(&ledger).await, "it was not alone");
    drop(daemon);
}

/// The worker that cannot be alone gives it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_solitary_row_goes_to_a_replica_with_nothing_in_hand() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = LONG_TASK.replace("25s", "1h");
    let (busy, solo) = long_task_and_solo_row(&db, &ledger, &config).await;
    let taken = "SELECT count(*) FROM public.claims WHERE solo";
    eventually(SOON, "the worker waits to be alone", async || (ledger.number(taken).await > 0).then_some(()))
        .await;
    let idle = Daemon::builder(&db, &config).start();
    assert_eq!(ledger.end_of(solo, SOON).await, End::succeeded(1));
    assert!(long_task_runs(&ledger).await, "it waited for the long task of another worker");
    drop((busy, idle));
}

/// A suspect that takes hours is alone for a while and not for hours.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_suspect_idles_its_worker_for_a_while_only() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let config = LONG_TASK.replace("25s", "1h");
    let task = "INSERT INTO musterd.tasks (command, crashes) VALUES ('long', 2)";
    ledger.client.execute(task, &[]).await.unwrap();
    let daemon = Daemon::builder(&db, &config).start();
    let alone = "SELECT count(*) FROM musterd.task_claims WHERE alone_at IS NOT NULL";
    eventually(SOON, "the suspect is alone", async || (ledger.number(alone).await == 1).then_some(())).await;
    let batch = ledger.submit("noop", 10).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(10));
    assert!(long_task_runs(&ledger).await);
    assert_eq!(ledger.number(alone).await, 0, "a death would count against it alone");
    drop(daemon);
}

/// Of several that want to be alone, in whatever queue, one is after the other.
#[tokio::test(flavor = "multi_thread")]
async fn solitary_ones_do_not_wait_for_each_other() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let mut batches = Vec::new();
    for queue in ["default", "other"] {
        for _ in 0..2 {
            batches.push(ledger.submit_block("noop", 1).await);
            let solo = "UPDATE musterd.blocks SET crashes = 2, solo = true, queue = $1 WHERE NOT solo";
            ledger.client.execute(solo, &[&queue]).await.unwrap();
            let task = "INSERT INTO musterd.tasks (command, crashes, queue) VALUES ('noop', 2, $1)";
            ledger.client.execute(task, &[&queue]).await.unwrap();
        }
    }
    let config = "[queues.other]\nfibers = 2\n[claim]\npoll_interval = \"100ms\"";
    let daemon = Daemon::builder(&db, config).start();
    for batch in batches {
        assert_eq!(ledger.end_of(batch, Duration::from_secs(60)).await, End::succeeded(1));
    }
    let ended = "SELECT count(*) FROM musterd.tasks WHERE crashes = 2 AND state = 'succeeded'";
    eventually(Duration::from_secs(60), "the tasks have run", async || {
        (ledger.number(ended).await == 4).then_some(())
    })
    .await;
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

/// A task that kills its process is found and failed; the tasks beside it only have to wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_kills_its_process_fails_alone() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let watch = "CREATE TABLE public.company (others bigint);
         CREATE FUNCTION public.count_company() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO public.company
             SELECT (SELECT count(*) FROM musterd.tasks WHERE worker = NEW.worker AND NOT NEW.tasks @> id)
                    -- A row that was there at two deaths is to be alone as well: it waits, and has not begun.
                  + (SELECT count(*) FROM musterd.blocks
                      WHERE worker = NEW.worker AND NOT (solo AND alone_at IS NULL));
             RETURN NULL;
         END $$;
         CREATE TRIGGER company AFTER UPDATE OF alone_at ON musterd.task_claims FOR EACH ROW
             WHEN (NEW.alone_at IS NOT NULL) EXECUTE FUNCTION public.count_company()";
    ledger.client.batch_execute(watch).await.unwrap();
    let enqueue = "SELECT musterd.enqueue('killer', max_attempts => 1)";
    let killer: i64 = ledger.client.query_one(enqueue, &[]).await.unwrap().get(0);
    let beside = "SELECT count(musterd.enqueue('sleep')) FROM generate_series(1, 12)";
    ledger.client.execute(beside, &[]).await.unwrap();
    let batch = ledger.submit("sleep", 20).await;
    let config = "[queues.default]\nfibers = 4\n[claim]\npoll_interval = \"100ms\"\n[liveness]\nmax_crashes = 2\n\
         [handlers.killer]\nkind = \"builtin\"\nbuiltin = \"fail\"\nfailure = \"abort\"\nduration = \"200ms\"\n\
         [handlers.sleep]\nduration = \"300ms\"";
    let limit = Instant::now() + Duration::from_secs(120);
    let state = "SELECT state::text, COALESCE(error, '') FROM musterd.tasks WHERE id = $1";
    let mut deaths = 0;
    let mut daemon = Daemon::builder(&db, config).log("info").start();
    let end = loop {
        assert!(Instant::now() < limit, "not over after {deaths} deaths");
        let row = ledger.client.query_one(state, &[&killer]).await.unwrap();
        if row.get::<_, String>(0) == "failed" {
            break row;
        }
        if daemon.has_ended() {
            deaths += 1;
            // What a judge finds out within seconds.
            let bury = "UPDATE musterd.workers SET state = 'dead', ended_at = clock_timestamp() WHERE state <> 'dead'";
            ledger.client.execute(bury, &[]).await.unwrap();
            daemon = Daemon::builder(&db, config).log("info").start();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    // Once in company, once as the only suspect, twice alone.
    assert_eq!(deaths, 4);
    let error: String = end.get(1);
    assert!(error.contains("died 2 times while it ran this task and nothing else"), "{error}");
    assert_eq!(ledger.number("SELECT max(others) FROM public.company").await, 0, "it was not alone");
    assert_eq!(ledger.end_of(batch, Duration::from_secs(60)).await, End::succeeded(20));
    let others =
        "SELECT count(*) FROM musterd.tasks WHERE command = 'sleep' AND state = 'succeeded' AND crashes <= 1";
    eventually(Duration::from_secs(60), "the others have succeeded", async || {
        // The batch of sleepers is one of them.
        (ledger.number(others).await == 13).then_some(())
    })
    .await;
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(Duration::from_secs(60)).await.success());
}

/// Of tasks that a process died with a worker holds one; those that two died with are not for company at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_holds_one_suspect_task_at_a_time() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = session(&db).await;
    for crashes in [2, 1, 1, 2, 0, 0] {
        let add = "INSERT INTO musterd.tasks (command, crashes) VALUES ('c', $1)";
        ledger.client.execute(add, &[&crashes]).await.unwrap();
    }
    let claim = async |worker: &'static str, solo: bool| {
        let tokens: Vec<Uuid> = (0..4).map(|_| Uuid::new_v4()).collect();
        let wanted = WantedTasks {
            queue: "default",
            worker,
            tokens: &tokens,
            commands: &["c".to_owned()],
            most: &[4],
            durable: &[],
            scope: Scope::Any,
            ignore_priority: false,
            behind_rows: None,
            beside: 1,
            hint: Hint::START,
        };
        let claimed: Vec<tasks::Task> = match solo {
            true => {
                let solo = tasks::claim_solo(&client, "default", worker, tokens[0], wanted.commands).await;
                solo.unwrap().into_iter().collect()
            }
            false => tasks::claim(&client, &wanted).await.unwrap().tasks,
        };
        let mut ids: Vec<i64> = claimed.iter().map(|task| task.reference.id).collect();
        ids.sort_unstable();
        assert!(claimed.iter().all(|task| task.is_solo == solo));
        ids
    };
    assert_eq!(claim("one", false).await, [2, 5, 6]);
    assert!(claim("one", false).await.is_empty(), "a second suspect");
    assert_eq!(claim("other", false).await, [3]);
    assert_eq!(claim("one", true).await, [1]);
    assert!(claim("one", true).await.is_empty(), "a second solitary one");
    assert_eq!(claim("other", true).await, [4]);
}
