//! Hold, release, pause and abort while handlers run.

use musterd::state::State;
use std::sync::Arc;

use musterd::json::Json;
use musterd::store::flush::Close;
use tokio::sync::watch;

use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::ledger::{carve, session, success, write, written};
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, progress, submit, succeeded,
};

const ONE_FIBER: &str = "[queues.default]\nfibers = 1";

/// Counts the handlers that were dropped before their answer.
#[derive(Clone, Debug)]
struct Cancelled(watch::Sender<usize>);

struct Running<'a>(&'a Cancelled, bool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.0.send_modify(|count| *count += 1);
        }
    }
}

fn gated(gate: &Gate, first_gated: i32, cancelled: &Cancelled) -> Arc<Script> {
    let (gate, cancelled) = (gate.clone(), cancelled.clone());
    Script::new(move |call| {
        let (gate, cancelled) = (gate.clone(), cancelled.clone());
        async move {
            let mut running = Running(&cancelled, false);
            if call.line >= first_gated {
                gate.pass().await;
            }
            running.1 = true;
            succeeded()
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_cancels_what_runs_and_ends_the_batch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (gate, cancelled) = (Gate::closed(), Cancelled(watch::Sender::new(0)));
    let script = gated(&gate, 3, &cancelled);
    let worker = Worker::start(&db, ONE_FIBER, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 100, "").await;
    within(PATIENCE, gate.entered()).await;
    let answer: String = ask(&client, &format!("SELECT musterd.abort({batch})")).await;
    assert_eq!(answer, "aborting");
    // The gate was never opened: the handler was cancelled, not waited for.
    assert_eq!(end_of(&client, batch).await, ("aborted".into(), 2, 0, 98));
    assert_eq!(*cancelled.0.borrow(), 1);
    assert_eq!(script.calls().len(), 3);
    let states = format!(
        "SELECT string_agg(DISTINCT state::text, ',') FROM musterd.batch_rows({batch}, 3) WHERE line > 2"
    );
    assert_eq!(ask::<String>(&client, &states).await, "aborted");
    assert_accounts_balance(&client).await;
    assert!(worker.stop().await.is_clean());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_before_anything_ran_ends_the_batch_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = submit(&client, "work", 5, "hold => true").await;
    client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
    let script = Script::succeeding();
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("aborted".into(), 0, 0, 5));
    assert!(script.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_lets_the_block_in_hand_finish_and_a_release_the_rest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (gate, cancelled) = (Gate::closed(), Cancelled(watch::Sender::new(0)));
    let script = gated(&gate, 1, &cancelled);
    let _worker = Worker::start(&db, ONE_FIBER, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 10, "").await;
    within(PATIENCE, gate.entered()).await;
    client.query("SELECT musterd.hold($1)", &[&batch]).await.unwrap();
    gate.open();
    eventually(PATIENCE, "the block in hand is finished", async || {
        (progress(&client, batch).await.succeeded == 5).then_some(())
    })
    .await;
    // Another batch goes through, so the worker has looked for work and passed over the held one.
    let other = submit(&client, "work", 10, "").await;
    assert_eq!(end_of(&client, other).await.0, "succeeded");
    let held = progress(&client, batch).await;
    assert_eq!((held.state.as_str(), held.succeeded, held.queued, held.running), ("held", 5, 5, 0));
    client.query("SELECT musterd.release($1)", &[&batch]).await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    assert!(script.runs().values().all(|count| *count == 1));
    assert_eq!(*cancelled.0.borrow(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_is_left_alone_until_it_is_resumed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("SELECT musterd.pause_queue('default')").await.unwrap();
    let script = Script::succeeding();
    let toml = "[queues.other]\nfibers = 1";
    let _worker = Worker::start(&db, toml, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 10, "").await;
    let other = submit(&client, "work", 10, "queue => 'other'").await;
    assert_eq!(end_of(&client, other).await.0, "succeeded");
    assert!(script.calls().iter().all(|call| call.batch == other));
    client.batch_execute("SELECT musterd.resume_queue('default')").await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_nobody_here_knows_is_left_to_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::succeeding();
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let foreign = submit(&client, "foreign", 10, "").await;
    let ours = submit(&client, "work", 10, "").await;
    assert_eq!(end_of(&client, ours).await.0, "succeeded");
    assert_eq!(progress(&client, foreign).await.state, State::Queued);
    let capable = Script::succeeding();
    let _capable = Worker::start(&db, "", &[("foreign", capable.clone())]).await;
    assert_eq!(end_of(&client, foreign).await, ("succeeded".into(), 10, 0, 0));
    assert!(script.calls().iter().all(|call| call.batch == ours));
}

/// A row that succeeded and asked for more rows while its batch was being aborted has succeeded; the rows it asked for are not run.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_appends_to_a_batch_that_is_being_aborted_has_succeeded() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 3, "").await;
    let block = carve(&worker, 1, 3).await.remove(0);
    assert_eq!(ask::<String>(&client, &format!("SELECT musterd.abort({batch})")).await, "aborting");
    let mut done = success(&block, [1], Some(Close::default()));
    done.outcomes.append(1, Json::from_text("7"));
    assert_eq!(write(&worker, done).await, written(1));
    let failed = format!("SELECT count(*) FROM musterd.failures WHERE batch_id = {batch}");
    assert_eq!(ask::<i64>(&client, &failed).await, 0);
    assert_eq!(ask::<i32>(&client, &format!("SELECT rows FROM musterd.batches WHERE id = {batch}")).await, 3);
}
