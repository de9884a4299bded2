//! A handler that blocks its thread past its time loses its row: another worker runs it while the thread is still blocked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::worker::{Script, Worker, assert_accounts_balance, end_of, submit, succeeded};

/// Blocks its thread until it is released, also when its test fails.
struct Blocked(Arc<AtomicBool>);

impl Blocked {
    fn script(&self) -> Arc<Script> {
        let released = Arc::clone(&self.0);
        Script::new(move |_| {
            let released = Arc::clone(&released);
            async move {
                while !released.load(Ordering::SeqCst) {
                    std::thread::park_timeout(Duration::from_millis(20));
                }
                succeeded()
            }
        })
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
