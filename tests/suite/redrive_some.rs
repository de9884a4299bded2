//! Some of the failed rows of an ended batch, run again: exactly those, the others stay failures and count, and a repeat does no harm.

use musterd::error_group::ErrorGroup;
use musterd::handler::Outcome;
use serde_json::json;
use tokio_postgres::Client;

use crate::suite::api::caller::{Caller, JSON};
use crate::suite::batch_cli::{json_of, refused, said};
use crate::suite::support::audit;
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::{refusal, rows, value};
use crate::suite::support::worker::{
    Script, Worker, assert_accounts_balance, end_of, progress, submit, succeeded,
};

/// A batch of 100,000 rows that has ended: every twentieth failed, in five groups of a thousand each.
async fn large(client: &Client) -> i64 {
    let batch = submit(client, "work", 100_000, "max_failed => 4010").await;
    let groups: Vec<i32> =
        ["timeout after 5 s", "a", "b", "c", "d"].iter().map(|error| ErrorGroup::of(error, None).0).collect();
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = rows + 1 WHERE id = {batch};
             INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed)
             SELECT {batch}, min(n), gen_random_uuid(), 1, 1, 1, range_agg(int4range(n, n + 1)), count(*), 500
               FROM generate_series(1, 100000) n WHERE n % 20 <> 0 GROUP BY (n - 1) / 10000;
             INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error)
             SELECT {batch}, n, 1, 1, (ARRAY{groups:?})[n / 20 % 5 + 1], 'error of ' || n FROM generate_series(20, 100000, 20) n"
        ))
        .await
        .unwrap();
    let end = format!("SELECT musterd.complete_scope({batch}, 1, 100000, 95000, 5000)");
    assert_eq!(value(client, &end).await, "completed");
    batch
}

#[tokio::test(flavor = "multi_thread")]
async fn one_group_of_a_thousand_runs_again_and_no_other_row() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let batch = large(&client).await;
    audit::install(&client).await;
    let (config, id) = (TestConfig::new(&db, ""), batch.to_string());
    let group = ErrorGroup::of("timeout after 5 s", None).to_string();
    let choice = ["batch", "redrive", &id, "--error", &group];
    let preview = json_of(&config, &[&choice[..], &["--dry-run"]].concat()).await;
    let first: Vec<i32> = (1..=10).map(|n| n * 100).collect();
    let groups = json!([{ "group": group, "count": 1_000 }]);
    assert_eq!(preview, json!({ "id": batch, "rows": 1_000, "first_lines": first, "errors": groups }));
    assert_eq!(progress(&client, batch).await.generation, 1, "nothing was changed");
    assert_eq!(json_of(&config, &choice).await, json!({ "id": batch, "state": "running", "rows": 1_000 }));
    // A call while they run is refused.
    assert!(refused(&config, &choice).await.contains("is running"));
    assert_eq!(progress(&client, batch).await.failed, 4_000);

    let script = Script::new(|call| async move {
        match call.line % 10_000 {
            0 => Outcome::Failed("timeout after 9 s".into()),
            100 => Outcome::Failed("something else".into()),
            _ => succeeded(),
        }
    });
    let worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 95_980, 4_020, 0));
    let mut runs: Vec<i32> = script.calls().iter().map(|call| call.line).collect();
    runs.sort_unstable();
    assert_eq!(runs, (1..=1_000).map(|n| n * 100).collect::<Vec<_>>(), "each once, and no other");
    worker.stop().await;

    let told = format!("SELECT * FROM musterd.batch_redrives({batch})");
    assert_eq!(rows(&client, &told).await, ["2|1000|980|10|10|0"]);
    let shown = said(&config, &["batch", "show", &id]).await;
    assert!(
        shown.contains(
            "generation 2: of 1,000 that had failed 980 are fixed, 10 fail as before, 10 fail otherwise"
        ),
        "{shown}"
    );
    let then = json_of(&config, &["batch", "errors", &id, "--generation", "1"]).await;
    let counts: Vec<_> = then["errors"].as_array().unwrap().iter().map(|e| e["count"].clone()).collect();
    assert_eq!(counts, [1_000; 5], "the history of the first generation is whole");
    let now = json_of(&config, &["batch", "errors", &id, "--generation", "2"]).await;
    let counts: Vec<_> = now["errors"].as_array().unwrap().iter().map(|e| e["count"].clone()).collect();
    assert_eq!(counts, [10, 10]);
    let page =
        json_of(&config, &["batch", "rows", &id, "--generation", "1", "--from", "90", "--limit", "2"]).await;
    assert_eq!((&page["rows"][0]["line"], &page["rows"][0]["error"]), (&json!(100), &json!("error of 100")));
    assert_eq!(page["rows"][0]["error_group"], group);

    // Ten more are fixed: 4,010 failures are as many as the batch may have.
    assert_eq!(json_of(&config, &["batch", "redrive", &id, "--error", &group]).await["rows"], 10);
    let _worker = Worker::start(&db, "", &[("work", Script::succeeding())]).await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 95_990, 4_010, 0));
    assert_eq!(rows(&client, &told).await, ["2|1000|980|10|10|0", "3|10|10|0|0|0"]);
    assert_accounts_balance(&client).await;
    assert_eq!(audit::violations(&client).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_chosen_by_line_and_input_and_run_with_a_fixed_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let failing = Script::new(|_| async { Outcome::Failed("no".into()) });
    let worker = Worker::start(&db, "", &[("work", failing)]).await;
    let submit = "SELECT musterd.submit_batch('work', (SELECT jsonb_agg(jsonb_build_object('n', n, 'country', CASE WHEN n % 2 = 0 THEN 'DE' ELSE 'FR' END))
                                                 FROM generate_series(1, 20) n), context => '{\"v\": 1}')";
    let batch: i64 = client.query_one(submit, &[]).await.unwrap().get(0);
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 0, 20, 0));
    worker.stop().await;

    let daemon = Daemon::builder(
        &db,
        "[http]\nrate_limit = 0\n[handlers.fixed]\nkind = \"builtin\"\nbuiltin = \"echo\"\n",
    )
    .start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    let path = format!("/v1/batches/{batch}/redrive");
    let some = |more: &str| format!("{{\"lines\": \"3-8,11\", \"where\": {{\"country\": \"DE\"}}{more}}}");
    let preview = caller.post(&path, &[JSON], &some(", \"dry_run\": true")).await.json(200);
    assert_eq!((&preview["rows"], &preview["first_lines"]), (&json!(3), &json!([4, 6, 8])));
    let fix = some(", \"generation\": 1, \"command\": \"fixed\", \"context\": {\"v\": 2}");
    assert_eq!(
        caller.post(&path, &[JSON], &fix).await.json(200),
        json!({ "id": batch, "state": "running", "rows": 3 })
    );
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 3, 17, 0));
    // The same request once more, because its answer was lost, say.
    let repeated = caller.post(&path, &[JSON], &fix).await.problem(409, "conflict");
    assert!(repeated["detail"].as_str().unwrap().contains("in generation 2 by now"), "{repeated}");
    let nothing = caller.post(&path, &[JSON], &some("")).await.json(200);
    assert_eq!(nothing, json!({ "id": batch, "state": "failed", "rows": 0 }), "those are fixed");
    for wrong in
        [r#"{"lines": "8-3"}"#, r#"{"errors": ["x"]}"#, r#"{"generation": 0}"#, r#"{"line": "1"}"#, "[]"]
    {
        caller.post(&path, &[JSON], wrong).await.problem(400, "invalid_request");
    }
    let kept = "SELECT b.command, t.command AS submitted, t.payload FROM musterd.batches b JOIN musterd.task_records t USING (id)";
    assert_eq!(rows(&client, kept).await, ["fixed|work|{\"v\": 2}"]);
    let history = "SELECT line, generation, redriven_in FROM musterd.failures_history ORDER BY line";
    assert_eq!(rows(&client, history).await, ["4|1|2", "6|1|2", "8|1|2"]);
    let event = "SELECT detail FROM musterd.events WHERE kind = 'redrive'";
    assert_eq!(
        value(&client, event).await,
        r#"{"left": 17, "rows": 3, "command": "fixed", "generation": 2}"#
    );
    let bad = format!("SELECT * FROM musterd.redrive({batch}, ARRAY['nothex'])");
    assert!(refusal(&client, &bad).await.contains("is no group of errors"));
    drop(daemon);
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_redrive_at_once_one_wins_and_appended_rows_join_its_generation() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let failing =
        Script::new(
            |call| async move { if call.line <= 2 { Outcome::Failed("no".into()) } else { succeeded() } },
        );
    let worker = Worker::start(&db, "", &[("work", failing)]).await;
    let batch = submit(&client, "work", 6, "").await;
    end_of(&client, batch).await;
    worker.stop().await;

    let mut schedule = Schedule::new(&db, &["a", "b", "producer"]).await;
    let redrive = |line: i32| {
        format!("SELECT state, redriven FROM musterd.redrive({batch}, lines => '{{[{line},{}]}}')", line)
    };
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", &redrive(1)).await.rows(), ["running|1"]);
    schedule.blocks("b", &redrive(2)).await;
    schedule.blocks("producer", &format!("SELECT musterd.append_rows({batch}, '[7]'::jsonb)")).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(
        schedule.resumes("b").await.rows(),
        ["running|0"],
        "it runs: nothing of the second call is done"
    );
    assert_eq!(schedule.resumes("producer").await.rows(), ["7"]);
    // A hold and a release do not bring the other failure back.
    assert_eq!(value(&client, &format!("SELECT musterd.hold({batch})")).await, "held");
    assert_eq!(value(&client, &redrive(2)).await, "held|0");
    assert_eq!(value(&client, &format!("SELECT musterd.release({batch})")).await, "running");
    let script = Script::succeeding();
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 6, 1, 0));
    let runs: Vec<i32> = script.runs().keys().map(|(_, line)| *line).collect();
    assert_eq!(runs, [1, 7]);
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_that_stay_spend_nothing_of_the_budget() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let failing = || {
        Script::new(|call| async move {
            if call.line <= 2 || call.line > 6 { Outcome::Failed("no".into()) } else { succeeded() }
        })
    };
    let worker = Worker::start(&db, "", &[("work", failing())]).await;
    let batch = submit(&client, "work", 6, "max_failed => 2, on_budget => 'abort'").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 4, 2, 0));
    worker.stop().await;
    let redrive = format!("SELECT state, redriven FROM musterd.redrive({batch}, lines => '{{[1,1]}}')");
    assert_eq!(value(&client, &redrive).await, "running|1");
    // Two have failed in the new generation, as many as may, beside the one that was left; and there are rows left to stop.
    let append = format!("SELECT musterd.append_rows({batch}, '[7, 8]'::jsonb)");
    client.batch_execute(&append).await.unwrap();
    let fail = |line: i32| {
        format!(
            "UPDATE musterd.batches SET next_line = 8; DELETE FROM musterd.blocks; SELECT guard.result({batch}, {line}, 'failed')"
        )
    };
    client.batch_execute(&format!("{}; {}", fail(1), fail(7))).await.unwrap();
    let verdict = format!("SELECT verdict, may_fail, has_failed FROM musterd.check_budget({batch})");
    assert_eq!(rows(&client, &verdict).await, ["within|3|3"]);
    let _worker = Worker::start(&db, "", &[("work", Script::succeeding())]).await;
    assert_eq!(end_of(&client, batch).await, ("failed".into(), 5, 3, 0));
    assert_accounts_balance(&client).await;
}
