//! `musterd handler` and what `musterd doctor` says of handlers.

use serde_json::{Value, json};

use super::server::{Act, Request, Server};
use super::{Site, example};
use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;

fn read(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn sample(config: &TestConfig, text: &str) -> String {
    let file = config.dir().join("sample.ndjson");
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_tried_on_sample_rows_and_shows_request_reply_and_verdict() {
    let db = TestDb::new().await;
    let server = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let python = example("exec_python.py").display().to_string();
    let toml =
        format!("{}[handlers.greet]\nkind = \"exec\"\nargv = [\"python3\", {python:?}]\n", server.config(""));
    let config = TestConfig::new(&db, &toml);
    let file = sample(&config, "{\"name\":\"Ada\"}\n{\"nobody\":1}\n");
    let http = config.musterd(&["handler", "test", "work", "--input", &file, "--json"]).await;
    let tried = read(&http);
    assert_eq!((&tried["ok"], http.status.code()), (&json!(true), Some(0)));
    assert!(tried["exchanges"][0]["request"].as_str().unwrap().contains("\"name\":\"Ada\""), "{tried}");
    assert!(tried["exchanges"][0]["reply"].as_str().unwrap().contains("succeeded"), "{tried}");
    let exec = config
        .musterd(&["handler", "test", "greet", "--input", &file, "--context", "{\"word\":\"Hi\"}", "--json"])
        .await;
    let tried = read(&exec);
    assert_eq!(tried["rows"][0]["result"], json!({ "greeting": "Hi, Ada!" }));
    assert_eq!((&tried["rows"][1]["outcome"], exec.status.code()), (&json!("failed"), Some(1)));
    let plain = config.musterd(&["handler", "test", "greet", "--input", &file]).await;
    let text = String::from_utf8(plain.stdout).unwrap();
    assert!(text.contains("> {") && text.contains("< {") && text.contains("1 of 2 rows succeeded"), "{text}");
    let missing = config.musterd(&["handler", "test", "nobody", "--input", &file]).await;
    assert!(String::from_utf8(missing.stderr).unwrap().contains("[handlers.nobody]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn trying_a_sql_function_leaves_nothing_behind() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(&std::fs::read_to_string(example("sql_score.sql")).unwrap()).await.unwrap();
    let config = TestConfig::new(&db, "[handlers.score]\nkind = \"sql\"\nfunction = \"app.score\"\n");
    let file = sample(&config, "{\"customer\":\"c\",\"spent\":100}\n");
    let tried = read(&config.musterd(&["handler", "test", "score", "--input", &file, "--json"]).await);
    assert_eq!(tried["rows"][0]["result"], json!({ "score": 4.615 }), "{tried}");
    let kept: i64 = client.query_one("SELECT count(*) FROM app.scores", &[]).await.unwrap().get(0);
    assert_eq!(kept, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_tried_on_a_task_and_shows_what_it_would_make() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let procedure = "CREATE SCHEMA app; CREATE TABLE app.effects (task_id bigint);
        CREATE PROCEDURE app.derive(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO app.effects VALUES (p_task_id);
            PERFORM musterd.spawn('part', p_payload, p_task_id);
            PERFORM musterd.enqueue_after('mail', '{}', ARRAY[p_task_id]);
            PERFORM musterd.set_result('{\"pages\": 3}');
            IF p_payload ? 'bad' THEN RAISE EXCEPTION 'no such month'; END IF;
        END $$";
    client.batch_execute(procedure).await.unwrap();
    let server = Server::start(|request: Request| async move {
        assert_eq!(request.body["kind"], "task");
        let n = &request.body["task"]["payload"]["n"];
        let spawn = json!([{ "command": "page", "payload": { "n": n } }]);
        Act::Reply(200, json!({ "outcome": "succeeded", "result": n, "spawn": spawn }).to_string())
    })
    .await;
    let file = super::python("reply = {'outcome': 'retry', 'error': 'not now', 'retry_after': n}")
        .display()
        .to_string();
    let config = TestConfig::new(
        &db,
        &format!(
            "{}[handlers.later]\nkind = \"exec\"\nargv = [\"python3\", {file:?}]\n\
             [handlers.derive]\nkind = \"sql\"\nprocedure = \"app.derive\"\n",
            server.config("")
        ),
    );
    let test = async |name: &str, payload: &str| {
        let output = config.musterd(&["handler", "test", name, "--payload", payload, "--json"]).await;
        (read(&output), output.status.code())
    };
    let (tried, code) = test("work", "{\"n\": 7}").await;
    assert_eq!((&tried["task"]["result"], code), (&json!(7), Some(0)), "{tried}");
    assert_eq!(tried["task"]["spawn"], json!([{ "command": "page", "payload": { "n": 7 } }]));
    assert!(tried["exchanges"][0]["request"].as_str().unwrap().contains("\"kind\":\"task\""), "{tried}");
    let (tried, code) = test("later", "{\"n\": 5}").await;
    let verdict = json!({ "outcome": "retry", "error": "not now", "retry_after": 5.0 });
    assert_eq!((&tried["task"], code), (&verdict, Some(1)), "{tried}");
    let (tried, code) = test("derive", "{\"month\": 1}").await;
    assert_eq!((&tried["ok"], code), (&json!(true), Some(0)), "{tried}");
    assert_eq!(tried["task"]["spawn"], json!([{ "command": "part", "payload": { "month": 1 } }]));
    assert_eq!(tried["task"]["after"], json!([{ "command": "mail", "payload": {} }]));
    assert_eq!(tried["task"]["result"], json!({ "pages": 3 }));
    let (tried, code) = test("derive", "{\"bad\": 1}").await;
    assert_eq!(code, Some(1));
    assert!(tried["task"]["error"].as_str().unwrap().contains("no such month"), "{tried}");
    let left = "SELECT (SELECT count(*) FROM app.effects) + (SELECT count(*) FROM musterd.tasks)";
    assert_eq!(client.query_one(left, &[]).await.unwrap().get::<_, i64>(0), 0, "nothing is stored");
    let plain = config.musterd(&["handler", "test", "work", "--payload", "{\"n\": 1}"]).await;
    let text = String::from_utf8(plain.stdout).unwrap();
    assert!(text.contains("succeeded: 1 in") && text.contains("child: page {\"n\":1}"), "{text}");
    let wrong = config.musterd(&["handler", "test", "derive", "--input", "x.ndjson"]).await;
    assert_ne!(wrong.status.code(), Some(0));
    let wrong = config.musterd(&["handler", "test", "work", "--payload", "{"]).await;
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("--payload is not JSON"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_says_how_many_workers_handle_a_command() {
    let site = Site::start("").await;
    let listed = read(&site.daemon.config().musterd(&["handler", "list", "--json"]).await);
    let noop = listed.as_array().unwrap().iter().find(|command| command["name"] == "noop").unwrap();
    assert_eq!(
        (&noop["kind"], &noop["workers"], &noop["queue"]),
        (&json!("builtin"), &json!(1), &json!("default"))
    );
    assert!(!site.db.name().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_knows_handlers_that_cannot_work() {
    let db = TestDb::new().await;
    let server = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let client = db.client().await;
    client.batch_execute(&std::fs::read_to_string(example("sql_score.sql")).unwrap()).await.unwrap();
    let config = TestConfig::new(
        &db,
        &format!(
            "{}[handlers.deaf]\nkind = \"http\"\nurl = \"http://127.0.0.1:{}/\"\n\
             [handlers.tool]\nkind = \"exec\"\nargv = [\"sh\"]\n[handlers.notool]\nkind = \"exec\"\nargv = [\"/nowhere/tool\"]\n\
             [handlers.score]\nkind = \"sql\"\nfunction = \"app.score\"\n[handlers.noscore]\nkind = \"sql\"\nfunction = \"app.nothing\"\n\
             [handlers.noproc]\nkind = \"sql\"\nprocedure = \"app.score\"\n",
            server.config(""),
            crate::suite::support::services::free_port(),
        ),
    );
    let report = read(&config.musterd(&["doctor", "--json"]).await);
    let verdict = |name: &str| {
        let name = format!("handler {name}");
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name.as_str());
        check.unwrap_or_else(|| panic!("{name}: {report}"))["verdict"].as_str().unwrap().to_owned()
    };
    for (name, expected) in [
        ("work", "pass"),
        ("deaf", "warn"),
        ("tool", "pass"),
        ("notool", "fail"),
        ("score", "pass"),
        ("noscore", "fail"),
        ("noproc", "fail"),
        ("noop", "pass"),
    ] {
        assert_eq!(verdict(name), expected, "{name}: {report}");
    }
}
