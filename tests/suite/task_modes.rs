//! What a queue runs next: by priority whatever its kind, by scope when it is structured; and nothing waits for ever.

use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use musterd::handler::{Config, Handler, TaskDone, TaskOutcome};
use tokio_postgres::Client;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::tasks::{Asked, SOON, Script, Worker, becomes, end_of, number, text, texts};
use crate::suite::support::wait::within;

/// No poll in a test's time: whoever is to go on must have been woken.
const NO_POLL: &str = "[claim]\npoll_interval = \"10m\"\n";

/// Polls as usual, only sooner.
const POLL: &str = "[claim]\npoll_interval = \"50ms\"\n";

/// `plan` has four children that note when they ran.
const PROCEDURES: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.ran (task_id bigint, parent_id bigint, began timestamptz, ended timestamptz);
    CREATE PROCEDURE app.part(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    DECLARE v_began timestamptz := clock_timestamp();
    BEGIN
        PERFORM pg_sleep(0.02);
        INSERT INTO app.ran SELECT p_task_id, t.parent_id, v_began, clock_timestamp() FROM musterd.tasks t WHERE t.id = p_task_id;
    END $$;
    CREATE PROCEDURE app.plan(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN PERFORM musterd.spawn('part', '{}', p_task_id) FROM generate_series(1, 4); END $$;";

fn structured(more: &str) -> String {
    let sql = |name: &str| {
        format!("[handlers.{name}]\nkind = \"sql\"\nqueue = \"lane\"\nprocedure = \"app.{name}\"\n")
    };
    format!(
        "[queues.lane]\nmode = \"structured\"\nfibers = 2\nblock_size = 3\n{}{}\
         [handlers.pause]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"3ms\"\nqueue = \"lane\"\n\
         [handlers.quick]\nkind = \"builtin\"\nbuiltin = \"noop\"\nqueue = \"lane\"\n{more}",
        sql("part"),
        sql("plan"),
    )
}

async fn prepared() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURES).await.unwrap();
    (db, client)
}

async fn two_replicas(db: &TestDb, toml: &str) -> [Daemon; 2] {
    let replicas = [Daemon::builder(db, toml).start(), Daemon::builder(db, toml).start()];
    for replica in &replicas {
        replica.wait_ready().await;
    }
    replicas
}

/// In one transaction, so that all of it is there when the first fiber looks.
async fn enqueue_all(client: &Client, command: &str, count: usize) -> Vec<i64> {
    let sql =
        format!("SELECT musterd.enqueue('{command}', queue => 'lane') FROM generate_series(1, {count})");
    texts(client, &sql).await.iter().map(|id| id.parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_whose_end_is_being_written_is_waited_for_a_moment() {
    let (_db, client) = prepared().await;
    let parent = number(&client, "SELECT musterd.enqueue('plan', queue => 'lane')").await;
    let family = format!(
        "SELECT musterd.spawn('part', '{{}}', {parent}); SELECT musterd.enqueue('part', queue => 'lane');
         UPDATE musterd.task_records SET state = 'waiting' WHERE id = {parent}"
    );
    client.batch_execute(&family).await.unwrap();
    let focus = "SELECT musterd.focus('lane', ARRAY['part', 'plan'], '{}')";
    assert_eq!(text(&client, focus).await, parent.to_string(), "its child can run");
    let ended = |ago: &str| {
        format!(
            "UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() - interval '{ago}' WHERE parent_id = {parent}"
        )
    };
    client.batch_execute(&ended("0")).await.unwrap();
    assert_eq!(text(&client, focus).await, parent.to_string(), "its end follows");
    // An end that cannot be written holds up no queue.
    client.batch_execute(&ended("1 minute")).await.unwrap();
    assert_eq!(text(&client, focus).await, "", "top-level tasks are next");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_fibers_of_all_replicas_work_on_the_first_scope() {
    let (db, client) = prepared().await;
    let _replicas = two_replicas(&db, &structured(NO_POLL)).await;
    // All of them wait before any is worked on: one that began before an earlier one would rightly not be alone.
    client.batch_execute("SELECT musterd.pause_queue('lane')").await.unwrap();
    let waiting = "INSERT INTO musterd.task_records (command, queue, state) VALUES ('quick', 'lane', 'waiting') RETURNING id";
    let mut parents = Vec::new();
    for _ in 0..4 {
        // Together: a waiting parent without children is over.
        client.batch_execute("BEGIN").await.unwrap();
        let parent = number(&client, waiting).await;
        let children =
            format!("SELECT musterd.spawn('part', '{{}}', {parent}) FROM generate_series(1, 4); COMMIT");
        client.batch_execute(&children).await.unwrap();
        parents.push(parent);
    }
    client.batch_execute("SELECT musterd.resume_queue('lane')").await.unwrap();
    for parent in &parents {
        assert_eq!(end_of(&client, *parent).await, "succeeded");
    }
    // Two scopes were never worked on at once, on whatever replica.
    let overlaps = "SELECT count(*) FROM app.ran a JOIN app.ran b ON a.parent_id < b.parent_id AND a.began < b.ended AND b.began < a.ended";
    assert_eq!(number(&client, overlaps).await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM app.ran").await, 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_the_work_of_their_batchs_parent_or_of_their_batch() {
    let (db, client) = prepared().await;
    let _replicas = two_replicas(&db, &structured(NO_POLL)).await;
    client.batch_execute("SELECT musterd.pause_queue('lane')").await.unwrap();
    let mut scopes = Vec::new();
    for n in 0..4 {
        let parent = "INSERT INTO musterd.task_records (command, queue, state) VALUES ('quick', 'lane', 'waiting') RETURNING id";
        client.batch_execute("BEGIN").await.unwrap();
        let parent = if n % 2 == 0 { Some(number(&client, parent).await) } else { None };
        let rows = format!(
            "SELECT musterd.submit_batch('pause', (SELECT jsonb_agg(n) FROM generate_series(1, 30) n), queue => 'lane', parent_id => {})",
            parent.map_or("NULL".into(), |id| id.to_string())
        );
        let batch = number(&client, &rows).await;
        client.batch_execute("COMMIT").await.unwrap();
        scopes.push(parent.unwrap_or(batch));
    }
    client.batch_execute("SELECT musterd.resume_queue('lane')").await.unwrap();
    for scope in &scopes {
        assert_eq!(end_of(&client, *scope).await, "succeeded");
    }
    // A scope's first row came after another scope's last one, for every two of them.
    let mixed = "WITH b AS (SELECT batch_id, min(finished_at) AS first, max(finished_at) AS last FROM musterd.results GROUP BY 1)
        SELECT count(*) FROM b x JOIN b y ON x.batch_id < y.batch_id AND x.first <= y.last AND y.first <= x.last";
    assert_eq!(number(&client, mixed).await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.results").await, 120);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_with_nothing_to_run_now_does_not_hold_the_queue() {
    let (db, client) = prepared().await;
    let _replicas = two_replicas(&db, &structured(POLL)).await;
    // Its children: one for later, one held, one of a command nobody has; and a batch that is held.
    let parent = number(
        &client,
        "WITH p AS (INSERT INTO musterd.task_records (command, queue, state, priority) VALUES ('quick', 'lane', 'waiting', 1) RETURNING id)
         SELECT id FROM p",
    )
    .await;
    let children = format!(
        "INSERT INTO musterd.task_records (command, parent_id, run_at, state) VALUES
           ('quick', {parent}, now() + interval '1 hour', NULL), ('quick', {parent}, now(), 'held'), ('nobody', {parent}, now(), NULL);
         SELECT musterd.submit_batch('quick', '[1, 2]'::jsonb, parent_id => {parent}, hold => true)"
    );
    client.batch_execute(&children).await.unwrap();
    // Nor do batches that nobody can run: of an unknown command, and of a procedure, which takes no rows.
    for command in ["nobody", "part"] {
        let sql =
            format!("SELECT musterd.submit_batch('{command}', '[1]'::jsonb, queue => 'lane', priority => 1)");
        text(&client, &sql).await;
    }
    let other = enqueue_all(&client, "plan", 1).await[0];
    assert_eq!(end_of(&client, other).await, "succeeded");
    let batch =
        number(&client, "SELECT musterd.submit_batch('quick', '[1, 2, 3]'::jsonb, queue => 'lane')").await;
    assert_eq!(end_of(&client, batch).await, "succeeded");

    // When its time comes, it ends as well.
    let go_on = format!(
        "SELECT musterd.retry_task(id) FROM musterd.tasks WHERE parent_id = {parent} AND state = 'scheduled';
         SELECT musterd.release(id) FROM musterd.tasks WHERE parent_id = {parent} AND state = 'held';
         SELECT musterd.abort(id) FROM musterd.tasks WHERE parent_id = {parent} AND command = 'nobody'"
    );
    client.batch_execute(&go_on).await.unwrap();
    assert_eq!(end_of(&client, parent).await, "failed", "with the child that was aborted");
    let children = format!(
        "SELECT string_agg(state::text, ' ' ORDER BY id) FROM musterd.tasks WHERE parent_id = {parent}"
    );
    assert_eq!(text(&client, &children).await, "succeeded succeeded aborted succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn children_run_in_a_structured_queue_that_is_not_their_parents() {
    let (db, client) = prepared().await;
    let _daemon = Daemon::builder(&db, &structured(NO_POLL)).start();
    let parent = number(&client, "SELECT musterd.enqueue('noop', delay => '1 hour')").await;
    let child = format!(
        "INSERT INTO musterd.task_records (command, parent_id, queue) VALUES ('quick', {parent}, 'lane')"
    );
    client.batch_execute(&child).await.unwrap();
    text(&client, &format!("SELECT musterd.retry_task({parent})")).await;
    assert_eq!(end_of(&client, parent).await, "succeeded");
}

/// Remembers what it ran, in order; the first thing waits at the gate.
fn recorder(gate: &Gate) -> (Arc<dyn Handler>, Arc<Mutex<Vec<Asked>>>) {
    let (gate, ran) = (gate.clone(), Arc::new(Mutex::new(Vec::new())));
    let list = Arc::clone(&ran);
    let answer = move |asked: Asked| -> BoxFuture<'static, TaskOutcome> {
        let (gate, list) = (gate.clone(), Arc::clone(&list));
        async move {
            list.lock().unwrap().push(asked);
            gate.pass().await;
            TaskOutcome::Done(TaskDone::default())
        }
        .boxed()
    };
    (Arc::new(Script(answer)), ran)
}

fn letter(asked: &Asked, names: &[(i64, char)]) -> char {
    let id = match asked {
        Asked::Task { id, .. } => id,
        Asked::Row { batch, .. } => batch,
    };
    names.iter().find(|(known, _)| known == id).map_or('-', |(_, name)| *name)
}

/// One fiber, one row to a block, and no poll: what runs next is decided for each row and task anew.
const ONE_BY_ONE: &str = "[queues.default]\nfibers = 1\nblock_size = 1\n[claim]\npoll_interval = \"10m\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn the_better_priority_runs_first_whatever_its_kind() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let (handler, ran) = recorder(&gate);
    let worker = Worker::start(&db, ONE_BY_ONE, vec![("step", handler, Config::default())]).await;
    let first = number(&client, "SELECT musterd.enqueue('step')").await;
    within(SOON, gate.entered_by(1)).await;
    // All at once, while the only fiber is busy.
    let all = "SELECT concat_ws(' ', musterd.submit_batch('step', '[1, 2, 3]'::jsonb, priority => 50),
                      musterd.enqueue('step', priority => 100), musterd.enqueue('step', priority => 10),
                      musterd.submit_batch('step', '[1, 2]'::jsonb, priority => 5), musterd.enqueue('step', priority => 60))";
    let ids: Vec<i64> = text(&client, all).await.split(' ').map(|id| id.parse().unwrap()).collect();
    gate.open();
    for id in &ids {
        assert_eq!(end_of(&client, *id).await, "succeeded");
    }
    let names: Vec<(i64, char)> = [first].iter().chain(&ids).copied().zip("0bDaAC".chars()).collect();
    let order: String = ran.lock().unwrap().iter().map(|asked| letter(asked, &names)).collect();
    assert_eq!(order, "0AAabbbCD", "{names:?}");
    worker.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_equal_priority_tasks_and_rows_take_turns() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = Gate::closed();
    let (handler, ran) = recorder(&gate);
    let worker = Worker::start(&db, ONE_BY_ONE, vec![("step", handler, Config::default())]).await;
    text(&client, "SELECT musterd.enqueue('step')").await;
    within(SOON, gate.entered_by(1)).await;
    client
        .batch_execute(
            "SELECT musterd.submit_batch('step', (SELECT jsonb_agg(n) FROM generate_series(1, 8) n));
             SELECT musterd.enqueue('step') FROM generate_series(1, 8)",
        )
        .await
        .unwrap();
    gate.open();
    becomes(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'", "10").await;
    let half = ran.lock().unwrap()[1..9].to_vec();
    let tasks = half.iter().filter(|asked| matches!(asked, Asked::Task { .. })).count();
    assert!((2..=6).contains(&tasks), "{half:?}");
    worker.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_starves_behind_an_endless_better_priority() {
    nothing_starves("parallel").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_starves_in_a_structured_queue() {
    nothing_starves("structured").await;
}

async fn nothing_starves(mode: &str) {
    let db = TestDb::new().await;
    let client = Arc::new(db.client().await);
    let feeder = Arc::clone(&client);
    // Every urgent task brings the next one, and an urgent row.
    let answer = move |asked: Asked| -> BoxFuture<'static, TaskOutcome> {
        let feeder = Arc::clone(&feeder);
        async move {
            if matches!(asked, Asked::Task { .. }) {
                let next = "SELECT musterd.enqueue('urgent', priority => 1), musterd.submit_batch('urgent', '[1]'::jsonb, priority => 1)";
                feeder.batch_execute(next).await.unwrap();
            }
            TaskOutcome::Done(TaskDone::default())
        }
        .boxed()
    };
    let toml = format!("[queues.default]\nfibers = 1\nblock_size = 1\nmode = \"{mode}\"\n{POLL}");
    let worker =
        Worker::start(&db, &toml, vec![("urgent", Arc::new(Script(answer)), Config::default())]).await;
    let stream = "SELECT musterd.enqueue('urgent', priority => 1) FROM generate_series(1, 3)";
    client.batch_execute(stream).await.unwrap();
    let task = number(&client, "SELECT musterd.enqueue('noop', priority => 1000)").await;
    let batch =
        number(&client, "SELECT musterd.submit_batch('noop', '[1, 2]'::jsonb, priority => 1000)").await;
    assert_eq!(end_of(&client, task).await, "succeeded");
    assert_eq!(end_of(&client, batch).await, "succeeded");
    let waiting = "SELECT count(*) > 0 FROM musterd.tasks WHERE command = 'urgent' AND state NOT IN ('succeeded', 'failed')";
    assert_eq!(text(&client, waiting).await, "t", "there was always something more urgent");
    drop(worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_better_task_that_somebody_has_locked_does_not_hold_the_rows() {
    let db = TestDb::new().await;
    let (client, user) = (db.client().await, db.client().await);
    for mode in ["parallel", "structured"] {
        let urgent = number(&client, "SELECT musterd.enqueue('noop', priority => 1, dedup_key => 'k')").await;
        // Joined by a transaction that takes its time: no claim may have it until that ends.
        user.batch_execute("BEGIN; SELECT musterd.enqueue('noop', priority => 1, dedup_key => 'k')")
            .await
            .unwrap();
        let toml = format!("[queues.default]\nmode = \"{mode}\"\n{NO_POLL}");
        let daemon = Daemon::builder(&db, &toml).start();
        let batch = number(&client, "SELECT musterd.submit_batch('noop', '[1, 2]'::jsonb)").await;
        assert_eq!(end_of(&client, batch).await, "succeeded");
        assert_eq!(
            text(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {urgent}")).await,
            "queued"
        );
        user.batch_execute("COMMIT; SELECT pg_notify('musterd_wake', 'default')").await.unwrap();
        assert_eq!(end_of(&client, urgent).await, "succeeded");
        drop(daemon);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_holds_on_every_replica_and_over_restarts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = format!("[queues.side]\nfibers = 1\n{POLL}");
    let mut replicas = two_replicas(&db, &toml).await;
    client.batch_execute("SELECT musterd.pause_queue('default')").await.unwrap();
    let task = number(&client, "SELECT musterd.enqueue('noop')").await;
    let batch = number(&client, "SELECT musterd.submit_batch('noop', '[1, 2]'::jsonb)").await;
    replicas[0] = Daemon::builder(&db, &toml).start();
    replicas[0].wait_ready().await;
    // Both replicas have claimed from the other queue since, more than once.
    let workers = "SELECT count(DISTINCT worker) FROM musterd.workers_seen";
    client
        .batch_execute(
            "CREATE TABLE musterd.workers_seen (worker text);
             CREATE FUNCTION musterd.see() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN INSERT INTO musterd.workers_seen VALUES (NEW.worker); RETURN NULL; END $$;
             CREATE TRIGGER see AFTER INSERT ON musterd.task_claims FOR EACH ROW EXECUTE FUNCTION musterd.see()",
        )
        .await
        .unwrap();
    while number(&client, workers).await < 2 {
        let side = number(
            &client,
            "SELECT max(musterd.enqueue('noop', queue => 'side')) FROM generate_series(1, 5)",
        )
        .await;
        assert_eq!(end_of(&client, side).await, "succeeded");
    }
    let states = format!(
        "SELECT string_agg(state::text, ' ' ORDER BY id) FROM musterd.tasks WHERE id IN ({task}, {batch})"
    );
    assert_eq!(text(&client, &states).await, "queued running");
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.blocks").await, 0);
    client.batch_execute("SELECT musterd.resume_queue('default')").await.unwrap();
    becomes(&client, &states, "succeeded succeeded").await;
}
