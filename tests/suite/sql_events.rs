//! What was done, by whom: events are written with the change, by the functions themselves.

use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::{refusal, rows, value};

/// Kind, client, batch and task of every event but their actor, in order.
const EVENTS: &str = "SELECT concat_ws(' ', kind, client, 'batch ' || batch, 'task ' || task, worker, detail) FROM musterd.events ORDER BY id";

#[tokio::test(flavor = "multi_thread")]
async fn every_change_by_an_operator_is_an_event_and_a_second_call_is_none() {
    let db = TestDb::new().await;
    let owner = db.client().await;
    let batch = value(&owner, "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)").await;
    let task = value(&owner, "SELECT musterd.enqueue('a', '{\"secret\": \"canary\"}')").await;
    let login = db.login("musterd_operator").await;
    let (client, _connection) = connect(&login.url).await;
    for call in [
        format!("hold({batch})"),
        format!("release({batch})"),
        format!("hold({task})"),
        format!("release({task})"),
        format!("abort({task})"),
        "pause_queue('q')".to_owned(),
        "resume_queue('q')".to_owned(),
    ] {
        for _ in 0..2 {
            client.batch_execute(&format!("SELECT musterd.{call}")).await.unwrap();
        }
    }
    client
        .batch_execute(&format!("SELECT musterd.retry_task({task}); SELECT musterd.abort({batch})"))
        .await
        .unwrap();
    assert_eq!(
        rows(&owner, EVENTS).await,
        [
            format!("hold batch {batch}"),
            format!("release batch {batch}"),
            format!("hold task {task}"),
            format!("release task {task}"),
            format!("abort task {task}"),
            "pause {\"queue\": \"q\"}".to_owned(),
            "resume {\"queue\": \"q\"}".to_owned(),
            format!("retry task {task}"),
            format!("abort batch {batch}"),
        ]
    );
    assert_eq!(value(&owner, "SELECT string_agg(DISTINCT actor, ' ') FROM musterd.events").await, login.name);
    // With the change, or not at all.
    client.batch_execute("BEGIN; SELECT musterd.pause_queue('p'); ROLLBACK").await.unwrap();
    assert_eq!(rows(&owner, EVENTS).await.len(), 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_worker_is_believed_when_it_names_its_client() {
    let db = TestDb::new().await;
    let owner = db.client().await;
    for (role, believed) in [("musterd_operator", ""), ("musterd_producer", ""), ("musterd_worker", " alice")]
    {
        let (client, _connection) = connect(&db.login(role).await.url).await;
        let task = match role {
            "musterd_producer" => value(&client, "SELECT musterd.enqueue('a')").await,
            _ => value(&owner, "SELECT musterd.enqueue('a')").await,
        };
        let abort =
            format!("BEGIN; SET LOCAL musterd.client = 'alice'; SELECT musterd.abort({task}); COMMIT");
        client.batch_execute(&abort).await.unwrap();
        let last = rows(&owner, EVENTS).await.pop().unwrap();
        assert_eq!(last, format!("abort{believed} task {task}"), "{role}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_role_writes_changes_or_deletes_an_event() {
    let db = TestDb::new().await;
    let (client, _connection) = connect(&db.login("musterd_worker").await.url).await;
    client.batch_execute("SELECT musterd.pause_queue('q')").await.unwrap();
    for forbidden in [
        "INSERT INTO musterd.events (kind, actor) VALUES ('abort', 'another')",
        "UPDATE musterd.events SET actor = 'another'",
        "DELETE FROM musterd.events",
        "TRUNCATE musterd.events",
    ] {
        assert!(refusal(&client, forbidden).await.starts_with("42501"), "{forbidden}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_muster_does_unasked_is_an_event_too() {
    let db = TestDb::new().await;
    let (client, _connection) = connect(&db.login("musterd_worker").await.url).await;
    client
        .batch_execute(
            "INSERT INTO musterd.workers (id, host, pid, version) VALUES ('w-1-1', 'w', 1, '0');
             UPDATE musterd.workers SET seen_at = now();
             UPDATE musterd.workers SET state = 'dead';
             UPDATE musterd.workers SET state = 'dead'",
        )
        .await
        .unwrap();
    let spent =
        |how: &str| format!("SELECT musterd.submit_batch('work', '[1, 2]'::jsonb, on_budget => '{how}')");
    let mut expected = vec!["worker_dead w-1-1".to_owned()];
    for how in ["hold", "abort"] {
        let batch = value(&client, &spent(how)).await;
        let fail = format!(
            "INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed)
             VALUES ({batch}, 0, gen_random_uuid(), 1, 1, 1, '{{}}', 0, 1);
             SELECT musterd.check_budget({batch}); SELECT musterd.check_budget({batch})"
        );
        client.batch_execute(&fail).await.unwrap();
        expected.push(format!("budget_{how} batch {batch} {{\"failed\": 1, \"allowed\": 0}}"));
    }
    let lost = value(&client, "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)").await;
    let heal = format!(
        "UPDATE musterd.batches SET next_line = 3 WHERE id = {lost};
         SELECT musterd.record_unbalanced({lost}, 2, 0, 0); SELECT musterd.record_unbalanced({lost}, 2, 0, 0);
         SELECT musterd.heal_batch({lost}); SELECT musterd.heal_batch({lost})"
    );
    client.batch_execute(&heal).await.unwrap();
    expected.push(format!("unbalanced batch {lost} {{\"doubled\": 0, \"missing\": 2, \"outside\": 0}}"));
    expected.push(format!("lines_reopened batch {lost} {{\"lines\": 2}}"));
    let found: Vec<String> = rows(&db.client().await, EVENTS)
        .await
        .into_iter()
        .map(|line| line.split(" {\"silent").next().unwrap().to_owned())
        .collect();
    assert_eq!(found, expected);
}
