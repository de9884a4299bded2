//! Quick procedures share a transaction, and nothing else: not what they leave in the session, not their failures, not their time.

use musterd::config::{Given, load};
use musterd::handler::{Registry, TaskCall, TaskOutcome};
use musterd::store::tasks::{Finish, Task};
use tokio_postgres::Client;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{QUICK, SOON, claimed, number};
use crate::suite::support::wait::eventually;

const TASKS: i64 = 600;

/// Records what it finds of those before it, and leaves as much as it can behind.
const PROCEDURE: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.effects (task_id bigint NOT NULL, n int NOT NULL, xid text NOT NULL, found text NOT NULL);
    CREATE TABLE app.open (n int NOT NULL);
    CREATE PROCEDURE app.leaving(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    DECLARE
        v_found text := concat_ws(' ', NULLIF(current_setting('app.tenant', true), ''), current_setting('work_mem'), current_user,
                                  (SELECT string_agg(name, ' ') FROM pg_cursors WHERE name = 'left_open'));
        v_cursor refcursor := 'left_open';
    BEGIN
        CREATE TEMP TABLE IF NOT EXISTS leftover (n int);
        v_found := v_found || ' ' || (SELECT count(*) FROM leftover);
        INSERT INTO leftover VALUES (1);
        PERFORM set_config('app.tenant', 'a', true), set_config('work_mem', '1MB', true);
        OPEN v_cursor FOR SELECT 1;
        SET LOCAL ROLE pg_monitor;
        RESET ROLE;
        INSERT INTO app.effects VALUES (p_task_id, (p_payload ->> 'n')::int, pg_current_xact_id()::text, v_found);
        IF current_setting('musterd.task_id')::bigint IS DISTINCT FROM p_task_id THEN
            RAISE EXCEPTION 'not the attempt of this task';
        ELSIF p_payload ->> 'n' = p_payload ->> 'bad' THEN
            RAISE EXCEPTION 'no stock';
        ELSIF p_payload ->> 'n' = p_payload ->> 'slow' THEN
            PERFORM pg_sleep(3600);
        END IF;
    END $$;";

/// Nothing but its effect.
const QUICKER: &str = "
    CREATE OR REPLACE PROCEDURE app.leaving(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO app.effects VALUES (p_task_id, (p_payload ->> 'n')::int, pg_current_xact_id()::text, '');
    END $$";

fn config(more: &str) -> String {
    format!(
        "{QUICK}[queues.default]\nfibers = 2\n\
         [handlers.leaving]\nkind = \"sql\"\nprocedure = \"app.leaving\"\n{more}"
    )
}

async fn prepared(payload: &str) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURE).await.unwrap();
    let enqueue = format!(
        "SELECT count(*) FROM musterd.enqueue_many('leaving', ARRAY (
            SELECT jsonb_build_object('n', n{payload}) FROM generate_series(1, {TASKS}) n))"
    );
    client.batch_execute(&enqueue).await.unwrap();
    (db, client)
}

async fn ended(client: &Client, count: i64) {
    eventually(SOON, "the tasks end", async || {
        let ended = "SELECT count(*) FROM musterd.tasks WHERE state IN ('succeeded', 'failed')";
        (number(client, ended).await >= count).then_some(())
    })
    .await;
}

const NOT_ONCE: &str = "SELECT count(*) FROM musterd.tasks t WHERE (t.state = 'succeeded')::int
     <> (SELECT count(*) FROM app.effects e WHERE e.task_id = t.id)";
const TRANSACTIONS: &str = "SELECT count(DISTINCT xid) FROM app.effects";

/// The handler as a worker has it.
fn handlers(db: &TestDb) -> Registry {
    let given = Given {
        file: Some(TestConfig::new(db, &config("")).file().into()),
        env: Some(Vec::new()),
        ..Given::default()
    };
    load(&given).unwrap().config.registry().unwrap()
}

/// Tasks 1 to `count`, claimed.
async fn claimed_tasks(client: &Client, count: i64) -> Vec<Task> {
    let mut tasks = Vec::new();
    for id in 1..=count {
        tasks.push(claimed(client, id).await);
    }
    tasks
}

fn calls(tasks: &[Task]) -> Vec<TaskCall<'_>> {
    tasks.iter().map(|task| TaskCall { task, timeout: SOON, traceparent: None }).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_together_share_a_transaction_and_nothing_that_they_leave_behind() {
    let (db, client) = prepared("").await;
    let handlers = handlers(&db);
    let tasks = claimed_tasks(&client, 5).await;
    // On a machine that is too slow for the limit of such a transaction nothing has happened, and it may be tried again.
    let outcomes = eventually(SOON, "they share a transaction", async || {
        handlers.get("leaving").unwrap().handler.tasks(&calls(&tasks)).await
    })
    .await;
    for (task, outcome) in tasks.iter().zip(outcomes) {
        let own = |finish: &Finish| finish.finished.keys().eq([&task.reference.id]);
        assert!(matches!(&outcome, TaskOutcome::Committed(finish) if own(finish)), "{outcome:?}");
    }
    assert_eq!(number(&client, NOT_ONCE).await, 0);
    assert_eq!(number(&client, TRANSACTIONS).await, 1);
    let found = "SELECT count(DISTINCT found) FROM app.effects";
    assert_eq!(number(&client, found).await, 1, "a task has found what another has left");
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_is_no_longer_held_nothing_has_happened() {
    let (db, client) = prepared("").await;
    let handlers = handlers(&db);
    let tasks = claimed_tasks(&client, 3).await;
    client.batch_execute("SELECT musterd.abort(2)").await.unwrap();
    assert_eq!(handlers.get("leaving").unwrap().handler.tasks(&calls(&tasks)).await, None);
    assert_eq!(number(&client, "SELECT count(*) FROM app.effects").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'running'").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_lets_quick_tasks_share_transactions() {
    let (db, client) = prepared("").await;
    client.batch_execute(QUICKER).await.unwrap();
    let _daemon = Daemon::builder(&db, &config("")).start();
    ended(&client, TASKS).await;
    assert_eq!(number(&client, NOT_ONCE).await, 0);
    let transactions = number(&client, TRANSACTIONS).await;
    assert!(transactions < TASKS / 2, "{transactions} transactions for {TASKS} tasks");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_has_its_own_transaction_if_the_configuration_says_so() {
    let (db, client) = prepared("").await;
    let _daemon = Daemon::builder(&db, &config("tasks_per_transaction = 1\n")).start();
    ended(&client, TASKS).await;
    assert_eq!(number(&client, NOT_ONCE).await, 0);
    assert_eq!(number(&client, TRANSACTIONS).await, TASKS);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_raises_fails_alone() {
    let (db, client) = prepared(", 'bad', 450").await;
    let _daemon = Daemon::builder(&db, &config("")).start();
    ended(&client, TASKS).await;
    assert_eq!(number(&client, NOT_ONCE).await, 0);
    let failed = "SELECT count(*) FROM musterd.tasks
         WHERE state = 'failed' AND error LIKE 'no stock%' AND payload ->> 'n' = '450'";
    assert_eq!(number(&client, failed).await, 1);
    assert_eq!(
        number(&client, "SELECT count(*) FROM musterd.tasks WHERE state = 'succeeded'").await,
        TASKS - 1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_takes_long_keeps_no_other_waiting() {
    let (db, client) = prepared(", 'slow', 450").await;
    let _daemon = Daemon::builder(&db, &config("")).start();
    ended(&client, TASKS - 1).await;
    assert_eq!(number(&client, NOT_ONCE).await, 0);
    let slow = "SELECT count(*) FROM musterd.tasks WHERE state = 'running' AND payload ->> 'n' = '450'";
    assert_eq!(number(&client, slow).await, 1);
}
