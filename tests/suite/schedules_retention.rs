//! Retention that meets a redrive, an uncle, a repeated request, an export or itself.

use musterd::store::export::{Pages, Rows};
use musterd::store::retention::{self, GONE, Step};

use crate::suite::aged::{age, declare, ended, pass, task, tuples};
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::session;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::value;

const LOCK: &str = "SELECT pg_advisory_xact_lock(hashtextextended('musterd.prune', 0))";

fn prune(id: i64, generation: i32) -> String {
    format!("SELECT musterd.prune_batch({id}, {generation})")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_before_it_keeps_the_rows_and_one_after_it_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let id = ended(&client, "work", 6, "").await;
    age(&client, id, 31).await;
    let redrive = format!("SELECT r.state FROM musterd.redrive({id}) r");
    let mut schedule = Schedule::new(&db, &["operator", "pruner"]).await;
    for end in ["ROLLBACK", "COMMIT"] {
        schedule.run("operator", "BEGIN").await;
        assert_eq!(schedule.run("operator", &redrive).await.rows(), ["running"]);
        // It does not wait.
        assert_eq!(schedule.run("pruner", &prune(id, 1)).await.rows(), ["f"]);
        schedule.run("operator", end).await;
    }
    for generation in [1, 2] {
        assert_eq!(schedule.run("pruner", &prune(id, generation)).await.rows(), ["f"], "it runs again");
    }
    assert_eq!(tuples(&client, id).await, "1 5 0 2");

    let other = ended(&client, "work", 6, "").await;
    age(&client, other, 31).await;
    let redrive = format!("SELECT r.state FROM musterd.redrive({other}) r");
    for end in ["ROLLBACK", "COMMIT"] {
        schedule.run("pruner", "BEGIN").await;
        assert_eq!(schedule.run("pruner", &prune(other, 1)).await.rows(), ["t"]);
        schedule.blocks("operator", &redrive).await;
        if end == "ROLLBACK" {
            schedule.run("pruner", end).await;
            assert_eq!(schedule.resumes("operator").await.rows(), ["running"]);
            // Back to where it was: its failures failed once more.
            client
                .batch_execute(&format!(
                    "DELETE FROM musterd.blocks WHERE batch_id = {other};
                     SELECT guard.result({other}, n, 'failed', 1) FROM generate_series(3, 6, 3) n;
                     SELECT musterd.complete_scope({other}, 2, 6, 4, 2)"
                ))
                .await
                .unwrap();
            age(&client, other, 31).await;
            // What an archive of the generation before has is not what would go.
            assert_eq!(schedule.run("pruner", &prune(other, 1)).await.rows(), ["f"]);
            client
                .batch_execute(&format!("UPDATE musterd.batches SET generation = 1 WHERE id = {other}"))
                .await
                .unwrap();
            continue;
        }
        schedule.run("pruner", end).await;
        assert_eq!(schedule.resumes("operator").await.sqlstate(), GONE);
    }
    pass(&db, "").await;
    assert_eq!(tuples(&client, other).await, "0 0 0 0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_a_new_uncle_names_stays_until_the_uncle_is_there() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let id = task(&client, "first", 400, "").await;
    let after = format!("SELECT musterd.enqueue_after('uncle', after => ARRAY[{id}])");
    let walk = "SELECT p.records FROM musterd.prune_tasks(0, 100) p";
    let mut schedule = Schedule::new(&db, &["producer", "pruner"]).await;
    schedule.run("producer", "BEGIN").await;
    schedule.run("producer", &after).await.rows();
    assert_eq!(schedule.run("pruner", walk).await.rows(), ["0"]);
    schedule.run("producer", "COMMIT").await;
    assert_eq!(schedule.run("pruner", walk).await.rows(), ["1"], "it had ended: nothing waits for it");

    let id = task(&client, "first", 400, "").await;
    let after = format!("SELECT musterd.enqueue_after('uncle', after => ARRAY[{id}])");
    schedule.run("pruner", "BEGIN").await;
    assert_eq!(schedule.run("pruner", walk).await.rows(), ["1"]);
    schedule.blocks("producer", &after).await;
    schedule.run("pruner", "COMMIT").await;
    assert_eq!(schedule.resumes("producer").await.sqlstate(), "P0002");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_finds_the_record_or_makes_a_new_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let submit = "SELECT musterd.submit_batch('work', '[{\"n\": 1}]'::jsonb, idempotency_key => 'k')";
    let id = ended(&client, "work", 1, ", idempotency_key => 'k'").await;
    age(&client, id, 400).await;
    assert_eq!(pass(&db, "").await.records, 1, "rows and record go in one pass");
    let id = ended(&client, "work", 1, ", idempotency_key => 'k'").await;
    age(&client, id, 40).await;
    pass(&db, "").await;
    age(&client, id, 400).await;
    let walk = "SELECT p.records FROM musterd.prune_tasks(0, 100) p";
    let mut schedule = Schedule::new(&db, &["producer", "pruner"]).await;
    for end in ["ROLLBACK", "COMMIT"] {
        schedule.run("pruner", "BEGIN").await;
        assert_eq!(schedule.run("pruner", walk).await.rows(), ["1"]);
        schedule.blocks("producer", submit).await;
        schedule.run("pruner", end).await;
        let found: i64 = schedule.resumes("producer").await.rows()[0].parse().unwrap();
        match end {
            "ROLLBACK" => assert_eq!(found, id),
            _ => assert!(found > id, "{found}"),
        }
    }
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.batches").await, "1");
    // The producer first: what it has just been told is not taken away beneath it.
    let known = task(&client, "a", 400, ", idempotency_key => 'k'").await;
    let again = "SELECT musterd.enqueue('a', '{\"secret\": 1}', idempotency_key => 'k')";
    schedule.run("producer", "BEGIN").await;
    assert_eq!(schedule.run("producer", again).await.rows(), [known.to_string()]);
    assert_eq!(schedule.run("pruner", walk).await.rows(), ["1"]);
    schedule.run("producer", "COMMIT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_delete_nothing_twice_with_and_without_their_lock() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let id = ended(&client, "work", 9, "").await;
    age(&client, id, 31).await;
    let tasks = [task(&client, "a", 400, "").await, task(&client, "a", 400, "").await];
    let mut schedule = Schedule::new(&db, &["a", "b"]).await;
    // A step of one: the pass of the other ends at once.
    schedule.run("a", "BEGIN").await;
    schedule.run("a", LOCK).await;
    let gone = pass(&db, "").await;
    assert!(gone.busy && gone.total() == 0, "{gone:?}");
    schedule.run("a", "ROLLBACK").await;
    // Nor do they need the lock: each leaves alone what the other has.
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &prune(id, 1)).await.rows(), ["t"]);
    assert_eq!(schedule.run("b", &prune(id, 1)).await.rows(), ["f"]);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", &prune(id, 1)).await.rows(), ["f"], "once");
    let bite = format!("SELECT p.next FROM musterd.prune_rows({id}, 1) p");
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &bite).await.rows(), [""]);
    assert_eq!(schedule.run("b", &bite).await.rows(), ["1"]);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", &bite).await.rows(), ["1"], "nothing is left");
    let walk = "SELECT p.records FROM musterd.prune_tasks(0, 100) p";
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", walk).await.rows(), [tasks.len().to_string()]);
    assert_eq!(schedule.run("b", walk).await.rows(), ["0"]);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", walk).await.rows(), ["0"]);
    // A pass is begun by one of them.
    let begin = "SELECT musterd.begin_prune_pass('1 hour')";
    client.batch_execute("UPDATE musterd.retention SET passed_at = NULL").await.unwrap();
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", begin).await.rows(), ["t"]);
    schedule.blocks("b", begin).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["f"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pass_that_was_cut_off_is_taken_up_where_it_was() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let id = ended(&client, "work", 60_000, "").await;
    age(&client, id, 31).await;
    let due = retention::due(&client, 0, 10).await.unwrap();
    let mut worker = session(&db).await;
    assert_eq!(retention::give_up(&mut worker, &due[0], None).await.unwrap(), Step::Done(true));
    let Step::Done(bite) = retention::rows(&mut worker, id, 1).await.unwrap() else { panic!("busy") };
    assert_eq!(bite.next, Some(50_001));
    assert_eq!(value(&client, "SELECT min(first_line) FROM musterd.chunks").await, "50001");
    // Retention was turned off meanwhile: what was begun is ended all the same, for nothing can read it any more.
    declare(&client, "data = 'never'\nrecords = 'never'").await;
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.trouble), (1, None));
    assert_eq!(tuples(&client, id).await, "0 0 0 0");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_whose_rows_go_fails_and_does_not_end_early() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, "").await;
    let id = ended(&client, "work", 30_000, "").await;
    let mut reader = session(&db).await;
    let mut pages = Pages::of_rows(&mut reader, id, Rows::All);
    let first = pages.next().await.unwrap().unwrap();
    assert!(first.len() < 30_000);
    age(&client, id, 31).await;
    pass(&db, "").await;
    let error = loop {
        match pages.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended as if these were all rows"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code().unwrap().code(), GONE);
}
