//! submit_batch and append_rows, as a producer calls them.

use std::collections::BTreeSet;

use futures::future::join_all;
use tokio::sync::Barrier;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, session, success, write, written};
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::tasks::SOON;
use crate::suite::support::wait::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_has_what_it_was_given_and_defaults_for_the_rest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("SELECT musterd.register_command('charge', 'money', 'http')").await.unwrap();
    let plain =
        value(&client, "SELECT musterd.submit_batch('charge', ARRAY['1', 'null', '{\"a\": 2}']::jsonb[])")
            .await;
    let state = "SELECT queue, priority, state, rows, queued, running, succeeded, failed, aborted FROM musterd.batch_progress WHERE id = ";
    assert_eq!(value(&client, &format!("{state}{plain}")).await, "money|100|queued|3|3|0|0|0|0");
    let lines = format!("SELECT line, input, state, attempt FROM musterd.batch_rows({plain}) ORDER BY line");
    assert_eq!(rows(&client, &lines).await, ["1|1|queued|", "2|null|queued|", "3|{\"a\": 2}|queued|"]);
    let full = value(
        &client,
        "SELECT musterd.submit_batch('charge', '[1, 2]'::jsonb, queue => 'q', context => '{\"t\": 7}', priority => 5,
            hold => true, max_attempts => 9, row_timeout => '7 s', max_failed => 3, max_failed_percent => 12.5,
            on_done => 'report', on_budget => 'hold', traceparent => '00-ab-cd-01')",
    )
    .await;
    let all = format!(
        "SELECT b.queue, b.priority, b.open, b.max_attempts, b.row_timeout, b.max_failed, b.max_failed_percent, b.on_done,
                b.on_budget, t.payload, t.state, t.traceparent
           FROM musterd.batches b JOIN musterd.tasks t USING (id) WHERE id = {full}"
    );
    assert_eq!(value(&client, &all).await, "q|5|f|9|00:00:07|3|12.5|report|hold|{\"t\": 7}|held|00-ab-cd-01");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_batch_ends_at_once_unless_it_is_held() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let state = |id: &str| format!("SELECT state FROM musterd.batch_progress WHERE id = {id}");
    let told = "SELECT count(*) FROM musterd.tasks WHERE command = 'tell'";
    for rows in ["'[]'::jsonb", "'{}'::jsonb[]"] {
        let id =
            value(&client, &format!("SELECT musterd.submit_batch('work', {rows}, on_done => 'tell')")).await;
        assert_eq!(value(&client, &state(&id)).await, "succeeded");
    }
    let held =
        value(&client, "SELECT musterd.submit_batch('work', '[]'::jsonb, hold => true, on_done => 'tell')")
            .await;
    assert_eq!(value(&client, &state(&held)).await, "held");
    assert_eq!(value(&client, told).await, "2");
    assert_eq!(value(&client, &format!("SELECT musterd.release({held})")).await, "succeeded");
    assert_eq!(value(&client, told).await, "3");
    // A producer's own isolation is no reason to refuse it; a worker is asked to end the batch.
    client.batch_execute("LISTEN musterd_check; BEGIN ISOLATION LEVEL SERIALIZABLE").await.unwrap();
    let id = value(&client, "SELECT musterd.submit_batch('work', '[]'::jsonb)").await;
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(value(&client, &state(&id)).await, "queued");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({id}, 1, 0, 0, 0)")).await,
        "completed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_may_come_as_a_literal_without_a_type_as_json_as_text_or_as_an_array() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let forms = [
        "'[1, 2]'",
        "rows => '[1, 2]'",
        "'[1, 2]'::json",
        "'[1, 2]'::jsonb",
        "'[1, 2]'::text",
        "'[1, 2]'::varchar",
        "'{1, 2}'::jsonb[]",
        "rows => ARRAY['1', '2']::jsonb[]",
    ];
    for form in forms {
        let id = value(&client, &format!("SELECT musterd.submit_batch('work', {form})")).await;
        assert_eq!(value(&client, &format!("SELECT musterd.append_rows({id}, {form})")).await, "4", "{form}");
        let inputs = format!(
            "SELECT string_agg(input::text, ',' ORDER BY line) FROM musterd.rows WHERE batch_id = {id}"
        );
        assert_eq!(value(&client, &inputs).await, "1,2,1,2", "{form}");
    }
    // A driver that leaves the types to the server sends text.
    let row = client.query_one("SELECT musterd.submit_batch($1, $2)", &[&"work", &"[1, 2]"]).await.unwrap();
    let id: i64 = row.get(0);
    let row = client.query_one("SELECT musterd.append_rows($1, $2)", &[&id, &"[3]"]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 3);
    // What is no JSON is refused without a word of it.
    let wrong = "SELECT musterd.submit_batch('work', '[{\"canary\": tru}]')";
    let error = client.simple_query(wrong).await.unwrap_err();
    let told = error.as_db_error().unwrap();
    assert_eq!((told.code().code(), told.detail()), ("22023", None));
    assert!(!format!("{told:?}").contains("canary"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_a_batch_is_refused_with_its_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let wrong = [
        ("ARRAY['1'::jsonb, NULL]", "22004 row 2 is null"),
        ("NULL::jsonb[]", "22004 rows is null"),
        ("ARRAY[['1'], ['2']]::jsonb[]", "2202E rows has 2 dimensions"),
        ("'{}'::jsonb", "22023 rows is a JSON object"),
        ("NULL::jsonb", "22004 rows is null: give a JSON array"),
        ("NULL", "22004 rows is null: give a JSON array"),
        ("'{}'", "22023 rows is a JSON object"),
        ("'{\"{\\\"a\\\": 1}\"}'", "22023 rows is not JSON"),
        (r#"'["\u0000"]'::json"#, "22023 rows is not JSON that can be stored"),
        ("'[]'::jsonb, max_failed_percent => 101", "22023 max_failed_percent is 101"),
        ("'[]'::jsonb, max_failed => -1", "22023 max_failed is -1"),
        ("'[]'::jsonb, on_budget => 'panic'", "22023 on_budget is \"panic\""),
        ("'[]'::jsonb, row_timeout => '0 s'", "22023 row_timeout is 00:00:00"),
        ("'[]'::jsonb, parent_id => 4711", "P0002 no task 4711"),
    ];
    for (arguments, reason) in wrong {
        let said = refusal(&client, &format!("SELECT musterd.submit_batch('work', {arguments})")).await;
        assert!(said.starts_with(reason), "{arguments}: {said}");
    }
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.tasks").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_with_its_key_is_the_same_batch_and_another_body_a_conflict() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let send = |rows: &str, more: &str| {
        format!("SELECT musterd.submit_batch('work', '{rows}'::jsonb, idempotency_key => 'k'{more})")
    };
    let id = value(&client, &send(r#"[1, {"b": 1, "a": 2}]"#, "")).await;
    assert_eq!(
        value(&client, &send(r#"[1, {"a":2,"b":1}]"#, "")).await,
        id,
        "the same JSON, written otherwise"
    );
    let as_array = "SELECT musterd.submit_batch('work', ARRAY['1', '{\"a\": 2, \"b\": 1}']::jsonb[], idempotency_key => 'k')";
    assert_eq!(value(&client, as_array).await, id, "the other form of the same rows");
    for (rows, more) in [
        (r#"[{"b": 1, "a": 2}, 1]"#, ""),
        ("[1]", ""),
        (r#"[1, {"b": 1, "a": 2}]"#, ", priority => 1"),
        (r#"[1, {"b": 1, "a": 2}]"#, ", hold => true"),
    ] {
        let said = refusal(&client, &send(rows, more)).await;
        assert!(said.starts_with("23505 idempotency key \"k\" was used by task"), "{said}");
    }
    // One key for tasks and batches together.
    let said = refusal(&client, "SELECT musterd.enqueue('work', idempotency_key => 'k')").await;
    assert!(said.starts_with("23505"), "{said}");
    assert_eq!(
        value(&client, "SELECT count(*) || '/' || (SELECT count(*) FROM musterd.rows) FROM musterd.batches")
            .await,
        "1/2"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_transactions_with_one_key_make_one_batch() {
    let db = TestDb::new().await;
    let together = Barrier::new(64);
    let one = async |number: usize| {
        let client = db.client().await;
        let rows = if number.is_multiple_of(8) { "[9]" } else { "[1, 2, 3]" };
        client.batch_execute("BEGIN").await.unwrap();
        together.wait().await;
        let submit =
            format!("SELECT musterd.submit_batch('work', '{rows}'::jsonb, idempotency_key => 'one')");
        let answer = client.simple_query(&submit).await;
        // Some change their mind; whoever waits for them then makes the batch.
        client.batch_execute(if number.is_multiple_of(5) { "ROLLBACK" } else { "COMMIT" }).await.unwrap();
        match answer {
            Ok(answer) => answer
                .iter()
                .find_map(|message| match message {
                    tokio_postgres::SimpleQueryMessage::Row(row) if !number.is_multiple_of(5) => row.get(0),
                    _ => None,
                })
                .map(str::to_owned),
            Err(error) => {
                assert_eq!(error.code().map(|state| state.code()), Some("23505"), "{error:?}");
                None
            }
        }
    };
    let ids: BTreeSet<String> = join_all((0..64).map(one)).await.into_iter().flatten().collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let client = db.client().await;
    let whole = "SELECT count(*) || ' ' || bool_and(b.rows = (SELECT count(*) FROM musterd.rows)) FROM musterd.batches b";
    assert_eq!(value(&client, whole).await, "1 true");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_added_to_a_batch_that_is_held_or_runs_and_to_no_other() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let id = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb, hold => true)").await;
    let append = |rows: &str| format!("SELECT musterd.append_rows({id}, {rows})");
    assert_eq!(value(&client, &append("'[2]'::jsonb")).await, "2");
    assert_eq!(value(&client, &format!("SELECT musterd.release({id})")).await, "running");
    let block = carve(&worker, 1, 2).await.remove(0);
    assert_eq!(value(&client, &append("ARRAY['3', '4']::jsonb[]")).await, "4");
    assert_eq!(value(&client, &append("'[]'::jsonb")).await, "4");
    let staged = format!(
        "BEGIN; CREATE TEMP TABLE staged (first_line int, last_line int, inputs text) ON COMMIT DROP;
         INSERT INTO staged VALUES (2, 2, '6'), (1, 1, '5'); SELECT e.rows FROM musterd.extend_batch({id}, 'pg_temp.staged') e; COMMIT"
    );
    assert_eq!(rows(&client, &staged).await, ["6"]);
    let lines = format!(
        "SELECT string_agg(line || ':' || input, ' ' ORDER BY line) FROM musterd.rows WHERE batch_id = {id}"
    );
    assert_eq!(value(&client, &lines).await, "1:1 2:2 3:3 4:4 5:5 6:6");
    assert_eq!(write(&worker, success(&block, 1..=2, Some(Default::default()))).await, written(2));
    client.batch_execute(&format!("SELECT musterd.abort({id})")).await.unwrap();
    let said = refusal(&client, &append("'[7]'::jsonb")).await;
    assert!(said.starts_with("23514") && said.contains("is being aborted"), "{said}");
    assert_eq!(
        value(&client, &format!("SELECT musterd.complete_scope({id}, 1, 6, 2, 0, p_recorded => 2)")).await,
        "completed"
    );
    let said = refusal(&client, &append("'[7]'::jsonb")).await;
    assert!(said.starts_with("23514") && said.contains("has ended"), "{said}");
    assert!(refusal(&client, "SELECT musterd.append_rows(4711, '[1]'::jsonb)").await.starts_with("P0002"));
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_a_key_are_added_once_however_often_they_are_sent() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    let id = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb, hold => true)").await;
    let append = |rows: &str, key: &str| {
        format!("SELECT musterd.append_rows({id}, {rows}, idempotency_key => '{key}')")
    };
    // Two at once: the second waits for the first and gets its answer.
    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(value(&client, &append("'[2, 3]'::jsonb", "a")).await, "3");
    let rows = append("ARRAY['2', '3']::jsonb[]", "a");
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let third = db.client().await;
    let (second, ()) = tokio::join!(value(&other, &rows), async {
        eventually(SOON, "the second waits", async || (value(&third, waits).await == "1").then_some(()))
            .await;
        client.batch_execute("COMMIT").await.unwrap();
    });
    assert_eq!(second, "3");
    for form in ["'[2, 3]'::json", "'[2, 3]'", "'[ 2,3 ]'::jsonb"] {
        assert_eq!(value(&client, &append(form, "a")).await, "3", "{form}");
    }
    assert_eq!(value(&client, &append("'[4]'::jsonb", "b")).await, "4");
    assert_eq!(value(&client, &append("'[2, 3]'::jsonb", "a")).await, "3", "as it was then");
    for rows in ["'[2]'::jsonb", "'[3, 2]'::jsonb", "'[]'::jsonb"] {
        let said = refusal(&client, &append(rows, "a")).await;
        assert!(said.starts_with("23505") && said.contains("other rows"), "{said}");
    }
    assert!(refusal(&client, &append("'[5]'::jsonb", "")).await.contains("is empty"));
    // A key is one of the batch: another batch may have the same.
    let another = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb, hold => true)").await;
    let same = format!("SELECT musterd.append_rows({another}, '[9]'::jsonb, 'a')");
    assert_eq!(value(&client, &same).await, "2");
    client.batch_execute(&format!("SELECT musterd.abort({id})")).await.unwrap();
    assert_eq!(
        value(&client, &append("'[2, 3]'::jsonb", "a")).await,
        "3",
        "an answer, whatever became of the batch"
    );
    assert!(refusal(&client, &append("'[2, 3]'::jsonb", "c")).await.contains("is being aborted"));
}
