//! Tasks meet at a row: spawn, finish, abort, retry and the end of a parent, in every order that matters.

use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::tasks::{number, text, texts};

fn token(id: i64) -> String {
    format!("00000000-0000-0000-0000-{id:012}")
}

/// A task in any state; a running one is held with [`token`].
pub(crate) async fn task(db: &TestDb, columns: &str, values: &str) -> i64 {
    let client = db.client().await;
    let stored = values.replace("'running'", "'queued'");
    let sql =
        format!("INSERT INTO musterd.task_records (command, {columns}) VALUES ('c', {stored}) RETURNING id");
    let id = number(&client, &sql).await;
    if stored != values {
        client.batch_execute(&format!("SELECT guard.claim({id}, '{}')", token(id))).await.unwrap();
    }
    id
}

/// A waiting parent and its children in these states.
pub(crate) async fn family(db: &TestDb, on_child_failure: &str, children: &[&str]) -> (i64, Vec<i64>) {
    let parent = task(db, "state, on_child_failure", &format!("'waiting', '{on_child_failure}'")).await;
    let mut ids = Vec::new();
    for state in children {
        ids.push(task(db, "state, parent_id", &format!("'{state}', {parent}")).await);
    }
    (parent, ids)
}

pub(crate) fn finish_with(id: i64, outcome: &str, spawn: &str, after: &str) -> String {
    format!(
        "SELECT f.task_state FROM musterd.finish_tasks(ARRAY[
           ROW({id}, '{}', '{outcome}', NULL, NULL, 0, {spawn}, {after})::musterd.task_outcome]) f",
        token(id)
    )
}

fn finish(id: i64, outcome: &str) -> String {
    finish_with(id, outcome, "NULL", "NULL")
}

pub(crate) fn complete(id: i64) -> String {
    format!("SELECT musterd.complete_scope({id})")
}

async fn state(db: &TestDb, id: i64) -> String {
    text(&db.client().await, &format!("SELECT state FROM musterd.tasks WHERE id = {id}")).await
}

async fn two(db: &TestDb) -> Schedule {
    Schedule::new(db, &["a", "b"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_comes_first_keeps_its_parent_open() {
    let db = TestDb::new().await;
    let (parent, _) = family(&db, "wait", &["succeeded"]).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &format!("SELECT musterd.spawn('c', '{{}}', {parent})")).await.rows();
    schedule.blocks("b", &complete(parent)).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["open"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_ends_first_takes_no_more_children() {
    let db = TestDb::new().await;
    let (parent, _) = family(&db, "wait", &["succeeded"]).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["completed"]);
    schedule.blocks("b", &format!("SELECT musterd.spawn('c', '{{}}', {parent})")).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.sqlstate(), "23514");
    let children = format!("SELECT count(*) FROM musterd.tasks WHERE parent_id = {parent}");
    assert_eq!(number(&db.client().await, &children).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_later_of_two_last_children_ends_the_parent() {
    let db = TestDb::new().await;
    let (parent, children) = family(&db, "wait", &["running", "running"]).await;
    let mut schedule = two(&db).await;
    for (session, child) in [("a", children[0]), ("b", children[1])] {
        schedule.run(session, "BEGIN").await;
        assert_eq!(schedule.run(session, &finish(child, "succeeded")).await.rows(), ["succeeded"]);
    }
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["open"]);
    schedule.run("b", "COMMIT").await;
    assert_eq!(schedule.run("b", &complete(parent)).await.rows(), ["completed"]);
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["ended"]);
    assert_eq!(state(&db, parent).await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_who_look_after_the_last_child_end_the_parent_once() {
    let db = TestDb::new().await;
    let (parent, _) = family(&db, "wait", &["succeeded", "failed"]).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["completed"]);
    assert_eq!(schedule.run("b", &complete(parent)).await.rows(), ["locked"]);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.run("b", &complete(parent)).await.rows(), ["ended"]);
    assert_eq!(state(&db, parent).await, "failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uncle_starts_with_the_second_of_two_that_end_at_once() {
    let db = TestDb::new().await;
    let one = task(&db, "state", "'running'").await;
    let other = task(&db, "state", "'running'").await;
    let client = db.client().await;
    let uncle =
        number(&client, &format!("SELECT musterd.enqueue_after('c', '{{}}', ARRAY[{one}, {other}])")).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &finish(one, "succeeded")).await.rows();
    // It waits for nobody; the row without a state is the uncle to check after the commit.
    assert_eq!(schedule.run("b", &finish(other, "failed")).await.rows(), ["failed", ""]);
    assert_eq!(state(&db, uncle).await, "scheduled");
    schedule.run("a", "COMMIT").await;
    assert_eq!(text(&client, &complete(uncle)).await, "open");
    assert_eq!(state(&db, uncle).await, "queued");
    assert!(texts(&client, "SELECT 1 FROM musterd.task_waits").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_never_collides_with_a_newer_task_of_its_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let enqueue = "SELECT musterd.enqueue('c', dedup_key => 'k')";
    let claimed = task(&db, "state, dedup_key", "'running', 'k'").await;
    let newer = number(&client, enqueue).await;
    assert_ne!(newer, claimed);
    assert_eq!(text(&client, &finish(claimed, "retry")).await, "scheduled");
    assert_eq!(number(&client, enqueue).await, newer, "the newer one still waits for its first claim");

    // By hand, too, and when the task was aborted before anybody claimed it.
    text(&client, &format!("SELECT musterd.abort({newer})")).await;
    let newest = number(&client, enqueue).await;
    assert_eq!(text(&client, &format!("SELECT musterd.retry_task({newer})")).await, "queued");
    assert_eq!(number(&client, enqueue).await, newest);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_comes_first_stands_and_an_abort_that_comes_first_refuses_it() {
    let db = TestDb::new().await;
    let mut schedule = two(&db).await;
    let late = task(&db, "state", "'running'").await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &finish(late, "succeeded")).await.rows();
    schedule.blocks("b", &format!("SELECT musterd.abort({late})")).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["succeeded"]);

    let early = task(&db, "state", "'running'").await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &format!("SELECT musterd.abort({early})")).await.rows(), ["aborted"]);
    let spawning =
        finish_with(early, "succeeded", r#"'[{"command": "child"}]'"#, r#"'[{"command": "uncle"}]'"#);
    schedule.blocks("b", &spawning).await;
    schedule.run("a", "COMMIT").await;
    assert!(schedule.resumes("b").await.rows().is_empty(), "refused");
    assert_eq!(state(&db, early).await, "aborted");
    let made = "SELECT count(*) FROM musterd.tasks WHERE command IN ('child', 'uncle')";
    assert_eq!(number(&db.client().await, made).await, 0);
}

/// S2: it was judged dead, its task was freed and claimed again, and now it comes with what it has done.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_of_an_earlier_holder_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = task(&db, "state", "'running'").await;
    let children = r#"'[{"command": "child"}]'"#;
    let late = finish_with(id, "succeeded", children, r#"'[{"command": "uncle"}]'"#)
        .replace(&token(id), &token(4711));
    assert!(texts(&client, &late).await.is_empty(), "refused");
    let held = format!(
        "SELECT t.state, k.token FROM musterd.tasks t JOIN musterd.task_claims k ON k.tasks @> t.id WHERE t.id = {id}"
    );
    assert_eq!(text(&client, &held).await, format!("running|{}", token(id)));
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.tasks").await, 1, "nothing was spawned");
    assert_eq!(text(&client, &finish(id, "failed")).await, "failed", "its holder's word counts");
}

/// S10: its handler has not returned yet, and may have more children.
/// A retry gives the task a new ticket while the claim of the attempt before is still there.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_of_a_claim_that_a_new_ticket_voids_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = task(&db, "state", "'running'").await;
    client
        .batch_execute(&format!("SELECT musterd.abort({id}); SELECT musterd.retry_task({id})"))
        .await
        .unwrap();
    let held = format!("SELECT count(*) FROM musterd.task_claims WHERE tasks @> {id}::bigint");
    assert_eq!(number(&client, &held).await, 1);
    assert_eq!(texts(&client, &finish(id, "succeeded")).await, [""; 0]);
    assert_eq!(state(&db, id).await, "queued");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_still_runs_does_not_end_with_its_children() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = task(&db, "state", "'running'").await;
    task(&db, "state, parent_id", &format!("'succeeded', {parent}")).await;
    let uncle = number(&client, &format!("SELECT musterd.enqueue_after('c', '{{}}', ARRAY[{parent}])")).await;
    assert_eq!(text(&client, &complete(parent)).await, "open");
    assert_eq!((state(&db, parent).await, state(&db, uncle).await), ("running".into(), "scheduled".into()));
    assert_eq!(text(&client, &finish(parent, "succeeded")).await, "waiting");
    assert_eq!(text(&client, &complete(parent)).await, "completed");
    assert_eq!((state(&db, parent).await, state(&db, uncle).await), ("succeeded".into(), "queued".into()));
}

/// S12: a child's uncle is its parent's sibling, and waits for the whole scope.
#[tokio::test(flavor = "multi_thread")]
async fn an_uncle_that_a_child_asks_for_waits_for_the_scope() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (parent, children) = family(&db, "wait", &["running", "running"]).await;
    let asking = finish_with(children[0], "succeeded", "NULL", r#"'[{"command": "uncle"}]'"#);
    assert_eq!(text(&client, &asking).await, "succeeded");
    let uncle = number(&client, "SELECT id FROM musterd.tasks WHERE command = 'uncle'").await;
    assert_eq!(text(&client, &complete(parent)).await, "open");
    assert_eq!(state(&db, uncle).await, "scheduled");
    assert_eq!(text(&client, &finish(children[1], "failed")).await, "failed");
    assert_eq!(state(&db, uncle).await, "scheduled", "the last child has ended, the scope has not");
    assert_eq!(text(&client, &complete(parent)).await, "completed");
    assert_eq!(state(&db, uncle).await, "queued");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_reaches_for_the_parent_takes_it_before_the_child() {
    for (spawn, after) in [(r#"'[{"command": "sibling"}]'"#, "NULL"), ("NULL", r#"'[{"command": "uncle"}]'"#)]
    {
        let db = TestDb::new().await;
        let (parent, children) = family(&db, "abort_siblings", &["failed", "running"]).await;
        let mut schedule = two(&db).await;
        schedule.run("a", "BEGIN").await;
        schedule
            .run("a", &format!("SELECT id FROM musterd.tasks WHERE id = {parent} FOR NO KEY UPDATE"))
            .await
            .rows();
        schedule.blocks("b", &finish_with(children[1], "succeeded", spawn, after)).await;
        // Needs the child, which the other must not hold while it waits for the parent: a deadlock otherwise.
        assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["completed"]);
        schedule.run("a", "COMMIT").await;
        assert!(schedule.resumes("b").await.rows().is_empty(), "aborted by its sibling's failure");
        assert_eq!(state(&db, children[1]).await, "aborted");
        assert_eq!(state(&db, parent).await, "failed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_ends_while_its_siblings_are_aborted_keeps_its_end() {
    let db = TestDb::new().await;
    let (parent, children) = family(&db, "abort_siblings", &["failed", "running", "queued"]).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &finish(children[1], "succeeded")).await.rows();
    schedule.blocks("b", &complete(parent)).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["completed"]);
    assert_eq!(state(&db, children[1]).await, "succeeded");
    assert_eq!(state(&db, children[2]).await, "aborted");
    assert_eq!(state(&db, parent).await, "failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_tried_again_by_hand_and_the_end_of_its_parent_exclude_each_other() {
    let db = TestDb::new().await;
    let mut schedule = two(&db).await;
    let (parent, children) = family(&db, "wait", &["failed"]).await;
    let again = format!("SELECT musterd.retry_task({})", children[0]);
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["completed"]);
    schedule.blocks("b", &again).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.sqlstate(), "23514");

    let (parent, children) = family(&db, "wait", &["failed"]).await;
    schedule.run("a", "BEGIN").await;
    schedule.run("a", &format!("SELECT musterd.retry_task({})", children[0])).await.rows();
    schedule.blocks("b", &complete(parent)).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["open"]);
}

/// What a worker tells the session in which it runs a procedure.
fn in_the_attempt_of(id: i64) -> String {
    format!("BEGIN; SET LOCAL musterd.task_id = '{id}'; SET LOCAL musterd.task_token = '{}'", token(id))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_does_not_wait_for_a_procedure_that_has_spawned() {
    let db = TestDb::new().await;
    let mut schedule = two(&db).await;
    let parent = task(&db, "state", "'running'").await;
    let (_, children) = family(&db, "wait", &["running"]).await;
    let (sibling_of, scope) = (children[0], "(SELECT parent_id FROM musterd.tasks WHERE id = $)");
    for (running, spawn_to) in
        [(parent, parent.to_string()), (sibling_of, scope.replace('$', &sibling_of.to_string()))]
    {
        schedule.run("a", &in_the_attempt_of(running)).await;
        schedule.run("a", &format!("SELECT musterd.spawn('spawned', '{{}}', {spawn_to})")).await.rows();
        let uncle = format!("SELECT musterd.enqueue_after('uncle', '{{}}', ARRAY[{spawn_to}])");
        schedule.run("a", &uncle).await.rows();
        let abort = schedule.run("b", &format!("SELECT musterd.abort({running})")).await;
        assert_eq!(abort.rows(), ["aborted"]);
        assert!(schedule.run("a", &finish(running, "succeeded")).await.rows().is_empty(), "refused");
        schedule.run("a", "ROLLBACK").await;
        let made = "SELECT count(*) FROM musterd.tasks WHERE command IN ('spawned', 'uncle')";
        assert_eq!(number(&db.client().await, made).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_only_says_that_it_runs_a_task_is_made_to_wait_like_all_others() {
    let db = TestDb::new().await;
    let (parent, _) = family(&db, "wait", &["succeeded"]).await;
    let mut schedule = two(&db).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &complete(parent)).await.rows(), ["completed"]);
    schedule.run("b", &in_the_attempt_of(parent)).await;
    schedule.blocks("b", &format!("SELECT musterd.spawn('c', '{{}}', {parent})")).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.sqlstate(), "23514");
    schedule.run("b", "ROLLBACK").await;

    // It runs, and somebody else has it.
    let running = task(&db, "state", "'running'").await;
    schedule.run("b", &in_the_attempt_of(running).replace(&token(running), &token(4711))).await;
    schedule.run("b", &format!("SELECT musterd.spawn('c', '{{}}', {running})")).await.rows();
    schedule.blocks("a", &finish(running, "succeeded")).await;
    schedule.run("b", "COMMIT").await;
    assert_eq!(schedule.resumes("a").await.rows(), ["waiting"], "for the child that came first");
}

/// Sessions that claim, finish, spawn siblings and uncles, abort and complete without any order between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_deadlocks_whatever_ends_beside_whatever() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "INSERT INTO musterd.task_records (command, state, on_child_failure)
             SELECT 'p', 'waiting', CASE WHEN n % 2 = 0 THEN 'wait' ELSE 'abort_siblings' END FROM generate_series(1, 30) n;
             SELECT musterd.spawn('c', '{}', p.id) FROM musterd.tasks p, generate_series(1, 6) WHERE p.command = 'p'",
        )
        .await
        .unwrap();
    let mut sessions = tokio::task::JoinSet::new();
    for session in 0..4_i32 {
        let client = db.client().await;
        sessions.spawn(async move { drive(&client, session).await });
    }
    sessions.join_all().await;
    let open = "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed', 'aborted')";
    assert_eq!(number(&client, open).await, 0);
    // The statistics of a session reach the table when it ends, or a little later.
    let deadlocks =
        "SELECT pg_stat_clear_snapshot(), deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(texts(&client, deadlocks).await, ["|0"]);
}

/// Claims a few children at a time, ends them in one transaction, then looks at their parents; until nothing is left.
async fn drive(client: &tokio_postgres::Client, session: i32) {
    const CLAIM: &str = "SELECT count(*) FROM musterd.claim_tasks('default', 'w', ARRAY[gen_random_uuid(), gen_random_uuid()],
               '{c,u}', '{5,5}', '{}')";
    // Answers the uncles to check after the commit, as a worker does.
    const FINISH: &str = "SELECT f.scope_id FROM musterd.finish_tasks(ARRAY (
           SELECT ROW (t.id, k.token, CASE WHEN random() < 0.1 THEN 'failed' ELSE 'succeeded' END, NULL, NULL, 0,
                       CASE WHEN random() < 0.2 THEN '[{\"command\": \"c\"}]'::jsonb END,
                       CASE WHEN random() < 0.2 THEN '[{\"command\": \"u\", \"dedup_key\": \"u\"}]'::jsonb END)::musterd.task_outcome
             FROM musterd.task_claims k JOIN musterd.task_records t ON k.tasks @> t.id AND k.number = t.ticket
            WHERE t.state = 'queued' ORDER BY random() LIMIT 5)) f WHERE f.task_id IS NULL";
    let ok = |answer: Result<Vec<tokio_postgres::SimpleQueryMessage>, tokio_postgres::Error>| {
        if let Err(error) = answer {
            panic!("session {session}: {error:?}");
        }
    };
    loop {
        ok(client.simple_query(CLAIM).await);
        let uncles = texts(client, FINISH).await;
        let abort =
            "SELECT musterd.abort(id) FROM musterd.tasks WHERE state = 'running' ORDER BY random() LIMIT 1";
        if session == 0 && rand::random::<f64>() < 0.2 {
            ok(client.simple_query(abort).await);
        }
        for parent in
            texts(client, "SELECT id FROM musterd.tasks WHERE state = 'waiting' ORDER BY random() LIMIT 3")
                .await
                .into_iter()
                .chain(uncles)
        {
            ok(client.simple_query(&format!("SELECT musterd.complete_scope({parent})")).await);
        }
        let left = "SELECT count(*) FROM musterd.tasks WHERE state NOT IN ('succeeded', 'failed', 'aborted')";
        if number(client, left).await == 0 {
            return;
        }
    }
}
