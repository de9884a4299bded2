//! `musterd why`: the right reason for everything that is not moving.

use serde_json::Value;

use crate::suite::support::config::{TestConfig, json};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;

/// The codes of the reasons, in their order.
async fn codes(config: &TestConfig, args: &[&str]) -> Vec<String> {
    let args: Vec<&str> = ["why"].into_iter().chain(args.iter().copied()).chain(["--json"]).collect();
    let answer: Value = json(&config.musterd(&args).await);
    answer["reasons"]
        .as_array()
        .unwrap()
        .iter()
        .map(|reason| reason["code"].as_str().unwrap().into())
        .collect()
}

async fn id(client: &tokio_postgres::Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_worker_that_is_the_reason_and_held_and_paused_are_told() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let held = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb], hold => true)").await;
    assert_eq!(codes(&config, &["batch", &held]).await, ["held"]);
    let waiting = id(&client, "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb])").await;
    assert_eq!(codes(&config, &["batch", &waiting]).await, ["no_worker"]);
    client.execute("SELECT musterd.pause_queue('default')", &[]).await.unwrap();
    assert_eq!(codes(&config, &["batch", &waiting]).await, ["paused", "no_worker"]);
    assert_eq!(codes(&config, &["queue", "default"]).await, ["paused", "no_worker"]);
    let empty = id(&client, "SELECT musterd.submit_batch('noop', '{}'::jsonb[])").await;
    assert_eq!(codes(&config, &["batch", &empty]).await, ["ended"]);
    let aborting = "SELECT musterd.submit_batch('noop', ARRAY['1'::jsonb])";
    let aborted = id(&client, aborting).await;
    client.execute(&format!("SELECT musterd.abort({aborted})"), &[]).await.unwrap();
    assert_eq!(codes(&config, &["batch", &aborted]).await, ["aborting"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_worker_the_handler_the_schedule_and_the_children_are_named() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let toml = "[queues.lane]\nmode = \"structured\"\n[handlers.sleep]\nduration = \"1h\"";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let config = daemon.config();
    let nobodys = id(&client, "SELECT musterd.submit_batch('unheard_of', ARRAY['1'::jsonb])").await;
    assert_eq!(codes(config, &["batch", &nobodys]).await, ["no_handler"]);
    let elsewhere = id(&client, "SELECT musterd.enqueue('noop', queue => 'nowhere')").await;
    assert_eq!(codes(config, &["task", &elsewhere]).await, ["queue_not_served"]);
    let later = id(&client, "SELECT musterd.enqueue('noop', delay => '1 hour')").await;
    assert_eq!(codes(config, &["task", &later]).await, ["scheduled"]);
    let parent = id(&client, "SELECT musterd.enqueue('noop', delay => '1 day')").await;
    let spawn = format!("SELECT musterd.spawn('unheard_of', p_parent_id => {parent})");
    client.execute(&spawn, &[]).await.unwrap();
    client
        .execute(&format!("UPDATE musterd.tasks SET state = 'waiting' WHERE id = {parent}"), &[])
        .await
        .unwrap();
    assert_eq!(codes(config, &["task", &parent]).await, ["waiting_for_children"]);
    let uncle = format!("SELECT musterd.enqueue_after('noop', '{{}}', ARRAY[{parent}]::bigint[])");
    let uncle = id(&client, &uncle).await;
    assert_eq!(codes(config, &["task", &uncle]).await, ["waiting_for_tasks"]);
    assert_eq!(codes(config, &["queue", "lane"]).await, ["nothing_wrong"]);
}

#[tokio::test]
async fn what_does_not_exist_is_said_so() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    for args in [["why", "batch", "17"], ["why", "task", "17"], ["why", "queue", "nowhere"]] {
        let output = config.musterd(&args).await;
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("there is no"), "{args:?}");
    }
}
