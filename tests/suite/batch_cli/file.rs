//! Files in and out: export, correction, submission again; append; the demo.

use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{json_of, refused, said, stderr, stdout};
use crate::suite::outputs::ground::{ended, files_below};
use crate::suite::support::config::{self, TestConfig};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;

const NASTY: [&str; 4] = ["plain", "with \"quotes\", commas", "two\nlines\tü", ""];

/// A batch of objects; of its six lines those in `failed` have failed.
async fn batch(client: &Client, inputs: &[Value], failed: &[i32]) -> i64 {
    let rows = Value::from(inputs.to_vec());
    let submit = "SELECT musterd.submit_batch('noop', $1::jsonb, max_failed => 100)";
    let id: i64 = client.query_one(submit, &[&rows]).await.unwrap().get(0);
    let end = "SELECT guard.result($1, n, CASE WHEN n = ANY ($3) THEN 'failed' ELSE 'succeeded' END, 3,
                                   CASE WHEN n = ANY ($3) THEN NULL ELSE '{\"ok\": true}'::jsonb END,
                                   'no such \"city\", line ' || n)
          FROM generate_series(1, $2::int) n";
    let rows = inputs.len() as i32;
    client.execute(end, &[&id, &rows, &failed]).await.unwrap();
    client.execute("UPDATE musterd.batches SET next_line = rows + 1 WHERE id = $1", &[&id]).await.unwrap();
    let complete = "SELECT musterd.complete_scope($1, 1, $2::int, $2 - $3::int, $3)";
    client.query_one(complete, &[&id, &rows, &(failed.len() as i32)]).await.unwrap();
    id
}

async fn inputs(client: &Client, id: i64) -> Vec<Value> {
    let sql = "SELECT input FROM musterd.rows WHERE batch_id = $1 ORDER BY line";
    client.query(sql, &[&id]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_rows_are_exported_corrected_and_submitted_again() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let people: Vec<Value> =
        (0..6).map(|n| json!({ "name": NASTY[n % 4], "city": "Osло", "id": n.to_string() })).collect();
    let id = batch(&client, &people, &[2, 3, 5]).await.to_string();

    let printed = said(&config, &["batch", "export", &id, "--failed"]).await;
    assert!(
        printed.starts_with("id,city,name,_line,_state,_attempt,_error,_result,_started_at,_run_seconds\n"),
        "{printed}"
    );
    let done = said(&config, &["batch", "export", &id, "--failed", "-o", "failed.csv"]).await;
    assert_eq!(done, "failed.csv: 3 rows\n");
    let file = config.dir().join("failed.csv");
    let csv = std::fs::read_to_string(&file).unwrap();
    assert_eq!(csv, printed);
    assert!(csv.contains("\"no such \"\"city\"\", line 2\""), "{csv}");

    std::fs::write(&file, csv.replace("Osло", "Oslo")).unwrap();
    let again =
        json_of(&config, &["submit", "failed.csv", "--exported", "--command", "noop", "--hold"]).await;
    let corrected = |n: usize| json!({ "name": NASTY[n % 4], "city": "Oslo", "id": n.to_string() });
    assert_eq!(inputs(&client, again["id"].as_i64().unwrap()).await, [1, 2, 4].map(corrected));
    // Without the word the columns are fields like any other; with it, a file that is no export is refused.
    std::fs::write(config.dir().join("people.csv"), "name\nAnn\n").unwrap();
    let complaint = refused(&config, &["submit", "people.csv", "--exported", "--command", "noop"]).await;
    assert!(complaint.contains("row 1 is not one of an export: it has no field _line"), "{complaint}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_row_comes_back_exactly_from_ndjson_and_what_is_no_object_from_csv_too() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let values = [
        json!({ "a": { "b": [1, null] }, "n": 1 }),
        json!(5),
        json!("word"),
        json!([]),
        json!({}),
        json!(null),
    ];
    let id = batch(&client, &values, &[2]).await.to_string();

    said(&config, &["batch", "export", &id, "--all", "-o", "all.ndjson"]).await;
    let text = std::fs::read_to_string(config.dir().join("all.ndjson")).unwrap();
    let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let expected = json!({ "_line": 1, "_state": "succeeded", "_attempt": 3, "_error": null,
        "_result": { "ok": true }, "_input": values[0], "_started_at": null, "_run_seconds": null });
    assert_eq!(first, expected);
    let again =
        json_of(&config, &["submit", "all.ndjson", "--exported", "--command", "noop", "--hold"]).await;
    assert_eq!(inputs(&client, again["id"].as_i64().unwrap()).await, values);

    said(&config, &["batch", "export", &id, "--all", "-o", "all.csv"]).await;
    let again = json_of(&config, &["submit", "all.csv", "--exported", "--command", "noop", "--hold"]).await;
    let flat = json!({ "a": "{\"b\": [1, null]}", "n": "1" });
    let mut expected = values.to_vec();
    expected[0] = flat;
    assert_eq!(inputs(&client, again["id"].as_i64().unwrap()).await, expected);

    let taken = batch(&client, &[json!({ "_line": 1 })], &[1]).await.to_string();
    let complaint = refused(&config, &["batch", "export", &taken, "--failed"]).await;
    assert!(complaint.contains("format ndjson"), "{complaint}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_a_key_are_appended_once() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    std::fs::write(config.dir().join("first.csv"), "n\n1\n").unwrap();
    std::fs::write(config.dir().join("more.csv"), "n\n2\n3\n").unwrap();
    let held = json_of(&config, &["submit", "first.csv", "--command", "noop", "--hold"]).await;
    let batch = held["id"].to_string();
    let append = |file| ["batch", "append", &batch, file, "--idempotency-key", "tuesday"].map(str::to_owned);
    let append = async |file| json_of(&config, &append(file).each_ref().map(String::as_str)).await;
    for repeated in [false, true, true] {
        let expected = json!({ "id": held["id"], "added": 2, "rows": 3, "repeated": repeated });
        assert_eq!(append("more.csv").await, expected);
    }
    let shown = said(&config, &["batch", "append", &batch, "more.csv", "--idempotency-key", "tuesday"]).await;
    assert!(shown.contains("nothing was added"), "{shown}");
    let other =
        refused(&config, &["batch", "append", &batch, "first.csv", "--idempotency-key", "tuesday"]).await;
    assert!(other.contains("append other rows to batch"), "{other}");
    assert_eq!(inputs(&db.client().await, batch.parse().unwrap()).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_appended_while_held_and_running_and_not_after_the_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "").start();
    let config = daemon.config();
    let write = |name: &str, text: &str| std::fs::write(config.dir().join(name), text).unwrap();
    write("first.csv", "n\n1\n2\n");
    write("more.ndjson", "{\"n\":\"3\"}\n{\"n\":\"4\"}\n{\"n\":\"5\"}\n");
    write("bad.ndjson", "{\"n\":\"6\"}\n{broken\n");
    let held = json_of(config, &["submit", "first.csv", "--command", "noop", "--hold"]).await;
    let id = held["id"].as_i64().unwrap();
    let batch = id.to_string();
    let appended = json_of(config, &["batch", "append", &batch, "more.ndjson"]).await;
    assert_eq!(appended, json!({ "id": id, "added": 3, "rows": 5, "repeated": false }));
    let complaint = refused(config, &["batch", "append", &batch, "bad.ndjson"]).await;
    assert!(complaint.contains("bad.ndjson was not appended") && complaint.contains("line 2"), "{complaint}");
    assert_eq!(
        inputs(&client, id).await,
        [1, 2, 3, 4, 5].map(|n| json!({ "n": n.to_string() })),
        "all or none"
    );

    // Running: a batch of a command that nobody runs has started all the same once it is released.
    let waiting = json_of(config, &["submit", "first.csv", "--command", "nobody"]).await["id"].to_string();
    assert_eq!(
        said(config, &["batch", "append", &waiting, "first.csv"]).await,
        format!("batch {waiting}: 2 rows added, 4 in all\n")
    );

    said(config, &["batch", "release", &batch]).await;
    assert_eq!(ended(&client, id).await, "succeeded");
    assert_eq!(json_of(config, &["batch", "show", &batch]).await["succeeded"], 5);
    let complaint = refused(config, &["batch", "append", &batch, "more.ndjson"]).await;
    assert!(complaint.contains("has ended and takes no more rows"), "{complaint}");
    said(config, &["batch", "abort", &waiting]).await;
    assert!(
        refused(config, &["batch", "append", &waiting, "first.csv"]).await.contains("takes no more rows")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_input_is_an_empty_batch_in_every_format() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    // Standard input of a test is empty.
    for name in ["empty.csv", "empty.ndjson", "empty.json", "empty.tsv", "empty", "-"] {
        if name != "-" {
            std::fs::write(config.dir().join(name), "").unwrap();
        }
        let output = config.musterd(&["submit", name, "--command", "noop", "--wait", "--json"]).await;
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let batch: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!((&batch["state"], &batch["rows"]), (&json!("succeeded"), &json!(0)), "{name}: {batch}");
        assert!(stderr(&output).contains("has no rows"), "{name}: {}", stderr(&output));
    }
    std::fs::write(config.dir().join("blank.csv"), "\n\n").unwrap();
    assert!(
        said(config, &["submit", "blank.csv", "--command", "noop", "--dry-run"]).await.starts_with("0 rows")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_finds_the_id_on_the_first_line_with_and_without_wait() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    std::fs::write(config.dir().join("rows.ndjson"), "1\n2\n").unwrap();
    let submit = ["submit", "rows.ndjson", "--command", "noop"];
    assert_eq!(said(config, &submit).await, "1\n");
    let waited = said(config, &[submit.as_slice(), &["--wait"]].concat()).await;
    let lines: Vec<&str> = waited.lines().collect();
    assert_eq!(lines[0], "2", "{waited}");
    assert!(lines[2].contains("succeeded") && lines[3].starts_with("succeeded after"), "{waited}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delimiter_is_that_of_the_file_unless_it_is_said() {
    let db = TestDb::new().await;
    let (client, config) = (db.client().await, TestConfig::new(&db, ""));
    let cases: [(&str, &str, &[&str], Value); 4] = [
        ("tabs.tsv", "a\tb\n1\t2,5\n", &[], json!({ "a": "1", "b": "2,5" })),
        ("one.tsv", "a,b\n1\n", &[], json!({ "a,b": "1" })),
        ("semicolons.csv", "a;b\n1;2,5\n", &[], json!({ "a": "1", "b": "2,5" })),
        ("said.csv", "a;b\n1;2\n", &["--delimiter", ","], json!({ "a;b": "1;2" })),
    ];
    for (name, text, more, row) in cases {
        std::fs::write(config.dir().join(name), text).unwrap();
        let submit = ["submit", name, "--command", "noop", "--hold"];
        let batch = json_of(&config, &[submit.as_slice(), more].concat()).await;
        assert_eq!(inputs(&client, batch["id"].as_i64().unwrap()).await, [row], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_json_in_an_argument_is_told_in_words() {
    for args in
        [&["enqueue", "echo", "{bad"][..], &["submit", "x.csv", "--command", "c", "--context", "{bad"]]
    {
        let output = config::musterd(args).await;
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = stderr(&output);
        assert!(said.contains("not JSON: expected a key in double quotes (at byte 2)"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_of_neither_or_both_names_both() {
    for more in [&[][..], &["--failed", "--all"]] {
        let output = config::musterd(&[["batch", "export", "1"].as_slice(), more].concat()).await;
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert!(said.contains("--failed") && said.contains("--all"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_shows_the_whole_walk_and_leaves_its_output() {
    // Without a configuration and without a terminal, as `make run` in a pipeline.
    let dir = crate::suite::support::run::new_dir("demo");
    let output = config::musterd_in(
        &dir,
        &["dev", "--ephemeral", "--demo", "--demo-rows", "3000", "--set", "http.listen=127.0.0.1:0"],
    )
    .await;
    let text = stdout(&output);
    assert!(output.status.success(), "{text}\n{}", stderr(&output));
    assert!(text.contains("succeeded") && text.contains("rows/s"), "{text}");
    let after = |word: &str| text.lines().find_map(|line| line.strip_prefix(word)).unwrap().trim().to_owned();
    let path = after("output ").rsplit_once(" (").unwrap().0.to_owned();
    let content = std::fs::read(&path).unwrap();
    assert_eq!(content.split(|byte| *byte == b'\n').count(), 3001);
    assert!(text.contains(&hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&content))));
    let manifest: Value = serde_json::from_slice(&std::fs::read(after("manifest")).unwrap()).unwrap();
    assert_eq!(manifest["files"][0]["rows"], 3000);
    assert_eq!(files_below(&dir.join("outputs")).len(), 2);
}
