//! Whatever an outcome locks (tasks, parents, uncles, siblings) it locks in the order of ids: two that meet wait for each
//! other in one direction only.

use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::{Outcome, Schedule};
use crate::suite::support::tasks::number;
use crate::suite::task_schedules::{complete, family, finish_with, task};

/// Has somebody else hold one of `ids` after the other. While `sql` waits for that one it has those before it, and none
/// of those behind it.
async fn locks_in_order(db: &TestDb, ids: &[i64], sql: &str) {
    assert!(ids.is_sorted());
    let client = db.client().await;
    for id in ids.iter().rev() {
        // On disk the other way round: who does not ask for an order does not get this one by chance.
        let move_on = format!("UPDATE musterd.tasks SET priority = priority WHERE id = {id}");
        client.batch_execute(&move_on).await.unwrap();
    }
    let mut schedule = Schedule::new(db, &["holder", "taker", "looker"]).await;
    let as_on_disk = "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off; SET enable_sort = off";
    schedule.run("taker", as_on_disk).await;
    for held in ids {
        schedule.run("holder", "BEGIN").await;
        schedule.run("holder", &format!("{} FOR NO KEY UPDATE", row(*held))).await.rows();
        schedule.run("taker", "BEGIN").await;
        schedule.blocks("taker", sql).await;
        for id in ids.iter().filter(|id| *id != held) {
            let look = schedule.run("looker", &format!("{} FOR NO KEY UPDATE NOWAIT", row(*id))).await;
            let is_taken = matches!(look, Outcome::Failed(state) if state == "55P03");
            assert_eq!(is_taken, id < held, "{id} of {ids:?} while it waits for {held}");
        }
        schedule.run("holder", "COMMIT").await;
        schedule.resumes("taker").await.rows();
        schedule.run("taker", "ROLLBACK").await;
    }
}

fn row(id: i64) -> String {
    format!("SELECT 1 FROM musterd.tasks WHERE id = {id}")
}

/// Both outcomes in one call, the later one first.
fn finish_both(one: &str, other: &str) -> String {
    let outcome = |sql: &str| {
        let (_, rest) = sql.split_once("ARRAY[").unwrap();
        rest.rsplit_once("])").unwrap().0.trim().to_owned()
    };
    format!(
        "SELECT f.task_state FROM musterd.finish_tasks(ARRAY[{}, {}]) f ORDER BY 1",
        outcome(other),
        outcome(one)
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_take_their_tasks_and_the_parents_these_spawn_for_by_id() {
    for (spawn, after) in [(r#"'[{"command": "sibling"}]'"#, "NULL"), ("NULL", r#"'[{"command": "uncle"}]'"#)]
    {
        let db = TestDb::new().await;
        let (first, of_first) = family(&db, "wait", &["running"]).await;
        let (second, of_second) = family(&db, "wait", &["running"]).await;
        let finish = |id: i64| finish_with(id, "succeeded", spawn, after);
        let both = finish_both(&finish(of_first[0]), &finish(of_second[0]));
        locks_in_order(&db, &[first, of_first[0], second, of_second[0]], &both).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_end_are_taken_by_id() {
    let db = TestDb::new().await;
    let one = task(&db, "state", "'running'").await;
    let other = task(&db, "state", "'running'").await;
    let finish = |id: i64| finish_with(id, "succeeded", "NULL", "NULL");
    locks_in_order(&db, &[one, other], &finish_both(&finish(one), &finish(other))).await;
}

/// A producer may have an uncle locked for as long as it likes: what it waits for ends all the same, and it starts afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn an_uncle_that_is_locked_keeps_no_task_from_ending() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (one, other) = (task(&db, "state", "'running'").await, task(&db, "state", "'running'").await);
    let sql = format!("SELECT musterd.enqueue_after('c', '{{}}', ARRAY[{one}, {other}])");
    let uncle = number(&client, &sql).await;
    let mut schedule = Schedule::new(&db, &["producer", "worker"]).await;
    schedule.run("producer", "BEGIN").await;
    schedule.run("producer", &format!("{} FOR NO KEY UPDATE", row(uncle))).await.rows();
    let finish = |id: i64| finish_with(id, "succeeded", "NULL", "NULL");
    let both = finish_both(&finish(one), &finish(other));
    assert_eq!(schedule.run("worker", &both).await.rows(), ["succeeded", "succeeded", ""]);
    let state = format!("SELECT state FROM musterd.tasks WHERE id = {uncle}");
    assert_eq!(schedule.run("worker", &state).await.rows(), ["scheduled"]);
    schedule.run("producer", "COMMIT").await;
    assert_eq!(schedule.run("worker", &complete(uncle)).await.rows(), ["open"]);
    assert_eq!(schedule.run("worker", &state).await.rows(), ["queued"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_that_fails_takes_its_open_children_by_id() {
    let db = TestDb::new().await;
    let states = ["failed", "queued", "running", "held", "queued"];
    let (parent, children) = family(&db, "abort_siblings", &states).await;
    let open: Vec<i64> = std::iter::once(parent).chain(children[1..].iter().copied()).collect();
    locks_in_order(&db, &open, &complete(parent)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_several_tasks_takes_them_by_id() {
    let db = TestDb::new().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(task(&db, "state", "'queued'").await);
    }
    let reversed: Vec<i64> = ids.iter().rev().copied().collect();
    locks_in_order(&db, &ids, &format!("SELECT musterd.enqueue_after('c', '{{}}', ARRAY{reversed:?})")).await;
}
