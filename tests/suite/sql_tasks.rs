//! Tasks without rows: enqueue, spawn, uncles, and the rounds of process_tasks.

use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::sql::{refusal, rows, value};

/// The example of the seed: a derivation that spawns refreshes and has an analysis run after them.
const SEED: &str = "
CREATE SCHEMA app;
CREATE TABLE app.log (task bigint, what jsonb);
CREATE PROCEDURE app.derive(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM musterd.spawn('refresh', jsonb_build_object('seq', i), p_task_id, 20, 'batch' || i);
    END LOOP;
    PERFORM musterd.enqueue_after('analyze', '{}', ARRAY[p_task_id], dedup_key => 'analyze');
END $$;
CREATE PROCEDURE app.refresh(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.log VALUES (p_task_id, p_payload);
    IF p_payload ->> 'seq' = '1' THEN
        PERFORM musterd.spawn('refresh', '{\"seq\": 99}', (SELECT parent_id FROM musterd.tasks WHERE id = p_task_id), 20);
    END IF;
    IF p_payload ? 'fail' THEN RAISE EXCEPTION 'boom'; END IF;
END $$;
CREATE PROCEDURE app.analyze(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN INSERT INTO app.log VALUES (p_task_id, '\"analyze\"'); END $$;
CREATE PROCEDURE app.commits(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
SELECT musterd.register_command('derive', 'analytics', 'sql', 'app.derive');
SELECT musterd.register_command('refresh', 'analytics', 'sql', 'app.refresh');
SELECT musterd.register_command('analyze', 'analytics', 'sql', 'app.analyze');
SELECT musterd.register_command('commits', 'analytics', 'sql', 'app.commits');
SELECT musterd.register_command('ghost', 'analytics', 'sql', 'app.nowhere');";

pub(crate) async fn seeded() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(SEED).await.unwrap();
    (db, client)
}

const TASKS: &str = "SELECT command, state, parent_id IS NOT NULL FROM musterd.tasks ORDER BY id";
const ROUND: &str = "CALL musterd.process_tasks(p_queue => 'analytics')";

#[tokio::test(flavor = "multi_thread")]
async fn the_seeds_example_runs_in_rounds_and_leaves_no_trace_when_rolled_back() {
    let (_db, client) = seeded().await;
    client
        .batch_execute("BEGIN; INSERT INTO musterd.tasks (command, payload) VALUES ('derive', '{}')")
        .await
        .unwrap();
    client.batch_execute(ROUND).await.unwrap();
    let spawned = [
        "derive|waiting|f",
        "refresh|queued|t",
        "refresh|queued|t",
        "refresh|queued|t",
        "analyze|scheduled|f",
    ];
    assert_eq!(rows(&client, TASKS).await, spawned);
    let inherited = "SELECT DISTINCT queue, priority FROM musterd.tasks WHERE parent_id IS NOT NULL";
    assert_eq!(rows(&client, inherited).await, ["analytics|20"]);
    client.batch_execute(ROUND).await.unwrap();
    assert_eq!(
        rows(&client, TASKS).await,
        [
            "derive|succeeded|f",
            "refresh|succeeded|t",
            "refresh|succeeded|t",
            "refresh|succeeded|t",
            "analyze|queued|f",
            "refresh|succeeded|t"
        ]
    );
    client.batch_execute(ROUND).await.unwrap();
    let log = "SELECT string_agg(what ->> 'seq', ' ' ORDER BY task) || ' ' ||
                      (SELECT count(*) FROM app.log WHERE what = '\"analyze\"') FROM app.log";
    assert_eq!(value(&client, log).await, "1 2 3 99 1");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(
        value(&client, "SELECT (SELECT count(*) FROM musterd.tasks) + (SELECT count(*) FROM app.log)").await,
        "0"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exception_is_a_failed_attempt_whose_effects_vanish() {
    let (_db, client) = seeded().await;
    client
        .batch_execute("SELECT musterd.enqueue('refresh', '{\"fail\": 1}', max_attempts => 2)")
        .await
        .unwrap();
    client.batch_execute(ROUND).await.unwrap();
    let task = "SELECT state, attempt, split_part(error, E'\\n', 1), run_at > now(), worker IS NULL FROM musterd.tasks";
    assert_eq!(value(&client, task).await, "scheduled|2|boom (SQLSTATE P0001)|t|t");
    client.batch_execute("UPDATE musterd.tasks SET run_at = now()").await.unwrap();
    client.batch_execute(ROUND).await.unwrap();
    assert_eq!(value(&client, task).await, "failed|2|boom (SQLSTATE P0001)|f|t");
    assert_eq!(value(&client, "SELECT count(*) FROM app.log").await, "0");
    for (command, word) in [("commits", "must not COMMIT"), ("ghost", "has no procedure app.nowhere")] {
        let id = value(&client, &format!("SELECT musterd.enqueue('{command}', max_attempts => 1)")).await;
        client.batch_execute(ROUND).await.unwrap();
        let end = value(&client, &format!("SELECT state, error FROM musterd.tasks WHERE id = {id}")).await;
        assert!(end.starts_with("failed|") && end.contains(word), "{end}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_fails_with_a_child_after_all_have_ended() {
    let (_db, client) = seeded().await;
    let parent = value(&client, "SELECT musterd.enqueue('derive')").await;
    let spawn = format!("SELECT musterd.spawn('refresh', '{{\"fail\": 1}}', {parent}, 1)");
    let bad = value(&client, &spawn).await;
    client.batch_execute("UPDATE musterd.tasks SET max_attempts = 1").await.unwrap();
    client.batch_execute(ROUND).await.unwrap();
    let pending =
        format!("SELECT musterd.has_pending_children({parent}), musterd.complete_parent_if_ready({parent})");
    assert_eq!(value(&client, &pending).await, "t|f");
    client.batch_execute(ROUND).await.unwrap();
    let end = format!("SELECT state, error FROM musterd.tasks WHERE id = {parent}");
    assert_eq!(value(&client, &end).await, "failed|1 of 5 children failed");
    let good = value(
        &client,
        "SELECT min(id) FROM musterd.tasks WHERE state = 'succeeded' AND parent_id IS NOT NULL",
    )
    .await;
    let siblings = format!(
        "SELECT musterd.has_failed_siblings({good}), musterd.has_failed_siblings({bad}), musterd.has_pending_children({parent})"
    );
    assert_eq!(value(&client, &siblings).await, "t|f|f");
    assert!(
        refusal(&client, &format!("SELECT musterd.spawn('refresh', '{{}}', {parent})"))
            .await
            .starts_with("23514")
    );

    // The analysis after the first one, out of the way.
    client.batch_execute(ROUND).await.unwrap();
    let parent = "INSERT INTO musterd.tasks (command, on_child_failure) VALUES ('derive', 'abort_siblings') RETURNING id";
    let parent = value(&client, parent).await;
    client
        .batch_execute(&format!("SELECT musterd.spawn('refresh', '{{\"fail\": 1}}', {parent}, 1)"))
        .await
        .unwrap();
    client.batch_execute("UPDATE musterd.tasks SET max_attempts = 1 WHERE state = 'queued'").await.unwrap();
    // The parent runs, then the child that fails; it asks a worker to see to its siblings, and this is what that does.
    for _ in 0..2 {
        client.batch_execute("CALL musterd.process_tasks('analytics', 1)").await.unwrap();
    }
    assert_eq!(value(&client, &format!("SELECT musterd.complete_scope({parent})")).await, "completed");
    let ends = format!(
        "SELECT string_agg(DISTINCT state::text, ',' ORDER BY state::text) FROM musterd.tasks WHERE parent_id = {parent}"
    );
    assert_eq!(value(&client, &ends).await, "aborted,failed");
    assert_eq!(
        value(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {parent}")).await,
        "failed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn children_have_siblings_and_no_children() {
    let (_db, client) = seeded().await;
    let parent = value(&client, "SELECT musterd.enqueue('derive', queue => 'q', priority => 3)").await;
    let spawn = |parent: &str, key: &str| {
        format!("SELECT musterd.spawn('refresh', '{{}}', {parent}, p_child_key => {key})")
    };
    let child = value(&client, &spawn(&parent, "'k'")).await;
    assert_eq!(value(&client, &spawn(&parent, "'k'")).await, child, "a repeat is the same child");
    assert_ne!(value(&client, &spawn(&parent, "NULL")).await, child);
    let inherited = format!("SELECT DISTINCT queue, priority FROM musterd.tasks WHERE parent_id = {parent}");
    assert_eq!(rows(&client, &inherited).await, ["q|3"]);
    let said = refusal(&client, &spawn(&child, "NULL")).await;
    assert!(said.starts_with("23514") && said.contains("is a child itself"), "{said}");
    let direct = format!("INSERT INTO musterd.tasks (command, parent_id) VALUES ('refresh', {child})");
    assert!(
        refusal(&client, &direct).await.starts_with("23514"),
        "the trigger, not the function, is what refuses"
    );
    let moved = format!("UPDATE musterd.tasks SET parent_id = NULL WHERE id = {child}");
    assert!(refusal(&client, &moved).await.starts_with("23514"));
    assert!(refusal(&client, &spawn("4711", "NULL")).await.starts_with("P0002"));
    let batch = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb)").await;
    assert!(refusal(&client, &spawn(&batch, "NULL")).await.contains("is a batch"));
    // A child that was spawned before is still found after the parent has ended.
    client.batch_execute(&format!("SELECT musterd.abort({parent})")).await.unwrap();
    assert_eq!(value(&client, &spawn(&parent, "'k'")).await, child);
    assert!(refusal(&client, &spawn(&parent, "'new'")).await.starts_with("23514"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uncle_starts_after_the_last_of_those_it_waits_for() {
    let (_db, client) = seeded().await;
    let first = value(&client, "SELECT musterd.enqueue('derive', queue => 'q')").await;
    let second = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb)").await;
    let wait = |after: &str, more: &str| {
        format!("SELECT musterd.enqueue_after('uncle', '{{}}', ARRAY[{after}]::bigint[]{more})")
    };
    let uncle = value(&client, &wait(&format!("{first}, {second}"), ", dedup_key => 'u'")).await;
    let state = format!("SELECT state, run_at = 'infinity' FROM musterd.tasks WHERE id = {uncle}");
    assert_eq!(value(&client, &state).await, "scheduled|t");
    let third = value(&client, "SELECT musterd.enqueue('derive', queue => 'q')").await;
    assert_eq!(value(&client, &wait(&third, ", dedup_key => 'u'")).await, uncle, "it waits for one more");
    for (id, expected) in [(&first, "scheduled|t"), (&third, "scheduled|t")] {
        assert_eq!(value(&client, &format!("SELECT musterd.abort({id})")).await, "aborted");
        assert_eq!(value(&client, &state).await, expected);
    }
    assert_eq!(value(&client, &format!("SELECT musterd.abort({second})")).await, "aborting");
    assert_eq!(value(&client, &state).await, "scheduled|t", "the batch has not ended yet");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({second}, 1, 1, 0, 0)")).await,
        "completed"
    );
    assert_eq!(value(&client, &state).await, "queued|f");

    let named = format!("SELECT musterd.enqueue_after(command => 'uncle', after => ARRAY[{first}])");
    let plain = value(&client, &named).await;
    let payload = format!("SELECT state, payload FROM musterd.tasks WHERE id = {plain}");
    assert_eq!(
        value(&client, &payload).await,
        "queued|{}",
        "all but the command and what it waits for may be left out"
    );
    let late = value(&client, &wait(&first, "")).await;
    assert_eq!(value(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {late}")).await, "queued");
    assert!(refusal(&client, &wait("4711", "")).await.starts_with("P0002"));
    assert!(refusal(&client, &wait(&uncle, ", dedup_key => 'u'")).await.contains("would wait for itself"));
    // What a crash between two steps would leave is found by the sweep.
    let open = value(&client, "SELECT musterd.enqueue('derive', queue => 'q')").await;
    let lost = value(&client, &wait(&open, "")).await;
    client.batch_execute(&format!("DELETE FROM musterd.task_waits WHERE task_id = {lost}")).await.unwrap();
    assert_eq!(value(&client, "SELECT musterd.sweep_uncles()").await, "1");
    assert_eq!(value(&client, "SELECT musterd.sweep_uncles()").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_parent_ends_after_its_child_batch_and_takes_its_children_along() {
    let (_db, client) = seeded().await;
    let parent = value(&client, "SELECT musterd.enqueue('derive', queue => 'q')").await;
    let batch = value(
        &client,
        &format!("SELECT musterd.submit_batch('work', '[1, 2]'::jsonb, parent_id => {parent})"),
    )
    .await;
    let child = value(&client, &format!("SELECT musterd.spawn('refresh', '{{}}', {parent})")).await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = 2 WHERE id = {batch};
             INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, worker, token)
             VALUES ({batch}, '{{[1,2)}}', 1, 'q', 'work', 100, 'w', gen_random_uuid())"
        ))
        .await
        .unwrap();
    assert_eq!(
        value(&client, &format!("SELECT musterd.abort({parent}), musterd.abort({child})")).await,
        "aborting|aborted"
    );
    let states = "SELECT string_agg(command || ' ' || state, ', ' ORDER BY id) FROM musterd.tasks";
    assert_eq!(value(&client, states).await, "derive waiting, work running, refresh aborted");
    assert!(
        refusal(&client, &format!("SELECT musterd.spawn('refresh', '{{}}', {parent})"))
            .await
            .starts_with("23514")
    );
    client.batch_execute("DELETE FROM musterd.blocks").await.unwrap();
    assert_eq!(value(&client, &format!("SELECT musterd.complete_parent_if_ready({parent})")).await, "f");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({batch}, 1, 2, 0, 0)")).await,
        "completed"
    );
    assert_eq!(value(&client, &format!("SELECT musterd.complete_parent_if_ready({parent})")).await, "t");
    assert_eq!(value(&client, &format!("SELECT musterd.complete_parent_if_ready({parent})")).await, "f");
    assert_eq!(value(&client, states).await, "derive aborted, work aborted, refresh aborted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_could_not_do_its_work_is_refused() {
    let (_db, client) = seeded().await;
    client.batch_execute("SELECT musterd.enqueue('refresh')").await.unwrap();
    let said = refusal(&client, "CALL musterd.process_tasks('analytics', -1)").await;
    assert_eq!(said, "22023 p_limit is -1");
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
        let said = refusal(&client, ROUND).await;
        assert_eq!(said, format!("25000 process_tasks needs READ COMMITTED, this transaction is {level}"));
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_eq!(value(&client, "SELECT state FROM musterd.tasks").await, "queued");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trigger_against_grandchildren_is_named_so_and_fires_before_the_defaults() {
    let (_db, client) = seeded().await;
    let order =
        "SELECT tgname FROM pg_trigger WHERE tgrelid = 'musterd.task_records'::regclass AND NOT tgisinternal
                    AND tgtype & 6 = 6 ORDER BY tgname";
    assert_eq!(rows(&client, order).await, ["enforce_no_grandchildren", "fill_in_task"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_has_no_round() {
    let (_db, client) = seeded().await;
    client
        .batch_execute("SELECT musterd.enqueue('refresh'); SELECT musterd.pause_queue('analytics')")
        .await
        .unwrap();
    client.batch_execute("CALL musterd.process_tasks()").await.unwrap();
    assert_eq!(value(&client, "SELECT state FROM musterd.tasks").await, "queued");
    client
        .batch_execute("SELECT musterd.resume_queue('analytics'); CALL musterd.process_tasks()")
        .await
        .unwrap();
    assert_eq!(value(&client, "SELECT state FROM musterd.tasks").await, "succeeded");
}
