//! How long rows ran: known for those that were written together, and shown with each of them.

use serde_json::{Value, json as value};
use tokio_postgres::Client;

use crate::suite::support::config::{TestConfig, json, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{QUICK, SOON, number, text};
use crate::suite::support::wait::eventually;

/// A batch that has ended.
async fn ended(client: &Client, submit: &str) -> i64 {
    let batch = number(client, submit).await;
    let state = format!("SELECT state FROM musterd.batch_progress WHERE id = {batch}");
    eventually(SOON, "the batch ends", async || {
        matches!(text(client, &state).await.as_str(), "succeeded" | "failed").then_some(())
    })
    .await;
    batch
}

/// What is wrong with the times of a batch whose rows take about `seconds` each; nothing is.
async fn wrong(client: &Client, batch: i64, seconds: f64) -> i64 {
    let sql = format!(
        "SELECT count(*) FROM musterd.results r JOIN musterd.tasks b ON b.id = r.batch_id
          WHERE r.batch_id = {batch} AND NOT COALESCE(
                r.started_at >= b.created_at AND r.started_at + interval '1 second' * {seconds} <= r.finished_at
                AND r.run_seconds BETWEEN {seconds} AND EXTRACT(EPOCH FROM r.finished_at - r.started_at), false)"
    );
    number(client, &sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_run_one_by_one_have_their_time_everywhere() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, &format!("{QUICK}[handlers.sleep]\nduration = \"30ms\"\n")).start();
    let config = daemon.config();
    let batch = ended(&client, "SELECT musterd.submit_batch('sleep', '[1, 2, 3, 4, 5]')").await;
    assert_eq!(
        number(&client, &format!("SELECT count(*) FROM musterd.results WHERE batch_id = {batch}")).await,
        5
    );
    assert_eq!(wrong(&client, batch, 0.030).await, 0);
    let page = format!(
        "SELECT count(*) FROM musterd.batch_rows({batch}) p JOIN musterd.results r ON r.batch_id = {batch}
        AND r.line = p.line AND (p.started_at, p.run_seconds) = (r.started_at, r.run_seconds)"
    );
    assert_eq!(number(&client, &page).await, 5);

    let id = batch.to_string();
    for args in [&["batch", "rows", &id, "--json"][..], &["batch", "rows", &id, "--succeeded", "--json"]] {
        let shown = json(&config.musterd(args).await);
        for row in shown["rows"].as_array().unwrap() {
            let seconds = row["run_seconds"].as_f64().unwrap();
            assert!((0.030..10.0).contains(&seconds) && row["started_at"].is_string(), "{row}");
        }
    }
    exported(config, &id).await;
}

/// The export has them, too, and they are left out when it is submitted again.
async fn exported(config: &TestConfig, id: &str) {
    let lines = stdout(&config.musterd(&["batch", "export", id, "--all", "--format", "ndjson"]).await);
    let row: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert!(row["_run_seconds"].as_f64().unwrap() >= 0.030 && row["_started_at"].is_string(), "{row}");
    let csv =
        stdout(&config.musterd(&["batch", "export", id, "--all", "--format", "csv", "-o", "all.csv"]).await);
    assert!(csv.contains("5 rows"), "{csv}");
    let again = ["submit", "all.csv", "--exported", "--command", "noop", "--wait", "--json"];
    let again = json(&config.musterd(&again).await)["id"].to_string();
    let shown = json(&config.musterd(&["batch", "rows", &again, "--json"]).await);
    assert_eq!(shown["rows"][0]["input"], value!(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_rows_have_their_time_and_keep_it_in_the_history() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let script = r#"[handlers.broken]
kind = "exec"
argv = ["sh", "-c", '''
while IFS= read -r request; do
    sleep 0.05
    line=$(printf "%s" "$request" | sed -n "s/.*\"row\":{\"line\":\([0-9]*\).*/\1/p")
    printf "{\"line\":%s,\"outcome\":\"failed\",\"error\":\"no\"}\n" "$line"
done''']
"#;
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{script}")).start();
    let batch = ended(&client, "SELECT musterd.submit_batch('broken', '[1, 2]', max_attempts => 1)").await;
    assert_eq!(
        number(&client, &format!("SELECT count(*) FROM musterd.failures WHERE batch_id = {batch}")).await,
        2
    );
    assert_eq!(wrong(&client, batch, 0.050).await, 0);
    client.batch_execute(&format!("SELECT musterd.redrive({batch})")).await.unwrap();
    let kept = format!(
        "SELECT count(*) FROM musterd.failures_history WHERE batch_id = {batch} AND run_seconds >= 0.05"
    );
    assert_eq!(number(&client, &kept).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_run_together_share_the_time_of_their_call() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let function = "CREATE SCHEMA app; CREATE FUNCTION app.slow(p_batch bigint, p_context jsonb, p_rows jsonb)
        RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(0.2);
            RETURN QUERY SELECT (r ->> 'line')::int, 'succeeded', NULL::jsonb, NULL::text FROM jsonb_array_elements(p_rows) r;
        END $$";
    client.batch_execute(function).await.unwrap();
    let handler = "[handlers.slow]\nkind = \"sql\"\nfunction = \"app.slow\"\nblock_size = 4\n";
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{handler}")).start();
    let batch = ended(&client, "SELECT musterd.submit_batch('slow', '[1, 2, 3, 4]')").await;
    // However many of them a block had: together they took one call.
    let shared = format!(
        "SELECT count(*) FROM musterd.outcomes o WHERE o.batch_id = {batch} AND o.succeeded > 0
            AND NOT COALESCE(o.run_seconds * o.succeeded >= 0.2 AND o.finished_at >= o.started_at + interval '0.2 seconds', false)"
    );
    assert_eq!(number(&client, &shared).await, 0);
}
