//! The walk of a row, seen from the handler: how often it is called, with what, and what becomes of its answer.

use musterd::state::State;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use musterd::handler::{BlockCall, Handler, Intake, Outcome, OutcomeSink, RowCall};
use musterd::store::pages::InputRow;

use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::embedded::Embedded;
use crate::suite::support::gate::Gate;
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, free_all_blocks, progress, retry, submit,
    succeeded, succeeded_with,
};

const ONE_FIBER: &str = "[queues.default]\nfibers = 1";

#[tokio::test(flavor = "multi_thread")]
async fn every_row_is_run_once_with_its_own_input() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| async move { succeeded_with(&call.input) });
    let worker = Worker::start(&db, "", &[("count", script.clone())]).await;
    let batch = submit(&client, "count", 1_000, "").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 1_000, 0, 0));
    let runs = script.runs();
    assert_eq!(runs.len(), 1_000);
    assert!(runs.values().all(|count| *count == 1), "a row was run twice");
    assert!(script.calls().iter().all(|call| call.input == call.line.to_string() && call.attempt == 1));
    let wrong = format!(
        "SELECT count(*) FROM musterd.batch_rows({batch}) WHERE result::text IS DISTINCT FROM input::text"
    );
    assert_eq!(ask::<i64>(&client, &wrong).await, 0);
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_claimed_again_leaves_out_the_lines_that_have_a_result() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let at_gate = gate.clone();
    let first = Script::new(move |call| {
        let gate = at_gate.clone();
        async move {
            if call.line == 3 {
                gate.pass().await;
            }
            succeeded()
        }
    });
    let toml = format!("{ONE_FIBER}\n[batcher]\nmax_interval = \"20ms\"");
    let worker = Worker::start(&db, &toml, &[("work", first.clone())]).await;
    let batch = submit(&client, "work", 10, "").await;
    within(PATIENCE, gate.entered()).await;
    // They do not wait for the third, which takes for ever.
    eventually(PATIENCE, "the first lines are written", async || {
        (progress(&client, batch).await.succeeded == 2).then_some(())
    })
    .await;
    worker.crash().await;
    assert_eq!(free_all_blocks(&client).await, 1);

    let second = Script::succeeding();
    let _worker = Worker::start(&db, ONE_FIBER, &[("work", second.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 10, 0, 0));
    let again: Vec<i32> = second.runs().keys().map(|(_, line)| *line).collect();
    assert_eq!(again, (3..=10).collect::<Vec<_>>());
    assert!(second.runs().values().all(|count| *count == 1));
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_try_is_followed_by_another_up_to_the_limit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| async move {
        match (call.line, call.attempt) {
            (2, 1) | (3, _) => retry("not yet"),
            (4, _) => Outcome::Failed("never".into()),
            _ => succeeded(),
        }
    });
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 5, "max_attempts => 4").await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 3, 2, 0));
    let attempts = |line: i32| -> Vec<i32> {
        script.calls().iter().filter(|call| call.line == line).map(|call| call.attempt).collect()
    };
    assert_eq!(
        [attempts(1), attempts(2), attempts(3), attempts(4)],
        [vec![1], vec![1, 2], vec![1, 2, 3, 4], vec![1]]
    );
    let told = "SELECT string_agg(line || ':' || state || ':' || attempt || ':' || coalesce(error, '-'), ' ' ORDER BY line)
                  FROM musterd.results";
    assert_eq!(
        ask::<String>(&client, told).await,
        "1:succeeded:1:- 2:succeeded:2:- 3:failed:4:not yet 4:failed:1:never 5:succeeded:1:-"
    );
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_past_its_timeout_is_cancelled_and_tried_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| async move {
        match (call.line, call.attempt) {
            (1, _) | (2, 1) => std::future::pending().await,
            _ => succeeded(),
        }
    });
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 3, "row_timeout => '50ms', max_attempts => 2").await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 2, 1, 0));
    let error: String = ask(&client, "SELECT error FROM musterd.results WHERE line = 1").await;
    assert_eq!(error, "ran longer than its timeout of 50ms");
    assert_eq!(script.runs()[&(batch, 1)], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_handler_is_a_failed_try_of_its_row_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = Script::new(|call| {
        // Before there is a future, and within it: a handler may be written either way.
        assert_ne!(call.line, 2, "two");
        async move {
            assert_ne!(call.line, 3, "three");
            succeeded()
        }
    });
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 50, "max_attempts => 2").await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 48, 2, 0));
    let errors: Vec<String> =
        ask(&client, "SELECT array_agg(error ORDER BY line) FROM musterd.results WHERE state = 'failed'")
            .await;
    for (error, word) in errors.iter().zip(["two", "three"]) {
        assert!(error.starts_with("the handler panicked: ") && error.contains(word), "{errors:?}");
    }
    assert_eq!(script.runs()[&(batch, 2)], 2);
    assert!(worker.stop().await.is_clean());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_a_handler_asks_for_is_the_wait_it_gets() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let calls: Arc<Mutex<Vec<(i32, Instant)>>> = Arc::default();
    let seen = Arc::clone(&calls);
    let script = Script::new(move |call| {
        seen.lock().unwrap().push((call.attempt, Instant::now()));
        async move {
            match call.attempt {
                1 => Outcome::Retry { error: "busy".into(), after: Some(Duration::from_millis(700)) },
                2 => Outcome::Retry { error: "busy".into(), after: Some(Duration::from_millis(1)) },
                _ => succeeded(),
            }
        }
    });
    // Its own wait would be minutes: what is shorter than that came from the handler.
    let toml = "[claim]\npoll_interval = \"50ms\"\n[retry]\nbase = \"5m\"";
    let _worker = Worker::start_exactly(&db, toml, &[("work", script)]).await;
    let batch = submit(&client, "work", 1, "").await;
    assert_eq!(end_of(&client, batch).await.0, "succeeded");
    let calls = calls.lock().unwrap().clone();
    assert_eq!(calls.iter().map(|(attempt, _)| *attempt).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(calls[1].1 - calls[0].1 >= Duration::from_millis(700), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_fails_when_more_rows_failed_than_it_allows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script =
        Script::new(
            |call| async move { if call.line <= 2 { Outcome::Failed("no".into()) } else { succeeded() } },
        );
    let _worker = Worker::start(&db, "", &[("work", script)]).await;
    let ends = [
        ("max_failed => 2", "succeeded"),
        ("max_failed => 1", "failed"),
        ("max_failed_percent => 20", "succeeded"),
        ("max_failed_percent => 19.9", "failed"),
        ("max_failed => 9, max_failed_percent => 10", "failed"),
    ];
    for (options, state) in ends {
        let batch = submit(&client, "work", 10, options).await;
        assert_eq!(end_of(&client, batch).await, (state.to_owned(), 8, 2, 0), "{options}");
    }
    let error: String =
        ask(&client, "SELECT error FROM musterd.tasks WHERE error IS NOT NULL ORDER BY id LIMIT 1").await;
    assert_eq!(error, "2 of 10 rows failed, 1 allowed");
}

const SMALL_BLOCKS: &str = "[queues.default]\nfibers = 1\nblock_size = 16";

/// The first block fails; what comes after it waits for the test.
fn failing_then_waiting(gate: &Gate) -> Arc<Script> {
    let gate = gate.clone();
    Script::new(move |call| {
        let gate = gate.clone();
        async move {
            if call.line > 16 {
                gate.pass().await;
            }
            Outcome::Failed("no".into())
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_holds_the_batch_if_it_asked_for_that() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let script = failing_then_waiting(&gate);
    let _worker = Worker::start(&db, SMALL_BLOCKS, &[("work", script.clone())]).await;
    let batch = submit(&client, "work", 500, "max_failed => 3, on_budget => 'hold'").await;
    eventually(PATIENCE, "the batch is held", async || {
        (progress(&client, batch).await.state == State::Held).then_some(())
    })
    .await;
    gate.open();
    // What was in hand is finished, nothing new is begun.
    eventually(PATIENCE, "nothing runs", async || {
        (progress(&client, batch).await.running == 0).then_some(())
    })
    .await;
    let held = progress(&client, batch).await;
    assert!(held.queued > 0 && held.failed < 500, "{held:?}");
    assert_eq!(script.calls().len() as i32, held.failed);
    client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
    assert_eq!(end_of(&client, batch).await, ("aborted".into(), 0, held.failed, 500 - held.failed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_aborts_the_batch_if_it_asked_for_that() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Never opened: only the abort ends the rows that wait at it.
    let gate = Gate::closed();
    let script = failing_then_waiting(&gate);
    let _worker = Worker::start(&db, SMALL_BLOCKS, &[("work", script)]).await;
    let batch = submit(&client, "work", 100, "max_failed_percent => 5, on_budget => 'abort'").await;
    let (state, succeeded, failed, aborted) = end_of(&client, batch).await;
    assert_eq!((state.as_str(), succeeded, failed + aborted), ("aborted", 0, 100));
    assert!((6..=16).contains(&failed), "{failed}");
    let within_budget = submit(&client, "work", 10, "max_failed => 10, on_budget => 'abort'").await;
    assert_eq!(end_of(&client, within_budget).await, ("succeeded".into(), 0, 10, 0));
    assert_accounts_balance(&client).await;
}

/// The decision is a flush away; the rows of a block in hand, and of those to come, wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_stops_the_blocks_in_hand_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let failing = Script::new(|_| async { Outcome::Failed("no".into()) });
    let _worker = Worker::start(&db, "[queues.default]\nfibers = 4", &[("work", failing)]).await;
    for action in ["hold", "abort"] {
        let wish = format!("max_failed => 5, on_budget => '{action}'");
        for rows in [20, 300, 3_000] {
            let batch = submit(&client, "work", rows, &wish).await;
            let stopped = eventually(PATIENCE, "the batch is stopped", async || {
                let now = progress(&client, batch).await;
                (["held", "aborted"].contains(&now.state.as_str()) && now.running == 0).then_some(now)
            })
            .await;
            // One too many; what the other fibers had begun meanwhile; and one more of each until it knows.
            assert!((6..=5 + 3 * 4).contains(&stopped.failed), "{stopped:?}");
            assert_eq!(stopped.failed + stopped.queued + stopped.aborted, rows, "{stopped:?}");
            if action == "hold" {
                // Released, it goes on to the next failure.
                client.query("SELECT musterd.release($1)", &[&batch]).await.unwrap();
                eventually(PATIENCE, "it is held again", async || {
                    let now = progress(&client, batch).await;
                    (now.state == State::Held && now.running == 0 && now.failed > stopped.failed)
                        .then_some(())
                })
                .await;
                let again = progress(&client, batch).await.failed - stopped.failed;
                assert!((1..=3 * 4).contains(&again), "{again}");
                client.query("SELECT musterd.abort($1)", &[&batch]).await.unwrap();
                end_of(&client, batch).await;
            }
        }
    }
    assert_accounts_balance(&client).await;
}

/// Says everything twice, differently, and speaks of lines that nobody asked about.
struct Chatty;

impl Handler for Chatty {
    fn intake(&self) -> Intake {
        Intake::Together(std::num::NonZeroUsize::MAX)
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        unreachable!("rows come together")
    }

    fn block<'a>(
        &'a self,
        _: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        for row in rows {
            sink.row(row.line, succeeded());
            sink.row(row.line, Outcome::Failed("said twice".into()));
            sink.row(row.line + 1_000, succeeded());
        }
        Box::pin(std::future::ready(()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_word_about_a_row_counts_and_others_rows_are_not_touched() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    let daemon = Embedded::start(&config, "chat", Arc::new(Chatty), PATIENCE);
    let batch = submit(&client, "chat", 20, "").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 20, 0, 0));
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.results").await, 20);
    assert!(daemon.stop().await.is_clean());
}
