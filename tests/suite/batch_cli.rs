//! `musterd batch …`: what people see of batches, and what they can do with them.

mod file;
mod steering;

use std::process::Output;

use serde_json::{Value, json};

use crate::suite::outputs::ground::{PATIENCE, end_lines, file_store, folder, over, state};
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// What a command that succeeds prints.
pub(crate) async fn said(config: &TestConfig, args: &[&str]) -> String {
    let output = config.musterd(args).await;
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

/// The same as JSON.
pub(crate) async fn json_of(config: &TestConfig, args: &[&str]) -> Value {
    let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&said(config, &args).await).unwrap()
}

/// What a command that must fail with 1 complains of.
pub(crate) async fn refused(config: &TestConfig, args: &[&str]) -> String {
    let output = config.musterd(args).await;
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stdout(&output));
    stderr(&output)
}

/// The columns of a table's line.
fn columns(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Batches of all kinds, oldest first: ended well, ended badly, running, held, untouched.
async fn some_batches(db: &TestDb) -> Vec<i64> {
    let client = db.client().await;
    let mut ids = Vec::new();
    for (command, hold) in [("one", false), ("two", false), ("one", false), ("two", true), ("one", false)] {
        let submit = "SELECT musterd.submit_batch($1, '[1, 2, 3, 4]'::jsonb, hold => $2)";
        ids.push(client.query_one(submit, &[&command, &hold]).await.unwrap().get(0));
    }
    for (id, failed) in [(ids[0], 0), (ids[1], 1)] {
        let end = "SELECT guard.result($1, n, CASE WHEN n <= $2 THEN 'failed' ELSE 'succeeded' END, n, p_error => E'boom\\nhere')
              FROM generate_series(1, 4) n";
        client.execute(end, &[&id, &failed]).await.unwrap();
        client.execute("UPDATE musterd.batches SET next_line = 5 WHERE id = $1", &[&id]).await.unwrap();
        let complete = "SELECT musterd.complete_scope($1, 1, 4, 4 - $2::int, $2)";
        assert_eq!(client.query_one(complete, &[&id, &failed]).await.unwrap().get::<_, &str>(0), "completed");
    }
    // The third: line 1 has ended, 2 is running, 3 waits for another try, 4 was never reached.
    let running = "WITH cursor AS (UPDATE musterd.batches SET next_line = 4 WHERE id = $1),
        result AS (INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results)
                   VALUES ($1, 1, $2::text::uuid, 1, 1, 1, '{[1,2)}', 1, 0, '{\"a\": 1}'))
        INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, attempt, worker, token)
        VALUES ($1, '{[2,3)}', 1, 'default', 'one', 100, 1, 'somebody', $2::text::uuid),
               ($1, '{[3,4)}', 1, 'default', 'one', 100, 2, NULL, NULL)";
    let token = "6f1e8e6e-6b1f-4d0e-9d55-0d2f6f0f6a11";
    client.execute(running, &[&ids[2], &token]).await.unwrap();
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_the_newest_first_and_is_filtered_and_paged() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let ids = some_batches(&db).await;
    let ids_of = |value: &Value| -> Vec<i64> {
        value["batches"].as_array().unwrap().iter().map(|batch| batch["id"].as_i64().unwrap()).collect()
    };
    let newest_first: Vec<i64> = ids.iter().rev().copied().collect();
    let all = json_of(&config, &["batch", "list"]).await;
    assert_eq!(ids_of(&all), newest_first);
    assert_eq!(all["next_before"], Value::Null);
    let states: Vec<&str> =
        all["batches"].as_array().unwrap().iter().map(|b| b["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["queued", "held", "running", "failed", "succeeded"]);

    for (args, expected) in [
        (&["--state", "held", "--state", "failed"][..], vec![ids[3], ids[1]]),
        (&["--state", "queued"], vec![ids[4]]),
        (&["--command", "two"], vec![ids[3], ids[1]]),
        (&["--queue", "default", "--command", "one", "--state", "running"], vec![ids[2]]),
        (&["--queue", "nowhere"], vec![]),
    ] {
        let args: Vec<&str> = ["batch", "list"].iter().chain(args).copied().collect();
        assert_eq!(ids_of(&json_of(&config, &args).await), expected, "{args:?}");
    }

    let (mut paged, mut before) = (Vec::new(), None);
    loop {
        let mut args = vec!["batch", "list", "--limit", "2"];
        let id = before.map(|id: i64| id.to_string());
        args.extend(id.iter().flat_map(|id| ["--before", id]));
        let page = json_of(&config, &args).await;
        paged.extend(ids_of(&page));
        before = page["next_before"].as_i64();
        if before.is_none() {
            break;
        }
    }
    assert_eq!(paged, newest_first);

    let table = said(&config, &["batch", "list", "--limit", "1"]).await;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(columns(lines[0])[..5], ["BATCH", "STATE", "COMMAND", "QUEUE", "ROWS"]);
    assert_eq!(columns(lines[1])[..6], [&*ids[4].to_string(), "queued", "one", "default", "4", "4"]);
    assert_eq!(lines[2], format!("more: --before {}", ids[4]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_shown_with_its_counts() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let ids = some_batches(&db).await;
    let shown = json_of(&config, &["batch", "show", &ids[2].to_string()]).await;
    let expected = json!({ "id": ids[2], "state": "running", "rows": 4, "queued": 2, "running": 1, "succeeded": 1,
        "failed": 0, "aborted": 0, "aborting": false, "outputs": null, "command": "one", "queue": "default" });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(shown[key], *value, "{key} of {shown}");
    }
    let table = said(&config, &["batch", "show", &ids[1].to_string()]).await;
    let line = table.lines().nth(1).unwrap();
    assert_eq!(columns(line)[1..], ["failed", "two", "default", "4", "0", "0", "3", "1", "0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_shown_by_state_and_page_by_page() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let ids = some_batches(&db).await;
    let (failed, running) = (ids[1].to_string(), ids[2].to_string());
    let lines_of = |value: &Value| -> Vec<(i64, String)> {
        let rows = value["rows"].as_array().unwrap().iter();
        rows.map(|row| (row["line"].as_i64().unwrap(), row["state"].as_str().unwrap().to_owned())).collect()
    };
    let with =
        |lines: &[i64], state: &str| lines.iter().map(|line| (*line, state.to_owned())).collect::<Vec<_>>();

    let all = json_of(&config, &["batch", "rows", &running]).await;
    let expected = [(1, "succeeded"), (2, "running"), (3, "queued"), (4, "queued")];
    assert_eq!(lines_of(&all), expected.map(|(line, state)| (line, state.to_owned())));
    assert_eq!(all["rows"][0]["result"], json!({ "a": 1 }));
    assert_eq!(all["rows"][2]["attempt"], 2);
    for (args, expected) in [
        (&["--queued"][..], with(&[3, 4], "queued")),
        (&["--state", "running"], with(&[2], "running")),
        (&["--succeeded"], with(&[1], "succeeded")),
        (&["--queued", "--from", "4"], with(&[4], "queued")),
        (&["--failed"], vec![]),
        (&["--state", "aborted"], vec![]),
    ] {
        let args: Vec<&str> = ["batch", "rows", &running].iter().chain(args).copied().collect();
        assert_eq!(lines_of(&json_of(&config, &args).await), expected, "{args:?}");
    }
    let page = json_of(&config, &["batch", "rows", &running, "--limit", "3"]).await;
    assert_eq!((lines_of(&page).len(), &page["next_from"]), (3, &json!(4)));
    let page = json_of(&config, &["batch", "rows", &running, "--limit", "3", "--from", "4"]).await;
    assert_eq!((lines_of(&page).len(), &page["next_from"]), (1, &Value::Null));

    let table = said(&config, &["batch", "rows", &failed, "--failed"]).await;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(columns(lines[0]), ["LINE", "STATE", "ATTEMPT", "ERROR", "INPUT", "RESULT"]);
    assert_eq!(columns(lines[1]), ["1", "failed", "1", "boom", "here", "1"], "on one line");
    assert_eq!(lines.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_watched_to_its_end_line_by_line() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let submit = "SELECT musterd.submit_batch('noop', ARRAY(SELECT to_jsonb(n) FROM generate_series(1, 2000) n), hold => true)";
    let id: i64 = client.query_one(submit, &[]).await.unwrap().get(0);
    let watch = tokio::process::Command::from(daemon.config().command(&["batch", "watch", &id.to_string()]))
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    said(daemon.config(), &["batch", "release", &id.to_string()]).await;
    let output = tokio::time::timeout(PATIENCE, watch.wait_with_output()).await.unwrap().unwrap();
    assert!(output.status.success());
    let text = stdout(&output);
    assert!(text.contains("succeeded 2,000/2,000 (100.0 %)"), "{text}");
    assert!(text.contains("rows/s") && text.contains("0 failed"), "{text}");
    // One that has ended is an answer, too; and only success is 0.
    let ended = said(daemon.config(), &["batch", "watch", &id.to_string(), "--json"]).await;
    let ended: Value = serde_json::from_str(ended.trim()).unwrap();
    assert_eq!((&ended["state"], &ended["succeeded"]), (&json!("succeeded"), &json!(2000)));
    let failed = some_batches(&db).await[1].to_string();
    assert_eq!(daemon.config().musterd(&["batch", "watch", &failed]).await.status.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_batch_is_a_clear_error_everywhere() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    // A task is no batch.
    let task = "SELECT musterd.enqueue('noop')";
    let task: i64 = db.client().await.query_one(task, &[]).await.unwrap().get(0);
    std::fs::write(config.dir().join("more.csv"), "a\n1\n").unwrap();
    for id in ["4711", &task.to_string()] {
        for args in [
            &["show"][..],
            &["watch"],
            &["rows"],
            &["outputs"],
            &["export", "--failed"],
            &["hold"],
            &["release"],
            &["abort"],
            &["append", "more.csv"],
        ] {
            let args: Vec<&str> = ["batch", args[0], id].iter().chain(&args[1..]).copied().collect();
            let complaint = refused(&config, &args).await;
            assert!(complaint.contains(&format!("there is no batch {id}")), "{args:?}: {complaint}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_are_listed_downloaded_and_checked() {
    let (toml, dir) = file_store();
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    let daemon = Daemon::builder(&db, &toml).start();
    crate::suite::outputs::ground::ended(&client, id).await;
    let (config, batch) = (daemon.config(), id.to_string());
    let listed = json_of(config, &["batch", "outputs", &batch]).await;
    assert_eq!((&listed["file_count"], &listed["files"][0]["name"]), (&json!(1), &json!("out.txt")));
    assert_eq!(json_of(config, &["batch", "show", &batch]).await["outputs"], listed);
    let table = said(config, &["batch", "outputs", &batch]).await;
    let line = columns(table.lines().nth(1).unwrap());
    let stored = dir.join(folder(&client, id, "g1-r3").await).join("out.txt").display().to_string();
    assert_eq!((line[0], line[3], *line.last().unwrap()), ("out.txt", "3", &*stored), "{table}");
    assert!(said(config, &["batch", "show", &batch]).await.contains("outputs: 1 file, 12 B, listed in "));

    let copy = config.dir().join("copy");
    let to = copy.display().to_string();
    let done = said(config, &["batch", "outputs", &batch, "--download", &to]).await;
    assert!(done.contains("ok"), "{done}");
    assert_eq!(std::fs::read_to_string(copy.join("out.txt")).unwrap(), "1:a\n2:a\n3:a\n");

    // Somebody alters the stored file: the download says so and leaves the good copy alone.
    std::fs::write(&stored, "1:a\n2:b\n3:a\n").unwrap();
    let complaint = refused(config, &["batch", "outputs", &batch, "--download", &to]).await;
    assert!(complaint.contains("is not what the manifest says"), "{complaint}");
    assert_eq!(std::fs::read_to_string(copy.join("out.txt")).unwrap(), "1:a\n2:a\n3:a\n");
    assert_eq!(std::fs::read_dir(&copy).unwrap().count(), 1, "nothing half done is left");

    let none = some_batches(&db).await[0].to_string();
    assert!(said(config, &["batch", "outputs", &none]).await.contains("has no outputs"));
    assert!(
        refused(config, &["batch", "outputs", &none, "--download", &to]).await.contains("has no outputs")
    );
    assert_eq!(state(&client, id).await, "succeeded");
    end_lines(&client, id, 4, 4, "late").await;
    assert_eq!(json_of(config, &["batch", "outputs", &batch]).await, listed, "an ended batch never changes");
}
