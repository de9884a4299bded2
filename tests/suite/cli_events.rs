//! `musterd events`, and the command line of an operator: it steers and looks with a login that can do no more.

use crate::suite::support::config::{TestConfig, stderr, stdout};
use crate::suite::support::database::TestDb;
use crate::suite::support::sql::value;

async fn config_of(db: &TestDb, role: &str) -> TestConfig {
    TestConfig::new(db, &format!("[database]\nurl = \"{}\"", db.login(role).await.url))
}

async fn printed(config: &TestConfig, args: &[&str]) -> String {
    let output = config.musterd(args).await;
    assert!(output.status.success(), "{args:?}: {} {}", stdout(&output), stderr(&output));
    stdout(&output)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_steers_and_looks_by_the_command_line_and_its_events_name_it() {
    let db = TestDb::new().await;
    let owner = db.client().await;
    let batch = value(&owner, "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)").await;
    let task = value(&owner, "SELECT musterd.enqueue('work')").await;
    let login = db.login("musterd_operator").await;
    let config = TestConfig::new(&db, &format!("[database]\nurl = \"{}\"", login.url));
    for args in [
        &["batch", "hold", &batch][..],
        &["batch", "release", &batch],
        &["queue", "pause", "other"],
        &["queue", "resume", "other"],
        &["task", "abort", &task],
        &["task", "retry", &task],
        &["batch", "list"],
        &["batch", "show", &batch],
        &["batch", "rows", &batch],
        &["batch", "export", &batch, "--all"],
        &["task", "list"],
        &["task", "show", &task],
        &["queue", "list"],
        &["worker", "list"],
        &["handler", "list"],
        &["why", "batch", &batch],
        &["why", "task", &task],
        &["why", "queue", "default"],
    ] {
        printed(&config, args).await;
    }
    let all: serde_json::Value =
        serde_json::from_str(&printed(&config, &["events", "--json"]).await).unwrap();
    let kinds: Vec<&str> =
        all["events"].as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["retry", "abort", "resume", "pause", "release", "hold"]);
    assert!(all["events"].as_array().unwrap().iter().all(|event| event["actor"] == login.name), "{all}");
    assert_eq!(all["next_before"], serde_json::Value::Null);
    let of_batch = printed(&config, &["events", "--batch", &batch]).await;
    assert!(of_batch.contains("release") && of_batch.contains(&format!("batch {batch}")), "{of_batch}");
    assert!(!of_batch.contains("pause") && !of_batch.contains("retry"), "{of_batch}");
    let of_task = printed(&config, &["events", "--task", &task, "--kind", "abort", "--limit", "1"]).await;
    assert!(of_task.contains("abort") && of_task.contains("more: --before"), "{of_task}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_role_may_not_is_refused_in_words() {
    let db = TestDb::new().await;
    let batch = value(&db.client().await, "SELECT musterd.submit_batch('work', '[1, 2]'::jsonb)").await;
    for (role, args) in [
        ("musterd_observer", &["batch", "abort", &batch][..]),
        ("musterd_observer", &["queue", "pause", "q"]),
    ] {
        let output = config_of(&db, role).await.musterd(args).await;
        assert!(!output.status.success(), "{role} {args:?}");
        assert!(stderr(&output).contains("permission denied"), "{}", stderr(&output));
    }
}
