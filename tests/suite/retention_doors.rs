//! What people see of retention: `prune`, `why retention`, what went when it is asked for, and who may do what.

use serde_json::json;

use crate::suite::aged::{age, declare, ended, task, tuples};
use crate::suite::api::caller::Caller;
use crate::suite::batch_cli::{json_of, refused, said};
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::sql::{refusal, value};

#[tokio::test(flavor = "multi_thread")]
async fn prune_shows_what_would_go_and_then_does_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    assert!(refused(&config, &["prune"]).await.contains("no worker has declared [retention]"));
    let undeclared = json_of(&config, &["why", "retention"]).await;
    assert_eq!(undeclared["reasons"][0]["code"], "retention_undeclared");
    // The times are those that the workers declared, not those of the file that the command reads.
    declare(&client, "data = 'never'\nrecords = 'never'").await;
    let batch = ended(&client, "work", 30, "").await;
    age(&client, batch, 31).await;
    for days in [1, 31, 31, 400] {
        task(&client, "a", days, "").await;
    }
    client.batch_execute("ANALYZE").await.unwrap();
    let off = json_of(&config, &["why", "retention"]).await;
    assert_eq!(off["reasons"][0]["code"], "retention_off", "{off}");
    assert!(off["reasons"][0]["sentence"].as_str().unwrap().contains("retention.data = \"never\""), "{off}");
    let plan = json_of(&config, &["prune", "--dry-run"]).await;
    assert_eq!(plan["bytes"], 0, "{plan}");
    declare(&client, "").await;
    let behind = json_of(&config, &["why", "retention"]).await;
    assert_eq!(behind["reasons"][0]["code"], "retention_behind", "{behind}");
    let plan = json_of(&config, &["prune", "--dry-run"]).await;
    let rows = &plan["would_go"][0];
    assert_eq!(
        (&rows["what"], &rows["items"], &rows["lines"]),
        (&json!("rows"), &json!(1), &json!(30)),
        "{plan}"
    );
    assert!(rows["bytes"].as_i64().unwrap() > 0 && rows["oldest"].is_string(), "{plan}");
    assert!(said(&config, &["prune", "--dry-run"]).await.contains("30 of 1 batches"));
    assert_eq!(tuples(&client, batch).await, "1 21 10 0", "nothing went");
    let gone = json_of(&config, &["prune"]).await;
    assert_eq!(
        (&gone["batches"], &gone["rows"], &gone["bodies"], &gone["records"]),
        (&json!(1), &json!(30), &json!(2), &json!(1)),
        "{gone}"
    );
    assert!(said(&config, &["prune"]).await.starts_with("0 rows of 0 batches"));
    let done = json_of(&config, &["why", "retention"]).await;
    assert_eq!(done["reasons"][0]["code"], "nothing_wrong", "{done}");
    let events = json_of(&config, &["events", "--kind", "prune"]).await;
    assert_eq!(events["events"][0]["detail"]["rows"], 30, "{events}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_went_is_said_wherever_it_is_asked_for() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "[http]\nrate_limit = 0\n").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    let batch = ended(&client, "work", 9, "").await;
    let id = batch.to_string();
    let held = json_of(config, &["batch", "hold-data", &id]).await;
    assert_eq!(held, json!({"id": batch, "data_held": true}));
    assert!(said(config, &["batch", "show", &id]).await.contains("data: stays until release-data"));
    let caller = Caller::of(&daemon);
    let released = caller.post(&format!("/v1/batches/{id}/release-data"), &[], "").await.json(200);
    assert_eq!(released["data_held"], false);
    let plain = task(&client, "a", 40, "").await;
    age(&client, batch, 31).await;
    said(config, &["prune"]).await;
    let shown = said(config, &["batch", "show", &id]).await;
    assert!(shown.contains("data: went on ") && shown.contains("this record stays until "), "{shown}");
    for args in [&["rows", &id][..], &["export", &id, "--all"], &["redrive", &id], &["hold-data", &id]] {
        let said = refused(config, &[&["batch"], args].concat()).await;
        assert!(said.contains(&format!("the data of batch {id} went on ")), "{args:?}: {said}");
        assert!(said.contains("its record stays until"), "{args:?}: {said}");
    }
    let show = said(config, &["task", "show", &plain.to_string()]).await;
    assert!(show.contains("payload, result and error went on"), "{show}");
    for path in ["rows", "export", "export?format=ndjson"] {
        let problem = caller.get(&format!("/v1/batches/{id}/{path}")).await.problem(410, "data_gone");
        assert!(problem["detail"].as_str().unwrap().contains("went on"), "{problem}");
    }
    for path in ["redrive", "hold-data"] {
        caller.post(&format!("/v1/batches/{id}/{path}"), &[], "").await.problem(410, "data_gone");
    }
    caller.post(&format!("/v1/tasks/{plain}/retry"), &[], "").await.json(200);
    assert!(caller.get(&format!("/v1/batches/{id}")).await.json(200)["data_gone_at"].is_string());
    let why = caller.get("/v1/why/retention").await.json(200);
    assert_eq!(why["subject"], "retention");
    let submitted = caller
        .post("/v1/batches?command=noop&keep=90d", &[("content-type", "application/x-ndjson")], "1\n")
        .await
        .json(201);
    let shown = caller.get(&format!("/v1/batches/{}", submitted["id"])).await.json(200);
    assert_eq!(shown["keep"], "90 days");
    caller
        .post("/v1/batches?command=noop&keep=0s", &[("content-type", "application/x-ndjson")], "1\n")
        .await
        .problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_prune_operators_and_producers_keep_data_and_nobody_else_does_either() {
    let db = TestDb::new().await;
    let owner = db.client().await;
    declare(&owner, "").await;
    let batch = ended(&owner, "work", 3, "").await;
    age(&owner, batch, 31).await;
    let prune = format!("SELECT musterd.prune_batch({batch}, 1)");
    for role in ["musterd_producer", "musterd_observer", "musterd_operator"] {
        let (client, _connection) = connect(&db.login(role).await.url).await;
        for call in [
            &prune,
            "SELECT musterd.prune_tasks(0, 10)",
            "SELECT musterd.prune_events(0, 10)",
            "DELETE FROM musterd.chunks",
        ] {
            let said = refusal(&client, call).await;
            assert!(said.starts_with("42501"), "{role}: {said}");
        }
        let hold = format!("SELECT musterd.hold_data({batch})");
        match role {
            "musterd_operator" => assert_eq!(value(&client, &hold).await, "held"),
            _ => assert!(refusal(&client, &hold).await.starts_with("42501"), "{role}"),
        }
        if role == "musterd_producer" {
            let own = value(&client, "SELECT musterd.submit_batch('work', '[1]'::jsonb)").await;
            assert_eq!(value(&client, &format!("SELECT musterd.hold_data({own})")).await, "held");
        } else {
            value(&client, "SELECT count(*) FROM musterd.prune_plan()").await;
        }
    }
    let (worker, _connection) = connect(&db.login("musterd_worker").await.url).await;
    assert_eq!(value(&worker, &prune).await, "f", "its data is held");
    value(&worker, &format!("SELECT musterd.release_data({batch})")).await;
    assert_eq!(value(&worker, &prune).await, "t");
    assert_eq!(value(&worker, &format!("SELECT p.next FROM musterd.prune_rows({batch}, 1) p")).await, "");
    value(&worker, "SELECT p.last FROM musterd.prune_events(0, 10) p").await;
}
