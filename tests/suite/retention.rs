//! What goes after the end, when, and what stays: passes over work that ended long ago.

use musterd::upkeep::retention::Gone;

use crate::suite::aged::{age, declare, ended, pass, task, tuples};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::worker::submit;

const USUAL: &str = "";
const COUNTS: &str =
    "SELECT state, rows, succeeded, failed, data_gone_at IS NOT NULL, EXTRACT(DAY FROM justify_hours(record_until - data_gone_at))
                        FROM musterd.batch_progress WHERE id = ";

#[tokio::test(flavor = "multi_thread")]
async fn rows_go_after_their_time_and_the_record_stays_until_its_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, USUAL).await;
    let (old, young) =
        (ended(&client, "work", 7, ", idempotency_key => 'k'").await, ended(&client, "work", 4, "").await);
    age(&client, old, 31).await;
    age(&client, young, 29).await;
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.rows, gone.records, gone.trouble), (1, 7, 0, None));
    assert!(gone.bytes > 0);
    assert_eq!(tuples(&client, old).await, "0 0 0 0");
    assert_eq!(tuples(&client, young).await, "1 4 1 0");
    // The record says what it said, that the data went, and until when it stays itself.
    assert_eq!(value(&client, &format!("{COUNTS}{old}")).await, "failed|7|5|2|t|334");
    assert_eq!(value(&client, &format!("{COUNTS}{young}")).await, "failed|4|3|1|f|");
    assert_eq!(value(&client, &format!("SELECT payload FROM musterd.tasks WHERE id = {old}")).await, "{}");
    for call in ["redrive({})", "hold_data({})", "release_data({})"] {
        let said =
            refusal(&client, &format!("SELECT musterd.{}", call.replace("{}", &old.to_string()))).await;
        assert!(said.starts_with(&format!("MU410 the data of batch {old} went on ")), "{said}");
    }
    let said = refusal(&client, &format!("SELECT * FROM musterd.batch_rows({old})")).await;
    assert!(said.starts_with("MU410"), "{said}");
    assert_eq!(rows(&client, &format!("SELECT line FROM musterd.batch_rows({young})")).await.len(), 4);
    // The key is still recognised: the same rows are the same batch, others a conflict.
    let again = |rows: i32| {
        format!(
            "SELECT musterd.submit_batch('work', (SELECT jsonb_agg(jsonb_build_object('n', n)) FROM generate_series(1, {rows}) n),
                    idempotency_key => 'k')"
        )
    };
    assert_eq!(value(&client, &again(7)).await, old.to_string());
    assert!(refusal(&client, &again(8)).await.starts_with("23505"));
    assert_eq!(pass(&db, "").await, Gone::default(), "nothing is left to do");

    // A year later the record goes, too; its id is not handed out again.
    age(&client, old, 367).await;
    let newest = ended(&client, "work", 1, "").await;
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.records), (0, 1));
    assert!(rows(&client, &format!("{COUNTS}{old}")).await.is_empty());
    let fresh: i64 = value(&client, &again(8)).await.parse().unwrap();
    assert!(fresh > newest, "{fresh} is handed out again");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_keep_and_hold_data_say_otherwise() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(
        &client,
        "data = '30d'
         [rules.quick]\ncommand = 'quick'\ndata = '1d'
         [rules.quick_failed]\ncommand = 'quick'\nstate = 'failed'\ndata = '10d'
         [rules.precious]\nqueue = 'precious'\ndata = 'never'\nrecords = 'never'",
    )
    .await;
    let quick = ended(&client, "quick", 2, "").await;
    let quick_failed = ended(&client, "quick", 3, "").await;
    let precious = ended(&client, "work", 1, ", queue => 'precious'").await;
    let kept = ended(&client, "work", 1, ", keep => interval '90 days'").await;
    let brief = ended(&client, "work", 1, ", keep => interval '1 hour'").await;
    let held = ended(&client, "work", 1, "").await;
    let due = ended(&client, "work", 1, "").await;
    value(&client, &format!("SELECT musterd.hold_data({held})")).await;
    for (id, days) in
        [(quick, 2), (quick_failed, 2), (precious, 4_000), (kept, 89), (brief, 2), (held, 800), (due, 31)]
    {
        age(&client, id, days).await;
    }
    pass(&db, "").await;
    let there = "SELECT id FROM musterd.batches WHERE NOT data_deleted ORDER BY id";
    let ids = |ids: &[i64]| ids.iter().map(i64::to_string).collect::<Vec<_>>();
    assert_eq!(rows(&client, there).await, ids(&[quick_failed, precious, kept, held]));
    // Their time comes; what has rows keeps its record, however old it is.
    age(&client, quick_failed, 11).await;
    age(&client, kept, 91).await;
    pass(&db, "").await;
    assert_eq!(rows(&client, there).await, ids(&[precious, held]));
    value(&client, &format!("SELECT musterd.release_data({held})")).await;
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.records), (1, 1), "800 days are more than a year, too");
    assert_eq!(rows(&client, there).await, ids(&[precious]));
    for wrong in ["interval '0'", "interval '-1 day'", "interval '2000 years'"] {
        let said =
            refusal(&client, &format!("SELECT musterd.submit_batch('work', '[1]'::jsonb, keep => {wrong})"))
                .await;
        assert!(said.starts_with("22023 keep is "), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_when_retention_is_off_or_no_worker_has_declared_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = ended(&client, "work", 3, "").await;
    let plain = task(&client, "a", 5_000, "").await;
    age(&client, batch, 5_000).await;
    assert_eq!(pass(&db, "").await, Gone::default(), "no worker has declared it");
    declare(&client, "data = 'never'\nrecords = 'never'").await;
    assert_eq!(pass(&db, "").await, Gone::default());
    // Rows for ever, and so the record of what has rows.
    declare(
        &client,
        "data = 'never'\nrecords = 'never'\n[rules.a]\ncommand = 'a'\ndata = '1d'\nrecords = '1y'",
    )
    .await;
    assert_eq!(pass(&db, "").await.records, 1);
    assert_eq!(rows(&client, "SELECT id FROM musterd.tasks").await, [batch.to_string()], "and not {plain}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_tasks_go_first_and_trees_go_whole() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, USUAL).await;
    let lone = task(&client, "lone", 40, ", idempotency_key => 'k'").await;
    let parent = value(&client, "SELECT musterd.enqueue('parent', '{\"p\": 1}')").await;
    client
        .batch_execute(&format!("UPDATE musterd.task_records SET state = 'waiting' WHERE id = {parent}"))
        .await
        .unwrap();
    let child = value(&client, &format!("SELECT musterd.spawn('child', '{{\"c\": 1}}', {parent})")).await;
    let batch = ended(&client, "work", 3, &format!(", parent_id => {parent}")).await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() WHERE id = {child}"
        ))
        .await
        .unwrap();
    let tree = [parent.parse().unwrap(), child.parse().unwrap(), batch];
    for id in tree {
        age(&client, id, 500).await;
    }
    // A scope that has not ended keeps everything below it.
    let bodies = "SELECT command, payload, data_gone_at IS NOT NULL FROM musterd.tasks ORDER BY id";
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.bodies, gone.records), (0, 1, 0));
    assert_eq!(
        rows(&client, bodies).await,
        ["lone|{}|t", "parent|{\"p\": 1}|f", "child|{\"c\": 1}|f", "work|{}|f"]
    );
    assert_eq!(
        value(&client, &format!("SELECT result IS NULL FROM musterd.tasks WHERE id = {lone}")).await,
        "t"
    );
    assert_eq!(
        value(&client, "SELECT musterd.enqueue('lone', '{\"secret\": 1}', idempotency_key => 'k')").await,
        lone.to_string()
    );
    assert_eq!(value(&client, &format!("SELECT musterd.complete_scope({parent})")).await, "completed");
    // It ended just now: its children are as young as it is.
    assert_eq!(pass(&db, "").await, Gone::default());
    age(&client, tree[0], 40).await;
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.rows, gone.bodies, gone.records), (1, 3, 2, 0));
    assert_eq!(rows(&client, bodies).await, ["lone|{}|t", "parent|{}|t", "child|{}|t", "work|{}|t"]);
    age(&client, tree[0], 366).await;
    assert_eq!(pass(&db, "").await.records, 3);
    assert_eq!(rows(&client, bodies).await, ["lone|{}|t"]);
    // Of a failed task without its payload no other run can be made.
    client.batch_execute("UPDATE musterd.task_records SET state = 'failed'").await.unwrap();
    let said = refusal(&client, &format!("SELECT musterd.retry_task({lone})")).await;
    assert!(said.starts_with(&format!("MU410 the payload of task {lone} went on ")), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_tree_goes_in_bites() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, USUAL).await;
    let parent = value(&client, "SELECT musterd.enqueue('parent')").await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.task_records SET state = 'waiting' WHERE id = {parent};
             INSERT INTO musterd.task_records (command, payload, parent_id) SELECT 'child', '{{\"n\": 1}}', {parent} FROM generate_series(1, 2500);
             UPDATE musterd.task_records SET state = 'succeeded', finished_at = now() - interval '400 days', created_at = now() - interval '400 days'"
        ))
        .await
        .unwrap();
    let page = value(&client, "SELECT p.* FROM musterd.prune_tasks(0, 1000) p").await;
    assert_eq!(page, "0|0|1000|{}", "the same page again: its parent is there");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.task_records").await, "1501");
    assert_eq!(pass(&db, "").await.records, 1_501);
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.task_records").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_task_waits_for_stays() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, USUAL).await;
    let first = task(&client, "first", 500, "").await;
    let batch = ended(&client, "work", 3, "").await;
    let uncle = value(&client, "SELECT musterd.enqueue('uncle')").await;
    // As a crash between an end and the release of its uncles leaves it; the sweep clears it up.
    client
        .batch_execute(&format!(
            "INSERT INTO musterd.task_waits (task_id, after_id) VALUES ({uncle}, {first}), ({uncle}, {batch});
             UPDATE musterd.task_records SET not_before = now() WHERE id = {uncle}"
        ))
        .await
        .unwrap();
    age(&client, batch, 500).await;
    assert_eq!(pass(&db, "").await, Gone::default());
    assert_eq!(value(&client, "SELECT musterd.sweep_uncles()").await, "1");
    let gone = pass(&db, "").await;
    assert_eq!((gone.batches, gone.records), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn held_work_that_was_abandoned_is_aborted_and_old_events_go() {
    let db = TestDb::new().await;
    let client = db.client().await;
    declare(&client, USUAL).await;
    let abandoned = submit(&client, "work", 2, "hold => true").await;
    let touched = submit(&client, "work", 2, "").await;
    value(&client, &format!("SELECT musterd.hold({touched})")).await;
    let held: i64 = value(&client, "SELECT musterd.enqueue('a')").await.parse().unwrap();
    client
        .batch_execute(&format!("UPDATE musterd.task_records SET state = 'held' WHERE id = {held}"))
        .await
        .unwrap();
    for id in [abandoned, touched, held] {
        age(&client, id, 400).await;
    }
    assert_eq!(pass(&db, "").await.abandoned, 2);
    let states = "SELECT state FROM musterd.batch_progress ORDER BY id";
    assert_eq!(rows(&client, states).await, ["running", "held"], "{touched} was held a moment ago");
    assert_eq!(
        value(&client, &format!("SELECT state FROM musterd.tasks WHERE id = {held}")).await,
        "aborted"
    );
    let kinds = "SELECT kind FROM musterd.events ORDER BY id";
    let told = ["hold", "abandoned", "abort", "abandoned", "abort", "prune"];
    assert_eq!(rows(&client, kinds).await, told);

    client
        .batch_execute("UPDATE musterd.events SET at = at - interval '367 days' WHERE kind <> 'prune'")
        .await
        .unwrap();
    declare(&client, "held = 'never'").await;
    assert_eq!(pass(&db, "").await.events, 5);
    assert_eq!(rows(&client, kinds).await, ["prune", "prune"]);
    let last = "SELECT detail ->> 'events' FROM musterd.events ORDER BY id DESC LIMIT 1";
    assert_eq!(value(&client, last).await, "5");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_do_it_by_themselves_and_each_batch_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[retention]\nevery = \"100ms\"\n";
    let daemons = [Daemon::builder(&db, toml).start(), Daemon::builder(&db, toml).start()];
    for daemon in &daemons {
        daemon.wait_ready().await;
    }
    let mut batches = Vec::new();
    for _ in 0..6 {
        batches.push(ended(&client, "work", 30, "").await);
    }
    for id in &batches {
        age(&client, *id, 31).await;
    }
    let left = "SELECT count(*) FROM musterd.batches WHERE NOT data_deleted";
    eventually(SOON, "their rows go", async || (value(&client, left).await == "0").then_some(())).await;
    let told = "SELECT sum((detail ->> 'batches')::int) || ' ' || sum((detail ->> 'rows')::int) FROM musterd.events WHERE kind = 'prune'";
    eventually(SOON, "the passes are told", async || (value(&client, told).await == "6 180").then_some(()))
        .await;
    let mut pruned = 0.0;
    for daemon in &daemons {
        pruned += daemon.metric("musterd_retention_pruned_total{kind=\"rows\"}").await;
    }
    assert_eq!(pruned as u64, 180);
}
