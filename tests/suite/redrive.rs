//! The failed rows of an ended batch, run again in place: a new generation, and nothing of the old one lost or touched.

use serde_json::json;
use tokio_postgres::Client;

use crate::suite::batch_cli::{json_of, refused, said};
use crate::suite::outputs::ground::file_store;
use crate::suite::support::audit;
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{open_lines, session, success, take, write, written};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::tasks::{QUICK, becomes};

/// A batch that has ended: of its `rows`, every third failed.
async fn ended(client: &Client, rows: i32, more: &str) -> String {
    let submit = format!(
        "SELECT musterd.submit_batch('work', (SELECT jsonb_agg(n) FROM generate_series(1, {rows}) n), on_done => 'tell'{more})"
    );
    let id = value(client, &submit).await;
    let failed = rows / 3;
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = rows + 1 WHERE id = {id};
             SELECT guard.result({id}, n, CASE WHEN n % 3 = 0 THEN 'failed' ELSE 'succeeded' END, 2, p_error => 'boom ' || n)
               FROM generate_series(1, {rows}) n"
        ))
        .await
        .unwrap();
    let end = format!("SELECT musterd.complete_scope({id}, 1, {rows}, {rows} - {failed}, {failed})");
    assert_eq!(value(client, &end).await, "completed");
    id
}

fn redrive(id: &str) -> String {
    format!("SELECT state FROM musterd.redrive({id})")
}

const PROGRESS: &str =
    "SELECT state, generation, rows, queued, running, succeeded, failed, aborted FROM musterd.batch_progress";

#[tokio::test(flavor = "multi_thread")]
async fn failed_rows_wait_again_and_their_old_results_are_history() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let id = ended(&client, 7, "").await;
    audit::install(&client).await;
    assert_eq!(value(&client, PROGRESS).await, "failed|1|7|0|0|5|2|0");
    assert_eq!(value(&client, &redrive(&id)).await, "running");
    assert_eq!(value(&client, PROGRESS).await, "running|2|7|2|0|5|0|0");
    let task = "SELECT state, error IS NULL AND result IS NULL AND finished_at IS NULL FROM musterd.tasks WHERE command = 'work'";
    assert_eq!(value(&client, task).await, "running|t");
    let history = "SELECT line, generation, attempt, error FROM musterd.failures_history ORDER BY line";
    assert_eq!(rows(&client, history).await, ["3|1|2|boom 3", "6|1|2|boom 6"]);
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.failures").await, "0");
    assert_eq!(value(&client, &redrive(&id)).await, "running", "a repeat changes nothing");
    assert_eq!(value(&client, PROGRESS).await, "running|2|7|2|0|5|0|0");
    // A count of the generation before is not the end of this one.
    let old = format!("SELECT musterd.complete_scope({id}, 1, 7, 5, 2)");
    assert_eq!(value(&client, &old).await, "open");

    let block = take(&worker, 1).await.remove(0);
    assert_eq!((block.attempt, open_lines(&worker, &block).await), (1, vec![3, 6]));
    assert_eq!(write(&worker, success(&block, [3, 6], Some(Default::default()))).await, written(2));
    assert_eq!(value(&client, &old).await, "stale");
    let end = format!("SELECT musterd.complete_scope({id}, 2, 7, 7, 0)");
    assert_eq!(value(&client, &end).await, "completed");
    assert_eq!(value(&client, PROGRESS).await, "succeeded|2|7|0|0|7|0|0");
    assert_eq!(value(&client, &redrive(&id)).await, "succeeded", "nothing failed");
    let told =
        "SELECT idempotency_key, payload ->> 'state' FROM musterd.tasks WHERE command = 'tell' ORDER BY id";
    assert_eq!(
        rows(&client, told).await,
        [format!("batch/{id}/1/done|failed"), format!("batch/{id}/2/done|succeeded")]
    );
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_aborted_or_belongs_to_an_ended_parent_is_not_driven_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = value(&client, "SELECT musterd.enqueue('parent')").await;
    client.batch_execute("UPDATE musterd.task_records SET state = 'waiting'").await.unwrap();
    let child = ended(&client, 3, &format!(", parent_id => {parent}")).await;
    // The parent has not ended: the batch is open below it again, and keeps it from ending.
    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(value(&client, &redrive(&child)).await, "running");
    assert_eq!(value(&client, &format!("SELECT musterd.complete_scope({parent})")).await, "open");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(value(&client, &format!("SELECT musterd.complete_scope({parent})")).await, "completed");
    let said = refusal(&client, &redrive(&child)).await;
    assert_eq!(said, format!("23514 batch {child} belongs to task {parent}, which has ended"));

    let aborted = value(&client, "SELECT musterd.submit_batch('work', '[1]')").await;
    assert_eq!(value(&client, &format!("SELECT musterd.abort({aborted})")).await, "aborting");
    assert_eq!(value(&client, &redrive(&aborted)).await, "aborting");
    let end = format!("SELECT musterd.complete_scope({aborted}, 1, 1, 0, 0)");
    assert_eq!(value(&client, &end).await, "completed");
    let said = refusal(&client, &redrive(&aborted)).await;
    assert_eq!(said, format!("23514 batch {aborted} was aborted, which is for good"));
    for none in [parent.as_str(), "4711"] {
        assert_eq!(refusal(&client, &redrive(none)).await, format!("P0002 no batch {none}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_who_redrive_at_once_open_one_generation() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ended(&client, 6, "").await;
    let mut schedule = Schedule::new(&db, &["a", "b"]).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &redrive(&id)).await.rows(), ["running"]);
    schedule.blocks("b", &redrive(&id)).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["running"]);
    assert_eq!(value(&client, PROGRESS).await, "running|2|6|2|0|4|0|0");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.blocks").await, "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_runs_the_failed_rows_and_only_those_and_ends_the_batch_anew() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ended(&client, 3_600, "").await;
    audit::install(&client).await;
    let (outputs, _) = file_store();
    let toml = format!(
        "{QUICK}{outputs}[handlers.work]\nkind = \"builtin\"\nbuiltin = \"echo\"\noutput = \"again.txt\"\n"
    );
    let config = TestConfig::new(&db, &toml);
    let running = json!({ "id": id.parse::<i64>().unwrap(), "state": "running", "rows": 1_200 });
    assert_eq!(json_of(&config, &["batch", "redrive", &id]).await, running);
    let _daemon = Daemon::builder(&db, &toml).start();
    becomes(&client, PROGRESS, "succeeded|2|3600|0|0|3600|0|0").await;
    let again = "SELECT count(*), min(line), max(line), bool_and(line % 3 = 0) FROM musterd.results WHERE attempt = 1";
    assert_eq!(value(&client, again).await, "1200|3|3600|t");
    let files = "SELECT outputs ->> 'manifest' FROM musterd.batches";
    assert!(value(&client, files).await.contains("/g2-r3600/"), "the files carry the generation");
    let told = "SELECT count(*) FROM musterd.tasks WHERE command = 'tell'";
    assert_eq!(value(&client, told).await, "2");
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
    assert_eq!(
        said(&config, &["batch", "redrive", &id]).await,
        format!("batch {id}: succeeded, no failed row to run again\n")
    );
    assert!(refused(&config, &["batch", "redrive", "4711"]).await.contains("there is no batch 4711"));
}
