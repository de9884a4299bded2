//! Parents and children: what a handler spawns, what a scope waits for, and how often anything ends.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use musterd::handler::{Config, Spawn, TaskDone, TaskOutcome};
use musterd::json::Json;
use tokio_postgres::Client;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{
    Asked, QUICK, Script, Worker, becomes, end_of, field, number, text, texts,
};
use crate::suite::support::wait::eventually;

fn child(command: &str, key: Option<&str>) -> Spawn {
    Spawn { command: command.into(), child_key: key.map(str::to_owned), ..Spawn::default() }
}

fn done(spawn: Vec<Spawn>, after: Vec<Spawn>) -> TaskOutcome {
    TaskOutcome::Done(TaskDone { result: Some(Json::from_text("{\"planned\": true}")), spawn, after })
}

/// A handler in Rust: `plan` fails once, then has children and an uncle; its first child has a sibling.
fn planner() -> Arc<Script<impl Fn(Asked) -> BoxFuture<'static, TaskOutcome> + Send + Sync + 'static>> {
    Arc::new(Script(|asked: Asked| -> BoxFuture<'static, TaskOutcome> {
        let Asked::Task { attempt, payload, .. } = asked else { panic!("a row") };
        async move {
            match payload.as_str() {
                "\"twice\"" if attempt == 1 => TaskOutcome::Retry { error: "not yet".into(), after: None },
                "\"twice\"" => done(
                    vec![child("echo", Some("a")), child("echo", Some("a")), child("noop", None)],
                    vec![],
                ),
                "\"bad\"" => done(vec![child("", None)], vec![]),
                "\"sibling\"" => done(vec![child("noop", Some("late"))], vec![]),
                _ => {
                    let sibling =
                        Spawn { payload: Some(Json::from_text("\"sibling\"")), ..child("plan", None) };
                    let uncle = Spawn { dedup_key: Some("u".into()), ..child("noop", None) };
                    done(vec![sibling, child("noop", None)], vec![uncle.clone(), uncle])
                }
            }
        }
        .boxed()
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_in_rust_has_children_siblings_and_uncles() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = Worker::start(&db, QUICK, vec![("plan", planner(), Config::default())]).await;
    let parent = number(&client, "SELECT musterd.enqueue('plan', '{}')").await;
    assert_eq!(end_of(&client, parent).await, "succeeded");
    assert_eq!(field(&client, parent, "result").await, "{\"planned\": true}");
    let children =
        format!("SELECT command, state, child_key FROM musterd.tasks WHERE parent_id = {parent} ORDER BY id");
    assert_eq!(
        texts(&client, &children).await,
        ["plan|succeeded|", "noop|succeeded|", "noop|succeeded|late"]
    );
    // One uncle, and not before the scope's end.
    let uncle = number(&client, "SELECT id FROM musterd.tasks WHERE dedup_key = 'u'").await;
    assert_eq!(end_of(&client, uncle).await, "succeeded");
    let order = format!(
        "SELECT u.claimed_at >= p.finished_at AND p.finished_at >= max(c.finished_at)
           FROM musterd.tasks u, musterd.tasks p JOIN musterd.tasks c ON c.parent_id = p.id
          WHERE u.id = {uncle} AND p.id = {parent} GROUP BY u.claimed_at, p.finished_at"
    );
    assert_eq!(text(&client, &order).await, "t");

    let again = number(&client, "SELECT musterd.enqueue('plan', '\"twice\"')").await;
    assert_eq!(end_of(&client, again).await, "succeeded");
    assert_eq!(
        number(&client, &format!("SELECT count(*) FROM musterd.tasks WHERE parent_id = {again}")).await,
        2
    );
    assert_eq!(field(&client, again, "attempt").await, "2");

    // What cannot be spawned fails its own task and no other.
    let ids = texts(
        &client,
        "SELECT musterd.enqueue('plan', p) FROM unnest('{\"\\\"bad\\\"\", \"\\\"twice\\\"\"}'::jsonb[]) p",
    )
    .await;
    assert_eq!(end_of(&client, ids[0].parse().unwrap()).await, "failed");
    assert_eq!(end_of(&client, ids[1].parse().unwrap()).await, "succeeded");
    worker.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_waits_for_a_batch_that_is_its_child() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE SCHEMA app;
             CREATE PROCEDURE app.load(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
             BEGIN
                 PERFORM musterd.submit_batch(p_payload ->> 'command', '[1, 2, 3]'::jsonb, parent_id => p_task_id, max_attempts => 1);
             END $$",
        )
        .await
        .unwrap();
    let toml = format!("{QUICK}[handlers.load]\nkind = \"sql\"\nprocedure = \"app.load\"\n");
    let _daemon = Daemon::builder(&db, &toml).start();
    // From a procedure: a batch that succeeds, one that fails, one that is empty of handlers' time but not of rows.
    for (command, end) in [("echo", "succeeded"), ("fail", "failed")] {
        let id =
            number(&client, &format!("SELECT musterd.enqueue('load', '{{\"command\": \"{command}\"}}')"))
                .await;
        assert_eq!(end_of(&client, id).await, end);
        let batch = format!("SELECT t.state, p.rows, p.finished_at <= w.finished_at FROM musterd.tasks t
             JOIN musterd.batch_progress p USING (id) JOIN musterd.tasks w ON w.id = t.parent_id WHERE t.parent_id = {id}");
        assert_eq!(text(&client, &batch).await, format!("{end}|3|t"));
    }
    // From outside, while the parent is yet to run; with an empty one beside it.
    let parent = number(&client, "SELECT musterd.enqueue('noop', delay => '1 hour')").await;
    for rows in ["[1, 2]", "[]"] {
        text(
            &client,
            &format!("SELECT musterd.submit_batch('noop', '{rows}'::jsonb, parent_id => {parent})"),
        )
        .await;
    }
    text(&client, &format!("SELECT musterd.retry_task({parent})")).await;
    assert_eq!(end_of(&client, parent).await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_done_runs_once_its_batch_has_ended_also_when_the_process_dies_around_that_commit() {
    for failpoint in ["complete.counted", "complete.committed"] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let batch = number(&client, "SELECT musterd.submit_batch('noop', '[1, 2, 3]'::jsonb, on_done => 'echo', context => '{\"a\": 1}')").await;
        let dying =
            Daemon::builder(&db, QUICK).env("MUSTERD_FAILPOINTS", &format!("{failpoint}=1*abort")).start();
        dying.wait_exit(crate::suite::support::tasks::SOON).await;
        let key = format!("batch/{batch}/1/done");
        let tasks = format!("SELECT count(*) FROM musterd.tasks WHERE idempotency_key = '{key}'");
        let ended = failpoint == "complete.committed";
        assert_eq!(number(&client, &tasks).await, i64::from(ended), "{failpoint}");
        let _living = Daemon::builder(&db, QUICK).start();
        assert_eq!(end_of(&client, batch).await, "succeeded");
        let id =
            number(&client, &format!("SELECT id FROM musterd.tasks WHERE idempotency_key = '{key}'")).await;
        assert_eq!(end_of(&client, id).await, "succeeded");
        let told = "result ->> 'batch_id' || ' ' || (result ->> 'state') || ' ' || (result ->> 'succeeded') || ' ' || (result -> 'context' ->> 'a')";
        assert_eq!(field(&client, id, told).await, format!("{batch} succeeded 3 1"));
        let order = format!(
            "SELECT d.claimed_at >= b.finished_at FROM musterd.tasks d, musterd.tasks b WHERE d.id = {id} AND b.id = {batch}"
        );
        assert_eq!(text(&client, &order).await, "t");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_failure_aborts_the_siblings_when_the_parent_asked_for_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = format!(
        "{QUICK}[handlers.no]\nkind = \"builtin\"\nbuiltin = \"fail\"\nfailure = \"final\"\n\
                        [handlers.long]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"1h\"\n"
    );
    let _daemon = Daemon::builder(&db, &toml).start();
    let parent = number(
        &client,
        "SELECT musterd.enqueue('noop', delay => '1 hour', on_child_failure => 'abort_siblings')",
    )
    .await;
    client
        .batch_execute(&format!(
            "SELECT musterd.spawn('long', '{{}}', {parent}) FROM generate_series(1, 3);
             SELECT musterd.submit_batch('long', '[1, 2]'::jsonb, parent_id => {parent})"
        ))
        .await
        .unwrap();
    let running =
        format!("SELECT count(*) FROM musterd.tasks WHERE parent_id = {parent} AND worker IS NOT NULL");
    becomes(&client, &running, "3").await;
    becomes(&client, "SELECT count(*) > 0 FROM musterd.blocks", "t").await;
    text(&client, &format!("SELECT musterd.retry_task({parent})")).await;
    text(&client, &format!("SELECT musterd.spawn('no', '{{}}', {parent})")).await;
    assert_eq!(end_of(&client, parent).await, "failed");
    let children =
        format!("SELECT state, count(*) FROM musterd.tasks WHERE parent_id = {parent} GROUP BY 1 ORDER BY 1");
    assert_eq!(texts(&client, &children).await, ["failed|1", "aborted|4"]);
    // Their fibers are free again.
    let id = number(&client, "SELECT musterd.enqueue('noop')").await;
    assert_eq!(end_of(&client, id).await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_task_is_cancelled_by_its_abort_and_by_its_timeout() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Nobody but the abort itself tells the only fiber to let go.
    let toml = format!(
        "{QUICK}[handlers.long]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nduration = \"1h\"\n[queues.default]\nfibers = 1\n\
         [liveness]\nreconcile_interval = \"1h\"\n"
    );
    let daemon = Daemon::builder(&db, &toml).start();
    let id = number(&client, "SELECT musterd.enqueue('long')").await;
    becomes(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {id}"), "running").await;
    assert_eq!(text(&client, &format!("SELECT musterd.abort({id})")).await, "aborted");
    let id = number(&client, "SELECT musterd.enqueue('long', timeout => '50ms', max_attempts => 2)").await;
    assert_eq!(end_of(&client, id).await, "failed");
    assert_eq!(field(&client, id, "attempt || ' ' || error").await, "2 ran longer than its timeout of 50ms");
    drop(daemon);
}

/// Every task that ends leaves a line; one that ends twice leaves two.
const AUDIT: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.ends (task_id bigint, state text);
    CREATE FUNCTION app.note_end() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO app.ends VALUES (NEW.id, NEW.state); RETURN NULL; END $$;
    CREATE TRIGGER note_end AFTER UPDATE ON musterd.task_records FOR EACH ROW
        WHEN (NEW.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION app.note_end();
    CREATE TABLE app.effects (task_id bigint);
    CREATE PROCEDURE app.part(p_task_id bigint, p_payload jsonb) LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (p_task_id) $$;
    CREATE PROCEDURE app.plan(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO app.effects VALUES (p_task_id);
        PERFORM musterd.spawn('part', '{}', p_task_id) FROM generate_series(1, 8);
    END $$;";

async fn families(parents: i64, patience: std::time::Duration) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(AUDIT).await.unwrap();
    let toml = "[handlers.plan]\nkind = \"sql\"\nprocedure = \"app.plan\"\n[handlers.part]\nkind = \"sql\"\nprocedure = \"app.part\"\n";
    let replicas: Vec<Daemon> = (0..3).map(|_| Daemon::builder(&db, toml).log("warn").start()).collect();
    for replica in &replicas {
        replica.wait_ready().await;
    }
    let began = Instant::now();
    client
        .batch_execute(&format!("SELECT count(musterd.enqueue('plan')) FROM generate_series(1, {parents})"))
        .await
        .unwrap();
    let all = parents * 9;
    eventually(patience, "every task has ended", async || {
        (number(&client, "SELECT count(*) FROM app.ends").await >= all).then_some(())
    })
    .await;
    let took = began.elapsed();
    println!(
        "{parents} parents × 8 children on 3 replicas: {took:.1?}, {:.0} tasks/s",
        all as f64 / took.as_secs_f64()
    );
    ended_once(&client, all).await;
}

async fn ended_once(client: &Client, all: i64) {
    assert_eq!(
        texts(client, "SELECT state, count(*), count(DISTINCT task_id) FROM app.ends GROUP BY 1").await,
        [format!("succeeded|{all}|{all}")]
    );
    assert_eq!(
        text(client, "SELECT count(*), count(DISTINCT task_id) FROM app.effects").await,
        format!("{all}|{all}")
    );
    let early = "SELECT count(*) FROM musterd.tasks p JOIN musterd.tasks c ON c.parent_id = p.id WHERE c.finished_at > p.finished_at";
    assert_eq!(number(client, early).await, 0, "a parent ended before a child");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(number(client, deadlocks).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_families_on_three_replicas_end_exactly_once_each() {
    families(300, std::time::Duration::from_secs(120)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: make test-families"]
async fn ten_thousand_families_on_three_replicas_end_exactly_once_each() {
    families(10_000, std::time::Duration::from_secs(3600)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_task_ends_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "").log("warn").start();
    daemon.wait_ready().await;
    let tasks: i32 = std::env::var("MUSTERD_LONE_TASKS").map_or(20, |count| count.parse().unwrap());
    for _ in 0..tasks {
        let id = number(&client, "SELECT musterd.enqueue('noop')").await;
        end_of(&client, id).await;
    }
    let took = "SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM finished_at - created_at) * 1000) FROM musterd.tasks";
    let [median, slowest]: [f64; 2] =
        client.query_one(took, &[]).await.unwrap().get::<_, Vec<f64>>(0).try_into().unwrap();
    println!("a lone task, enqueue to ended: median {median:.1} ms, p99 {slowest:.1} ms");
    // The poll is a second: below it, it was woken, and nothing waited for a batch to fill (5 s).
    assert!(median < 500.0, "{median} ms");
}
