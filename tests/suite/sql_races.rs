//! Scopes, uncles and keys when two sessions meet at them.

use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::value;

async fn two(db: &TestDb) -> Schedule {
    Schedule::new(db, &["a", "b"]).await
}

/// A parent that waits, all of whose children have ended.
async fn parent_of_ended_children(db: &TestDb) -> String {
    let client = db.client().await;
    let parent = value(&client, "SELECT musterd.enqueue('parent')").await;
    let child = value(&client, &format!("SELECT musterd.spawn('child', '{{}}', {parent})")).await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.task_records SET state = 'waiting' WHERE id = {parent};
             UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() WHERE id = {child}"
        ))
        .await
        .unwrap();
    parent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_and_the_end_of_its_parent_exclude_each_other() {
    let db = TestDb::new().await;
    let mut schedule = two(&db).await;
    let parent = parent_of_ended_children(&db).await;
    let (spawn, complete) = (
        format!("SELECT musterd.spawn('child', '{{}}', {parent})"),
        format!("SELECT musterd.complete_scope({parent})"),
    );
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &spawn).await.rows();
    schedule.blocks("b", &complete).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["open"], "it has a child again");

    let parent = parent_of_ended_children(&db).await;
    let (spawn, complete) = (
        format!("SELECT musterd.spawn('child', '{{}}', {parent})"),
        format!("SELECT musterd.complete_scope({parent})"),
    );
    schedule.run("b", "BEGIN").await;
    assert_eq!(schedule.run("b", &complete).await.rows(), ["completed"]);
    schedule.blocks("a", &spawn).await;
    schedule.run("b", "COMMIT").await;
    assert_eq!(schedule.resumes("a").await.sqlstate(), "23514", "no child joins an ended parent");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_who_end_a_parent_at_once_end_it_once() {
    let db = TestDb::new().await;
    let mut schedule = two(&db).await;
    let parent = parent_of_ended_children(&db).await;
    let complete = format!("SELECT musterd.complete_scope({parent})");
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &complete).await.rows(), ["completed"]);
    assert_eq!(schedule.run("b", &complete).await.rows(), ["locked"]);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", &complete).await.rows(), ["ended"]);
}

/// A batch of two rows that have ended, and it has not.
async fn ended_rows(db: &TestDb) -> String {
    let client = db.client().await;
    let id = value(&client, "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)").await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = 3 WHERE id = {id};
             SELECT guard.result({id}, n, 'succeeded') FROM generate_series(1, 2) n"
        ))
        .await
        .unwrap();
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_and_abort_come_before_the_end_or_after_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut schedule = two(&db).await;
    for (operation, then, state) in [("hold", "open", "held"), ("abort", "completed", "aborted")] {
        let id = ended_rows(&db).await;
        let complete = format!("SELECT musterd.complete_scope({id}, 1, 2, 2, 0, p_recorded => 2)");
        let operate = format!("SELECT musterd.{operation}({id})");
        let now = format!("SELECT state FROM musterd.tasks WHERE id = {id}");
        schedule.run("a", "BEGIN").await;
        schedule.run("a", &operate).await.rows();
        schedule.blocks("b", &complete).await;
        schedule.run("a", "COMMIT").await;
        assert_eq!(schedule.resumes("b").await.rows(), [then], "{operation}");
        assert_eq!(value(&client, &now).await, state);

        let id = ended_rows(&db).await;
        let complete = format!("SELECT musterd.complete_scope({id}, 1, 2, 2, 0, p_recorded => 2)");
        let operate = format!("SELECT musterd.{operation}({id})");
        schedule.run("b", "BEGIN").await;
        assert_eq!(schedule.run("b", &complete).await.rows(), ["completed"]);
        schedule.blocks("a", &operate).await;
        schedule.run("b", "COMMIT").await;
        assert_eq!(schedule.resumes("a").await.rows(), ["succeeded"], "{operation}: it has ended");
    }
    // The last row ended while the batch was held: the release has it looked at.
    let held = value(&client, "SELECT id FROM musterd.tasks WHERE state = 'held'").await;
    assert_eq!(value(&client, &format!("SELECT musterd.release({held})")).await, "running");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({held}, 1, 2, 2, 0)")).await,
        "completed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_dependencies_that_end_at_once_the_second_starts_the_uncle() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut schedule = two(&db).await;
    let (one, other) = (
        value(&client, "SELECT musterd.enqueue('d')").await,
        value(&client, "SELECT musterd.enqueue('d')").await,
    );
    let uncle =
        value(&client, &format!("SELECT musterd.enqueue_after('u', '{{}}', ARRAY[{one}, {other}])")).await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &format!("SELECT musterd.abort({one})")).await.rows();
    // It waits for nobody, and leaves the uncle, which is locked, to the check that it asks for.
    schedule.run("b", "LISTEN musterd_check").await;
    schedule.run("b", &format!("SELECT musterd.abort({other})")).await.rows();
    schedule.run("a", "COMMIT").await;
    let state = format!("SELECT state FROM musterd.tasks WHERE id = {uncle}");
    assert_eq!(value(&client, &state).await, "scheduled");
    assert_eq!(value(&client, &format!("SELECT musterd.complete_scope({uncle})")).await, "open");
    assert_eq!(value(&client, &state).await, "queued");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_and_the_end_of_what_is_waited_for_do_not_miss_each_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut schedule = two(&db).await;
    for waits_first in [true, false] {
        let task = value(&client, "SELECT musterd.enqueue('d')").await;
        let wait = format!("SELECT musterd.enqueue_after('u', '{{}}', ARRAY[{task}])");
        let end = format!("SELECT musterd.abort({task})");
        let (first, second) = if waits_first { (&wait, &end) } else { (&end, &wait) };
        schedule.run("a", "BEGIN").await;
        schedule.run("a", first).await.rows();
        schedule.blocks("b", second).await;
        schedule.run("a", "COMMIT").await;
        schedule.resumes("b").await.rows();
        let uncle = "SELECT state FROM musterd.tasks WHERE command = 'u' ORDER BY id DESC LIMIT 1";
        assert_eq!(value(&client, uncle).await, "queued", "the wait came first: {waits_first}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_passes_by_a_task_that_is_being_joined() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut schedule = two(&db).await;
    let join = "SELECT musterd.enqueue('work', dedup_key => 'k')";
    let task = value(&client, join).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", join).await.rows(), std::slice::from_ref(&task));
    let claim = format!(
        "SELECT id FROM musterd.tasks WHERE id = {task} AND state = 'queued' FOR NO KEY UPDATE SKIP LOCKED"
    );
    assert!(
        schedule.run("b", &claim).await.rows().is_empty(),
        "the run that serves it must see what it wrote"
    );
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", &claim).await.rows(), [task]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_two_children_that_end_side_by_side_leave_the_parent_to_the_next_round() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE SCHEMA app; CREATE PROCEDURE app.noop(bigint, jsonb) LANGUAGE plpgsql AS $$ BEGIN END $$;
             SELECT musterd.register_command('noop', 'pt', 'sql', 'app.noop')",
        )
        .await
        .unwrap();
    let parent = value(
        &client,
        "INSERT INTO musterd.task_records (command, state) VALUES ('noop', 'waiting') RETURNING id",
    )
    .await;
    for _ in 0..2 {
        client.batch_execute(&format!("SELECT musterd.spawn('noop', '{{}}', {parent})")).await.unwrap();
    }
    let mut schedule = two(&db).await;
    let one = "CALL musterd.process_tasks('pt', 1)";
    schedule.run("a", "BEGIN").await;
    schedule.run("b", "BEGIN").await;
    schedule.run("a", one).await.rows();
    schedule.run("b", one).await.rows();
    schedule.run("a", "COMMIT").await;
    schedule.run("b", "COMMIT").await;
    let state = format!("SELECT state FROM musterd.tasks WHERE id = {parent}");
    assert_eq!(value(&client, &state).await, "waiting", "each saw the other's child as open");
    client.batch_execute("CALL musterd.process_tasks('pt')").await.unwrap();
    assert_eq!(value(&client, &state).await, "succeeded");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(value(&client, deadlocks).await, "0");
}
