//! `sql` handlers: effects and outcome are one transaction, whatever dies in the middle.

use std::time::{Duration, Instant};

use musterd::config::{Given, load};
use musterd::handler::{TaskCall, TaskOutcome};
use rustix::process::Signal;
use tokio_postgres::Client;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::services;
use crate::suite::support::sql::refusal;
use crate::suite::support::tasks::{
    QUICK, RUNNING_PROCEDURES, SOON, becomes, claimed, end_of, field, free_tasks_of, number, text, texts,
};
use crate::suite::support::wait::eventually;

/// Procedures with an effect each: at once, behind a gate (an advisory lock that the test holds), with children, without end.
const PROCEDURES: &str = "
    CREATE SCHEMA app;
    SET search_path = app;
    CREATE TABLE effects (task_id bigint NOT NULL);
    CREATE SEQUENCE tries;
    CREATE PROCEDURE note(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO effects VALUES (p_task_id); END $$;
    CREATE PROCEDURE gated(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO effects VALUES (p_task_id); PERFORM pg_advisory_xact_lock_shared(7); END $$;
    CREATE PROCEDURE plan(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO effects VALUES (p_task_id);
        PERFORM musterd.spawn('note', '{}', p_task_id) FROM generate_series(1, 3);
    END $$;
    CREATE PROCEDURE endless(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO effects VALUES (p_task_id);
        PERFORM musterd.spawn('note', '{}', p_task_id);
        PERFORM pg_sleep(3600);
    END $$;
    CREATE PROCEDURE conflicting(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO effects VALUES (p_task_id);
        IF nextval('tries') <= (p_payload ->> 'conflicts')::int THEN
            RAISE EXCEPTION 'in the way' USING ERRCODE = p_payload ->> 'code';
        END IF;
    END $$;
    CREATE PROCEDURE committing(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO effects VALUES (p_task_id); COMMIT; END $$;
    CREATE PROCEDURE raising(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO effects VALUES (p_task_id);
        RAISE EXCEPTION 'no stock' USING DETAIL = 'shelf 7 is empty';
    END $$;";

fn config(more: &str) -> String {
    let handlers: String = ["note", "gated", "plan", "endless", "conflicting", "committing", "raising"]
        .iter()
        .map(|name| {
            format!("[handlers.{name}]\nkind = \"sql\"\nprocedure = \"app.{name}\"\nsearch_path = \"app\"\n")
        })
        .collect();
    format!("{QUICK}{handlers}{more}")
}

async fn with_procedures() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURES).await.unwrap();
    (db, client)
}

pub(crate) async fn enqueue(client: &Client, arguments: &str) -> i64 {
    number(client, &format!("SELECT musterd.enqueue({arguments})")).await
}

/// Tasks of a command that did not have their effect exactly once.
async fn not_once(client: &Client, command: &str) -> i64 {
    let sql = format!(
        "SELECT count(*) FROM musterd.tasks t WHERE t.command = '{command}'
            AND (SELECT count(*) FROM effects e WHERE e.task_id = t.id) <> 1"
    );
    number(client, &sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_random_kills_leave_every_effect_exactly_once() {
    const KILLS: i64 = 20;
    let (db, client) = with_procedures().await;
    let config = config("[queues.default]\nfibers = 4\n");
    let slow = "CREATE OR REPLACE PROCEDURE note(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO effects VALUES (p_task_id); PERFORM pg_sleep(random() / 100); END $$";
    client.batch_execute(slow).await.unwrap();
    let all = "SELECT count(musterd.enqueue('plan')) FROM generate_series(1, 150)";
    client.batch_execute(all).await.unwrap();
    for _ in 0..KILLS {
        let before = number(&client, "SELECT count(*) FROM effects").await;
        let more = before + 1 + i64::from(rand::random::<u8>() % 16);
        let daemon = Daemon::builder(&db, &config).log("warn").start();
        eventually(SOON, "some more effects, or the end", async || {
            let now = number(&client, "SELECT count(*) FROM effects").await;
            (now >= more || now == 600).then_some(())
        })
        .await;
        daemon.signal(Signal::KILL);
        daemon.wait_exit(SOON).await;
        free_tasks_of(&client, daemon.pid()).await;
    }
    let daemon = Daemon::builder(&db, &config).log("warn").start();
    becomes(&client, "SELECT state, count(*) FROM musterd.tasks GROUP BY 1", "succeeded|600").await;
    assert_eq!(not_once(&client, "plan").await, 0);
    assert_eq!(not_once(&client, "note").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM effects").await, 600);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exception_is_told_alike_with_a_daemon_and_without() {
    let (db, client) = with_procedures().await;
    client
        .batch_execute(
            "CREATE PROCEDURE nested(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
             BEGIN CALL raising(p_task_id, p_payload); END $$;
             SELECT musterd.register_command(c, 'default', 'sql', 'app.' || c)
               FROM unnest('{raising,nested,committing}'::text[]) c",
        )
        .await
        .unwrap();
    let commands = ["raising", "nested", "committing"];
    let mut told = Vec::new();
    for command in commands {
        let id = enqueue(&client, &format!("'{command}', max_attempts => 1")).await;
        client.batch_execute("CALL musterd.process_tasks()").await.unwrap();
        told.push(field(&client, id, "error").await);
    }
    assert!(
        told[0].starts_with("no stock (SQLSTATE P0001)\ndetail: shelf 7 is empty\ncontext: PL/pgSQL"),
        "{told:?}"
    );
    let nested = "[handlers.nested]\nkind = \"sql\"\nprocedure = \"app.nested\"\nsearch_path = \"app\"\n";
    let _daemon = Daemon::builder(&db, &config(nested)).start();
    for (command, told) in commands.iter().zip(told) {
        let id = enqueue(&client, &format!("'{command}', max_attempts => 1")).await;
        assert_eq!(end_of(&client, id).await, "failed");
        assert_eq!(field(&client, id, "error").await, told, "{command}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_around_the_commit_has_all_of_it_or_nothing() {
    for (failpoint, after_the_crash) in
        [("sql.before_commit", "running|0|0"), ("sql.committed", "waiting|1|3")]
    {
        let (db, client) = with_procedures().await;
        let id = enqueue(&client, "'plan'").await;
        let wish = format!("{failpoint}=1*abort");
        let dying = Daemon::builder(&db, &config("")).env("MUSTERD_FAILPOINTS", &wish).start();
        dying.wait_exit(SOON).await;
        let seen = format!(
            "SELECT t.state, (SELECT count(*) FROM effects),
                    (SELECT count(*) FROM musterd.tasks c WHERE c.parent_id = t.id) FROM musterd.tasks t WHERE t.id = {id}"
        );
        assert_eq!(text(&client, &seen).await, after_the_crash);
        free_tasks_of(&client, dying.pid()).await;
        let _living = Daemon::builder(&db, &config("")).start();
        assert_eq!(end_of(&client, id).await, "succeeded");
        assert_eq!((not_once(&client, "plan").await, not_once(&client, "note").await), (0, 0));
        assert_eq!(number(&client, "SELECT count(*) FROM effects").await, 4, "{failpoint}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_lost_its_task_meanwhile_loses_its_effects() {
    let (db, client) = with_procedures().await;
    client.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
    let toml = config("[queues.default]\nfibers = 1\n");
    let zombie = Daemon::builder(&db, &toml).start();
    let id = enqueue(&client, "'gated'").await;
    becomes(&client, RUNNING_PROCEDURES, "1").await;
    // Judged dead by mistake: its only fiber is busy, so the task goes to another.
    assert_eq!(free_tasks_of(&client, zombie.pid()).await, 1);
    let heir = Daemon::builder(&db, &toml).start();
    let holder = format!(
        "SELECT w.pid FROM musterd.tasks t JOIN musterd.workers w ON w.id = t.worker WHERE t.id = {id}"
    );
    becomes(&client, &holder, &heir.pid().to_string()).await;
    client.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
    assert_eq!(end_of(&client, id).await, "succeeded");
    becomes(&client, RUNNING_PROCEDURES, "0").await;
    // Whatever the first one did is over when its fiber has taken something else.
    let ids = texts(&client, "SELECT musterd.enqueue('note') FROM generate_series(1, 20)").await;
    for id in ids {
        assert_eq!(end_of(&client, id.parse().unwrap()).await, "succeeded");
    }
    assert_eq!(not_once(&client, "gated").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_is_terminated_in_the_middle_costs_no_attempt() {
    let (db, client) = with_procedures().await;
    client.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
    let _daemon = Daemon::builder(&db, &config("")).start();
    let id = enqueue(&client, "'gated', max_attempts => 1").await;
    becomes(&client, RUNNING_PROCEDURES, "1").await;
    let terminate = RUNNING_PROCEDURES.replace("count(*)", "pg_terminate_backend(pid)");
    assert_eq!(texts(&client, &terminate).await, ["t"]);
    becomes(&client, &format!("SELECT claimed_at > created_at AND error LIKE '%terminating%' AND state = 'running' FROM musterd.tasks WHERE id = {id}"), "t").await;
    client.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
    assert_eq!(end_of(&client, id).await, "succeeded");
    assert_eq!(field(&client, id, "attempt || ' ' || crashes").await, "1 0");
    assert_eq!(not_once(&client, "gated").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_in_the_middle_of_a_call_leaves_all_of_it_or_nothing() {
    // The COMMIT has left with the call. Whether the server gets to it before it notices that its client is gone is chance;
    // once the task was freed, the token refuses it.
    for freed_first in [true, false] {
        let (db, client) = with_procedures().await;
        client.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
        let killed = Daemon::builder(&db, &config("")).start();
        let id = enqueue(&client, "'gated'").await;
        becomes(&client, RUNNING_PROCEDURES, "1").await;
        killed.signal(Signal::KILL);
        killed.wait_exit(SOON).await;
        if freed_first {
            assert_eq!(free_tasks_of(&client, killed.pid()).await, 1);
        }
        client.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
        becomes(&client, RUNNING_PROCEDURES, "0").await;
        let effects = number(&client, "SELECT count(*) FROM effects").await;
        let state = field(&client, id, "state").await;
        match freed_first {
            true => assert_eq!((effects, state.as_str()), (0, "queued")),
            false => assert!(
                [(0, "running"), (1, "succeeded")].contains(&(effects, state.as_str())),
                "{effects} {state}"
            ),
        }
        free_tasks_of(&client, killed.pid()).await;
        let _living = Daemon::builder(&db, &config("")).start();
        assert_eq!(end_of(&client, id).await, "succeeded");
        assert_eq!(not_once(&client, "gated").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outcome_is_written_only_inside_the_attempt_and_only_while_the_task_is_held() {
    let (_db, client) = with_procedures().await;
    let id = enqueue(&client, "'note'").await;
    let token = "5b8cf1c2-3f0b-4a43-9b31-9d3a2d0d7a11";
    let claim = format!("SELECT guard.claim({id}, '{token}')");
    client.batch_execute(&claim).await.unwrap();
    let finish = |token: &str| {
        format!(
            "SELECT task_state FROM musterd.finish_own_tasks(ARRAY[{id}]::bigint[], ARRAY['{token}'::uuid])"
        )
    };
    // As if the BEGIN before it had been refused.
    assert!(refusal(&client, &finish(token)).await.starts_with("25P01 "));
    let inside = |token: &str| format!("BEGIN; SET LOCAL musterd.task_id = '{id}'; {}", finish(token));
    let other = inside("9d3a2d0d-3f0b-4a43-9b31-5b8cf1c27a11");
    assert!(refusal(&client, &other).await.starts_with("MU001 "));
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(field(&client, id, "state").await, "running");
    assert_eq!(text(&client, &inside(token)).await, "succeeded");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(field(&client, id, "state").await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_is_one_round_trip() {
    const TASKS: usize = 3;
    let (db, client) = with_procedures().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let through = config(&format!(
        "[database]\nurl = \"{}\"\npooler = \"none\"\nsql_connections = 1\n",
        proxy.rewrite(db.url())
    ));
    let given = Given {
        file: Some(TestConfig::new(&db, &through).file().into()),
        env: Some(Vec::new()),
        ..Given::default()
    };
    let handlers = load(&given).unwrap().config.registry().unwrap();
    let handler = &handlers.get("note").unwrap().handler;
    let one_way = Duration::from_millis(150);
    for attempt in 0..TASKS {
        let id = enqueue(&client, "'note'").await;
        let task = claimed(&client, id).await;
        let call = TaskCall { task: &task, timeout: SOON, traceparent: None };
        // The first call of a session connects and prepares.
        proxy.set(if attempt == 0 { Fault::None } else { Fault::Latency(one_way) });
        let began = Instant::now();
        let outcome = handler.task(call).await;
        let took = began.elapsed();
        assert!(
            matches!(&outcome, TaskOutcome::Committed(finish) if finish.finished.contains_key(&id)),
            "{outcome:?}"
        );
        // The answer may come in a few pieces, each of which is delayed.
        assert!(attempt == 0 || took < one_way * 6, "{took:?}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM effects").await, TASKS as i64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_beyond_what_postgresql_takes_is_cut_to_it() {
    let (db, client) = with_procedures().await;
    let long = "[handlers.long]\nkind = \"sql\"\nprocedure = \"app.note\"\nsearch_path = \"app\"\ntimeout = \"60d\"\n";
    let _daemon = Daemon::builder(&db, &config(long)).start();
    for task in ["'long'", "'note', timeout => '24 days'"] {
        let id = enqueue(&client, task).await;
        assert_eq!(end_of(&client, id).await, "succeeded", "{}", field(&client, id, "error").await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn role_search_path_and_statement_timeout_are_the_handlers() {
    let (db, client) = with_procedures().await;
    let role = format!("{}_role", db.name());
    let setup = format!(
        "CREATE ROLE \"{role}\"; GRANT USAGE ON SCHEMA app TO \"{role}\";
         CREATE TABLE app.seen (who text, path text, timeout text); GRANT INSERT ON app.seen TO \"{role}\";
         CREATE PROCEDURE app.look(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO seen VALUES (current_user, current_setting('search_path'), current_setting('statement_timeout'));
             PERFORM pg_sleep((p_payload ->> 'sleep')::float);
         END $$;"
    );
    client.batch_execute(&setup).await.unwrap();
    let handler = format!(
        "[handlers.look]\nkind = \"sql\"\nprocedure = \"app.look\"\nrole = '\"{role}\"'\nsearch_path = \"app, pg_temp\"\n\
         statement_timeout = \"1500ms\"\n"
    );
    let _daemon = Daemon::builder(&db, &config(&handler)).start();
    // The role has no right to musterd's tables: the outcome is written by the worker.
    let id = enqueue(&client, "'look', '{\"sleep\": 0}'").await;
    assert_eq!(end_of(&client, id).await, "succeeded");
    let seen = "SELECT * FROM app.seen";
    assert_eq!(text(&client, seen).await, format!("{role}|app, pg_temp|1500ms"));
    let id = enqueue(&client, "'look', '{\"sleep\": 3600}', max_attempts => 1").await;
    assert_eq!(end_of(&client, id).await, "failed");
    let error = field(&client, id, "error").await;
    assert!(error.contains("statement timeout"), "{error}");
    assert_eq!(texts(&client, seen).await.len(), 1, "the effects of the second vanished");
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlocks_and_serialization_failures_are_tried_three_times_more_within_the_attempt() {
    let (db, client) = with_procedures().await;
    let _daemon = Daemon::builder(&db, &config("")).start();
    for code in ["40001", "40P01"] {
        client.batch_execute("ALTER SEQUENCE tries RESTART; TRUNCATE effects").await.unwrap();
        let payload = format!("'{{\"conflicts\": 3, \"code\": \"{code}\"}}'");
        let id = enqueue(&client, &format!("'conflicting', {payload}, max_attempts => 1")).await;
        assert_eq!(end_of(&client, id).await, "succeeded");
        assert_eq!(texts(&client, "SELECT task_id FROM effects").await, [id.to_string()]);
        client.batch_execute("ALTER SEQUENCE tries RESTART").await.unwrap();
        let payload = payload.replace(": 3", ": 100");
        let id = enqueue(&client, &format!("'conflicting', {payload}, max_attempts => 1")).await;
        assert_eq!(end_of(&client, id).await, "failed");
        assert_eq!(number(&client, "SELECT last_value FROM tries").await, 4);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exception_is_a_failed_attempt_in_its_own_words_and_a_commit_inside_is_refused() {
    let (db, client) = with_procedures().await;
    let _daemon = Daemon::builder(&db, &config("")).start();
    let id = enqueue(&client, "'raising', max_attempts => 2").await;
    assert_eq!(end_of(&client, id).await, "failed");
    assert_eq!(field(&client, id, "attempt").await, "2");
    let error = field(&client, id, "error").await;
    for words in ["no stock", "P0001", "detail: shelf 7 is empty", "context: PL/pgSQL function"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let id = enqueue(&client, "'committing', max_attempts => 1").await;
    assert_eq!(end_of(&client, id).await, "failed");
    let error = field(&client, id, "error").await;
    assert!(error.contains("2D000") && error.contains("must not COMMIT"), "{error}");
    assert_eq!(number(&client, "SELECT count(*) FROM effects").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_and_a_timeout_stop_the_query_in_the_server() {
    let (db, client) = with_procedures().await;
    let _daemon = Daemon::builder(&db, &config("[queues.default]\nfibers = 1\n")).start();
    let id = enqueue(&client, "'endless'").await;
    becomes(&client, RUNNING_PROCEDURES, "1").await;
    // It has spawned and holds no lock for it: the abort is done at once.
    client.batch_execute("SET lock_timeout = '10s'").await.unwrap();
    assert_eq!(text(&client, &format!("SELECT musterd.abort({id})")).await, "aborted");
    becomes(&client, RUNNING_PROCEDURES, "0").await;

    let id = enqueue(&client, "'endless', timeout => '200ms', max_attempts => 2").await;
    assert_eq!(end_of(&client, id).await, "failed");
    let error = field(&client, id, "error").await;
    assert!(error.contains("timeout"), "{error}");
    assert_eq!(field(&client, id, "attempt").await, "2");
    becomes(&client, RUNNING_PROCEDURES, "0").await;

    // The only fiber is free again, and nothing of all that exists.
    let id = enqueue(&client, "'note'").await;
    assert_eq!(end_of(&client, id).await, "succeeded");
    assert_eq!(texts(&client, "SELECT task_id FROM effects").await, [id.to_string()]);
    assert_eq!(number(&client, "SELECT count(*) FROM musterd.tasks WHERE parent_id IS NOT NULL").await, 0);
}
