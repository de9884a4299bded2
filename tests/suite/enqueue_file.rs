//! `musterd enqueue --file`: a task for each line, all of them or none.

use std::process::{Output, Stdio};

use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::suite::batch_cli::{json_of, refused, said, stderr};
use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::sql::{rows, value};
use crate::suite::support::wait::{SOON, within};

const COUNT: &str = "SELECT count(*) FROM musterd.tasks";

fn write(config: &TestConfig, name: &str, text: impl AsRef<[u8]>) {
    std::fs::write(config.dir().join(name), text).unwrap();
}

/// Runs a command with this on its standard input.
async fn with_input(config: &TestConfig, args: &[&str], input: &str) -> Output {
    let mut command = config.command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).await.unwrap();
    drop(stdin);
    within(SOON, child.wait_with_output()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_line_is_a_task_with_the_options_of_the_command() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "");
    // More than one group, blank lines between payloads, and no line end behind the last.
    let lines: Vec<String> = (1..=12_345).map(|n| format!("{{\"n\": {n}}}")).collect();
    write(&config, "many.ndjson", lines.join("\n\n"));
    let done = json_of(&config, &["enqueue", "work", "--file", "many.ndjson"]).await;
    assert_eq!(done, json!({ "tasks": 12_345, "first_id": 1, "last_id": 12_345 }));
    assert_eq!(rows(&client, "SELECT payload FROM musterd.tasks ORDER BY id").await, lines);

    write(&config, "few.ndjson", "1\n{\"a\": [1.50]}\n\"text\"\r\nnull\n");
    let options =
        ["--queue", "side", "--priority", "-5", "--delay", "1h", "--max-attempts", "7", "--timeout", "90s"];
    let more = ["--on-child-failure", "abort_siblings"];
    let args = [&["enqueue", "report", "--file", "few.ndjson"][..], &options, &more].concat();
    assert_eq!(said(&config, &args).await, "4 tasks, first id 12346, last id 12349\n");
    let kept =
        "SELECT payload, queue, priority, state, max_attempts, timeout, on_child_failure FROM musterd.tasks
                 WHERE command = 'report' ORDER BY id";
    let same = "side|-5|scheduled|7|00:01:30|abort_siblings";
    let payloads = ["1", "{\"a\": [1.50]}", "\"text\"", "null"];
    assert_eq!(rows(&client, kept).await, payloads.map(|payload| format!("{payload}|{same}")));

    let output =
        with_input(&config, &["enqueue", "piped", "--file", "-", "--run-at", "2099-12-24T18:00:00Z"], "7\n")
            .await;
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "1 task, id 12350\n");
    assert_eq!(value(&client, "SELECT state FROM musterd.tasks WHERE id = 12350").await, "scheduled");

    write(&config, "empty.ndjson", "\n\n");
    let output = config.musterd(&["enqueue", "work", "--file", "empty.ndjson", "--json"]).await;
    let none: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(none, json!({ "tasks": 0, "first_id": null, "last_id": null }));
    assert!(stderr(&output).contains("empty.ndjson has no payloads"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_line_is_named_and_refuses_all_of_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = TestConfig::new(&db, "[submit]\nmax_row_bytes = 1000\n");
    let good = "{\"n\": 1}\n".repeat(20_000);
    let wide = format!("{good}\"{}\"\n", "x".repeat(1001));
    for (text, words) in [
        (
            format!("{good}{{n: 2}}\n{good}"),
            "line 20001, column 2: not JSON: expected a key in double quotes",
        ),
        (format!("{good}\"\\u0000\"\n"), "line 20001, column 2: PostgreSQL cannot store the character NUL"),
        (wide, "line 20001: the row has more than 1000 bytes"),
        ("name,age\nAnn,41\n".to_owned(), "line 1, column 1: not JSON"),
    ] {
        write(&config, "bad.ndjson", &text);
        let told = refused(&config, &["enqueue", "work", "--file", "bad.ndjson"]).await;
        assert!(told.contains("nothing of bad.ndjson was enqueued") && told.contains(words), "{told}");
        assert_eq!(value(&client, COUNT).await, "0", "{words}");
    }
    write(&config, "bytes.ndjson", b"1\n\"\xff\"\n");
    let told = refused(&config, &["enqueue", "work", "--file", "bytes.ndjson"]).await;
    assert!(told.contains("line 2, column 2: invalid UTF-8"), "{told}");
    let told = refused(&config, &["enqueue", "work", "--file", "missing.ndjson"]).await;
    assert!(told.contains("cannot open missing.ndjson"), "{told}");
    write(&config, "good.ndjson", &good);
    let late = ["enqueue", "work", "--file", "good.ndjson", "--run-at", "9999-01-01T00:00:00Z"];
    assert!(refused(&config, &late).await.contains("run_at is more than a hundred years ahead"));
    assert_eq!(value(&client, COUNT).await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_for_many_is_refused_beside_a_file() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    write(&config, "good.ndjson", "1\n");
    for option in [
        &["{}"][..],
        &["--dedup-key", "k"],
        &["--dedup-key", "k", "--replace"],
        &["--idempotency-key", "k"],
        &["--after", "1"],
        &["--wait"],
    ] {
        let args = [&["enqueue", "work", "--file", "good.ndjson"][..], option].concat();
        let output = config.musterd(&args).await;
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        assert!(stderr(&output).contains("'--file <FILE>' cannot be used with"), "{output:?}");
    }
    assert_eq!(value(&db.client().await, COUNT).await, "0");
}
