//! The examples of the manual do what they say.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use musterd::tether::Tether;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Ended, QUICK, Site, ended, example, submit_rows};
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::{has, run_it};
use crate::suite::support::services::free_port;

fn people() -> Value {
    json!([{ "name": "Ada" }, { "nobody": true }, { "name": "Grace \"☃\"" }])
}

fn greeted(rows: &[Ended]) {
    assert_eq!(rows[0].result, Some(json!({ "greeting": "Hello, Ada!" })));
    assert_eq!(rows[1].state, "failed", "{rows:?}");
    assert_eq!(rows[2].result, Some(json!({ "greeting": "Hello, Grace \"☃\"!" })));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_greets() {
    let file = example("exec_python.py").display().to_string();
    let site =
        Site::start(&format!("[handlers.greet]\nkind = \"exec\"\nargv = [\"python3\", {file:?}]\n")).await;
    let batch = site.submit_rows("greet", &people()).await;
    greeted(&site.ended(batch).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_example_greets_and_checks_the_signature() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let mut command = Command::new("node");
    command.arg(example("http_node.mjs")).env("MUSTER_SECRET", secret);
    let (node, port) = listening(command);
    greets_the_signed(port, secret).await;
    node.signal(Signal::KILL).unwrap();
}

/// A service of an example, and the port that it listens on.
fn listening(mut command: Command) -> (Tether, u16) {
    let port = free_port();
    command.env("PORT", port.to_string()).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut service = Tether::spawn(command, Signal::KILL).expect("the language of the example is needed");
    let mut line = String::new();
    BufReader::new(service.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("listening"), "{line}");
    (service, port)
}

async fn greets_the_signed(port: u16, secret: &str) {
    let handlers = |secret: &str| {
        format!(
            "[handlers.greet]\nkind = \"http\"\nurl = \"http://127.0.0.1:{port}/greet\"\nsecret = \"{secret}\"\n"
        )
    };
    let site = Site::start(&handlers(secret)).await;
    let batch = site.submit_rows("greet", &people()).await;
    greeted(&site.ended(batch).await);
    let other = Site::start(&handlers("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")).await;
    let batch = other.submit_rows("greet", &people()).await;
    assert!(other.ended(batch).await.iter().all(|row| row.error.contains("401")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_go_example_greets_and_checks_the_signature() {
    if !has("go") {
        return;
    }
    let built = tempfile::tempdir().unwrap();
    let program = built.path().join("greet");
    let mut go = Command::new("go");
    // A cache of its own: the one of the user may be nowhere, or not writable.
    go.args(["build", "-o"])
        .arg(&program)
        .arg(example("http_go.go"))
        .env("GOCACHE", built.path().join("cache"));
    run_it(go.env("GOFLAGS", "-mod=mod").env("GO111MODULE", "off"));
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let mut command = Command::new(program);
    command.env("MUSTER_SECRET", secret);
    let (service, port) = listening(command);
    greets_the_signed(port, secret).await;
    service.signal(Signal::KILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_example_shouts() {
    let file = example("exec_shell.sh").display().to_string();
    let site = Site::start(&format!("[handlers.shout]\nkind = \"exec\"\nargv = [\"sh\", {file:?}]\n")).await;
    let batch =
        site.submit_rows("shout", &json!([{ "word": "hey" }, { "word": 7 }, { "word": "you there" }])).await;
    let rows = site.ended(batch).await;
    assert_eq!((&rows[0].result, &rows[2].result), (&Some(json!("HEY")), &Some(json!("YOU THERE"))));
    assert_eq!(rows[1].error, "a row needs a word");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sql_example_scores() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(&std::fs::read_to_string(example("sql_score.sql")).unwrap()).await.unwrap();
    let config = format!("{QUICK}[handlers.score]\nkind = \"sql\"\nfunction = \"app.score\"\n");
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let mut customers: Vec<Value> =
        (0..2_000).map(|n| json!({ "customer": format!("c{n}"), "spent": n })).collect();
    customers[77] = json!({ "customer": "c77" });
    let batch = submit_rows(&client, "score", &customers.into()).await;
    let rows = ended(&client, batch).await;
    assert_eq!(rows.iter().filter(|row| row.state == "succeeded").count(), 1_999);
    assert_eq!(rows[77].error, "a row needs a customer, and what they spent");
    let same =
        "SELECT count(*) FROM app.scores s JOIN musterd.results r ON r.batch_id = s.batch AND r.line = s.line
                 WHERE (r.result ->> 'score')::numeric = s.score";
    assert_eq!(client.query_one(same, &[]).await.unwrap().get::<_, i64>(0), 1_999);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_example_greets() {
    // Cargo builds examples with all tests, into a directory of their own; not with this program alone.
    let program =
        std::path::Path::new(env!("CARGO_BIN_EXE_musterd")).with_file_name("examples").join("rust_handler");
    if !program.exists() {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--all-features", "--example", "rust_handler"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.unwrap().success());
    }
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, QUICK);
    let mut command = Command::new(program);
    command.arg(config.file()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let worker = Tether::spawn(command, Signal::KILL).unwrap();
    let client = db.client().await;
    let batch = submit_rows(&client, "greet", &people()).await;
    greeted(&ended(&client, batch).await);
    worker.signal(Signal::TERM).unwrap();
    worker.wait(super::SOON).unwrap();
}
