//! A handler that blocks its thread past its time loses its row or task: another worker runs it while the thread is still blocked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use musterd::handler::{Config, Handler, TaskDone, TaskOutcome};
use musterd::json::Json;

use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::tasks::{self, Asked, QUICK, becomes, field, number, text, texts};
use crate::suite::support::wait::{SOON, eventually, within};
use crate::suite::support::work::{End, Ledger};
use crate::suite::support::worker::{Script, Worker, assert_accounts_balance, end_of, submit, succeeded};

/// Blocks its thread until it is released, also when its test fails.
struct Blocked(Arc<AtomicBool>);

impl Blocked {
    fn wait(released: &AtomicBool) {
        while !released.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    fn script(&self) -> Arc<Script> {
        let released = Arc::clone(&self.0);
        Script::new(move |_| {
            let released = Arc::clone(&released);
            async move {
                Self::wait(&released);
                succeeded()
            }
        })
    }

    /// Runs tasks: one with the payload `"block"` blocks, one with `"wait"` passes the gate, the others end at once. Each gives its name
    /// as its result.
    fn tasks(&self, name: &'static str, gate: &Gate) -> Arc<dyn Handler> {
        let (released, gate) = (Arc::clone(&self.0), gate.clone());
        let answer = move |asked: Asked| -> BoxFuture<'static, TaskOutcome> {
            let Asked::Task { payload, .. } = asked else { panic!("a row") };
            let (released, gate) = (Arc::clone(&released), gate.clone());
            async move {
                match payload.as_str() {
                    "\"block\"" => Self::wait(&released),
                    "\"wait\"" => gate.pass().await,
                    _ => {}
                }
                let result = Some(Json::from_text(format!("{name:?}")));
                TaskOutcome::Done(TaskDone { result, ..TaskDone::default() })
            }
            .boxed()
        };
        Arc::new(tasks::Script(answer))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A runtime with one thread: the worker goes on because a blocked handler leaves it to another.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_row_whose_handler_blocks_its_thread_runs_elsewhere_and_why_says_so() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocked = Blocked(Arc::default());
    let first = blocked.script();
    let one = Worker::start(&db, "[queues.default]\nfibers = 1\n", &[("work", Arc::clone(&first))]).await;
    let batch = submit(&client, "work", 3, "row_timeout => '200 ms'").await;
    let said = eventually(SOON, "why says so", async || {
        let reasons = musterd::why::batch(&client, batch).await.unwrap().unwrap();
        reasons.into_iter().map(|reason| reason.sentence).find(|said| said.contains("blocks its thread"))
    })
    .await;
    assert!(said.contains("1 row failed and is tried again (attempt 2)"), "{said}");
    assert_eq!(first.calls().len(), 1, "it blocks on");
    let second = Script::succeeding();
    let two = Worker::start(&db, "", &[("work", Arc::clone(&second))]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".to_owned(), 3, 0, 0));
    let mut attempts: Vec<(i32, i32)> = second.calls().iter().map(|call| (call.line, call.attempt)).collect();
    attempts.sort_unstable();
    let late = first.calls()[0].line;
    assert!(attempts.contains(&(late, 2)) && attempts.len() == 3, "{attempts:?}");
    // What the first one says in the end is refused.
    drop(blocked);
    eventually(SOON, "it is fenced", async || {
        (one.metric("musterd_fenced_total").await >= 1.0).then_some(())
    })
    .await;
    assert_accounts_balance(&client).await;
    one.stop().await;
    two.stop().await;
}

/// Enqueues tasks of `command` with these payloads, all in one transaction, so that one claim brings them.
async fn enqueue(client: &tokio_postgres::Client, command: &str, payloads: &[&str], more: &str) -> Vec<i64> {
    let payloads = payloads.join("\",\"");
    let sql = format!(
        "SELECT musterd.enqueue('{command}', p{more}) FROM jsonb_array_elements('[\"{payloads}\"]') WITH ORDINALITY u (p, n) ORDER BY n"
    );
    texts(client, &sql).await.iter().map(|id| id.parse().unwrap()).collect()
}

const FIBERS: &str = "[queues.default]\nfibers = 3\n[claim]\npoll_interval = \"50ms\"\n\
    [retry]\nbase = \"1h\"\nmax = \"1h\"\n[completion]\nsweep_min = \"500ms\"\nsweep_max = \"1s\"\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_task_whose_handler_blocks_its_thread_runs_elsewhere_and_the_others_of_its_claim_go_on() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (blocked, gate, open) = (Blocked(Arc::default()), Gate::closed(), Gate::closed());
    open.open();
    let config = || Config { timeout: Duration::from_secs(3600), ..Config::default() };
    let one = tasks::Worker::start(&db, FIBERS, vec![("work", blocked.tasks("one", &gate), config())]).await;
    let ids = enqueue(
        &client,
        "work",
        &["wait", "block", "wait"],
        ", timeout => CASE p WHEN '\"block\"' THEN interval '200 ms' END",
    )
    .await;
    within(SOON, gate.entered_by(2)).await;
    let late = ids[1];
    let claims = "SELECT count(*), sum(open) FROM musterd.task_claims";
    assert_eq!(text(&client, claims).await, "1|3", "one claim");
    let said = eventually(SOON, "why says so", async || {
        let reasons = musterd::why::task(&client, late).await.unwrap().unwrap();
        reasons.into_iter().map(|reason| reason.sentence).find(|said| said.contains("blocks its thread"))
    })
    .await;
    assert!(said.contains("failed and is tried again (attempt 2)"), "{said}");
    // The claim goes on without it.
    assert_eq!(text(&client, claims).await, "1|2");
    for id in [ids[0], ids[2]] {
        assert_eq!(field(&client, id, "state").await, "running");
    }
    let free = Blocked(Arc::new(AtomicBool::new(true)));
    let two = tasks::Worker::start(&db, QUICK, vec![("work", free.tasks("two", &open), config())]).await;
    text(&client, &format!("SELECT musterd.retry_task({late})")).await;
    assert_eq!(tasks::end_of(&client, late).await, "succeeded");
    gate.open();
    for (id, ended) in
        [(ids[0], "succeeded|1|\"one\""), (late, "succeeded|2|\"two\""), (ids[2], "succeeded|1|\"one\"")]
    {
        becomes(&client, &format!("SELECT state, attempt, result FROM musterd.tasks WHERE id = {id}"), ended)
            .await;
    }
    // What the first one says in the end is refused.
    drop(blocked);
    one.finish().await;
    two.finish().await;
    assert_eq!(field(&client, late, "result").await, "\"two\"");
    assert_eq!(text(&client, "SELECT count(*) FROM musterd.task_claims").await, "0");
}

/// What is alone in its worker, because processes died with it, keeps everything else waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_suspect_that_blocks_its_thread_lets_the_others_in() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let blocked = Blocked(Arc::default());
    let first = blocked.script();
    let worker =
        Worker::start(&db, "", &[("work", Arc::clone(&first)), ("other", Script::succeeding())]).await;
    let batch = submit(&ledger.client, "work", 1, "row_timeout => '200 ms', hold => true").await;
    let alone = format!(
        "UPDATE musterd.batches SET next_line = 2 WHERE id = {batch};
         INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, crashes, solo)
         SELECT id, '{{[1,2)}}', 1, queue, command, priority, 3, true FROM musterd.batches WHERE id = {batch};
         SELECT musterd.release({batch})"
    );
    ledger.client.batch_execute(&alone).await.unwrap();
    eventually(SOON, "it runs", async || (first.calls().len() == 1).then_some(())).await;
    let other = ledger.submit("other", 3).await;
    assert_eq!(ledger.end_of(other, SOON).await, End::succeeded(3));
    assert!(!blocked.0.load(Ordering::SeqCst));
    assert_eq!(
        number(&ledger.client, "SELECT count(*) FROM musterd.blocks WHERE alone_at IS NOT NULL").await,
        0
    );
    drop(blocked);
    worker.stop().await;
}
