//! The process as its surroundings see it: health, signals, exit codes, and log lines that machines can read.

use std::fs::OpenOptions;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;

use rustix::process::Signal;
use serde_json::Value;

use crate::suite::api::caller::Caller;
use crate::suite::support::config::{TestConfig, musterd, stderr, stdout};
use crate::suite::support::daemon::{Daemon, http_get};
use crate::suite::support::database::TestDb;
use crate::suite::support::process::Process;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::{run, services};

/// Submits rows to a running daemon; the id of the batch.
async fn submit(daemon: &Daemon, command: &str, rows: &str) -> String {
    let file = daemon.config().dir().join(format!("{}.ndjson", run::unique("rows")));
    std::fs::write(&file, rows).unwrap();
    let output = daemon.config().musterd(&["submit", file.to_str().unwrap(), "--command", command]).await;
    assert!(output.status.success(), "{output:?}");
    stdout(&output).trim().to_owned()
}

fn events(lines: &[String]) -> Vec<Value> {
    let event = |line: &String| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    lines.iter().map(event).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_while_it_starts_and_while_it_drains() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    proxy.set(Fault::HoldReplies);
    let url = format!("{}?connect_timeout=120", proxy.rewrite(db.url()));
    let toml = format!("[database]\nurl = \"{url}\"\n[handlers.sleep]\nduration = \"1h\"\ntimeout = \"2h\"");
    let daemon = Daemon::builder(&db, &toml).start();
    eventually(SOON, "it lives", async || (daemon.get("/livez").await.ok()?.0 == 200).then_some(())).await;
    let (status, answer) = daemon.get("/readyz").await.unwrap();
    assert!(status == 503 && answer.contains("start: starting"), "{answer}");

    proxy.set(Fault::None);
    daemon.wait_ready().await;
    let (status, answer) = daemon.get("/readyz").await.unwrap();
    assert!(status == 200 && answer.contains(r#"{"ready":true,"reasons":[]}"#), "{answer}");
    let (status, metrics) = daemon.get("/metrics").await.unwrap();
    assert!(status == 200 && metrics.contains("application/openmetrics-text"), "{metrics}");
    assert!(metrics.contains("musterd_blocks_claimed_total 0") && metrics.contains("# EOF"), "{metrics}");
    assert_eq!(daemon.get("/nothing").await.unwrap().0, 404);

    let id = submit(&daemon, "sleep", "1\n").await;
    let client = db.client().await;
    let owned = "SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL";
    eventually(SOON, "the row runs", async || {
        (client.query_one(owned, &[]).await.unwrap().get::<_, i64>(0) == 1).then_some(())
    })
    .await;
    daemon.signal(Signal::TERM);
    eventually(SOON, "it is not ready any more", async || {
        let (status, answer) = daemon.get("/readyz").await.unwrap();
        (status == 503 && answer.contains("shutdown: draining")).then_some(())
    })
    .await;
    assert_eq!(daemon.get("/livez").await.unwrap().0, 200);

    // The row would take an hour: the second signal gives it back.
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(client.query_one(owned, &[]).await.unwrap().get::<_, i64>(0), 0, "batch {id}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_before_it_is_ready_ends_it_at_once() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    proxy.set(Fault::HoldReplies);
    let url = format!("{}?connect_timeout=120", proxy.rewrite(db.url()));
    let daemon = Daemon::builder(&db, &format!("[database]\nurl = \"{url}\"")).start();
    eventually(SOON, "it lives", async || (daemon.get("/livez").await.ok()?.0 == 200).then_some(())).await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn either_signal_stops_the_parts_in_the_direction_of_the_data() {
    let db = TestDb::new().await;
    for signal in [Signal::TERM, Signal::INT] {
        let daemon = Daemon::builder(&db, "").log("info").start();
        daemon.wait_ready().await;
        // Somebody who sends half a request must not hold the end up.
        let half = std::net::TcpStream::connect(("127.0.0.1", daemon.config().http_port())).unwrap();
        std::io::Write::write_all(&mut &half, b"GET /livez HTTP/1.1\r\n").unwrap();
        daemon.signal(signal);
        assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
        let stopped = |event: &Value| {
            let ended = ["stage stopped", "stopped"].map(|word| event["message"] == word);
            ended.contains(&true).then(|| event["stage"].as_str().unwrap_or("all").to_owned())
        };
        let events = events(&daemon.log());
        let stages: Vec<String> = events.iter().filter_map(stopped).collect();
        let order = ["Upkeep", "Claims", "Writes", "Completion", "Timeouts", "Heartbeat", "Http", "all"];
        let places: Vec<usize> =
            stages.iter().map(|stage| order.iter().position(|known| known == stage).expect(stage)).collect();
        assert!(places.is_sorted() && places.len() >= 6 && places.contains(&7), "{stages:?}");
        assert_eq!(events.last().unwrap()["clean"], true);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named_and_nothing_is_claimed() {
    let db = TestDb::new().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let config = TestConfig::new(&db, &format!("[http]\nlisten = \"{address}\""));
    let output = config.musterd(&["run"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let lines: Vec<String> = stderr(&output).lines().map(str::to_owned).collect();
    let said = events(&lines);
    assert_eq!(said.len(), 1, "{said:?}");
    let error = said[0]["error"].as_str().unwrap();
    assert!(
        error.contains(&format!("cannot listen on {address}")) && error.contains("set http.listen"),
        "{error}"
    );

    let human = config.musterd(&["run", "--set", "log.format=human"]).await;
    let text = stderr(&human);
    assert!(text.starts_with("musterd: cannot listen on ") && text.lines().count() == 1, "{text}");
    let known = "SELECT count(*) FROM musterd.workers";
    assert_eq!(db.client().await.query_one(known, &[]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_line_is_one_json_object_and_holds_no_secret_and_no_payload() {
    let db = TestDb::new().await;
    let role = run::unique("worker");
    // The check has PostgreSQL refuse every result of `echo`, quoting it in the error's details.
    let make = format!(
        "CREATE ROLE \"{role}\" SUPERUSER LOGIN PASSWORD 'secret-canary';
         ALTER TABLE musterd.outcomes ADD CHECK (results NOT LIKE '%canary%')"
    );
    db.client().await.batch_execute(&make).await.unwrap();
    let (_, address) = db.url().rsplit_once('@').unwrap();
    let toml = format!(
        "[database]\nurl = \"postgres://{role}:secret-canary@{address}\"\n[retry]\nmax_attempts = 1\n\
         [handlers.fail]\nfailure = \"panic\"\n[handlers.bad]\nkind = \"builtin\"\nbuiltin = \"fail\"\n\
         failure = \"unstorable\""
    );
    let daemon = Daemon::builder(&db, &toml).log("trace").start();
    daemon.wait_ready().await;
    for command in ["echo", "fail", "bad"] {
        let id = submit(&daemon, command, "{\"card\": \"payload-canary\"}\n").await;
        eventually(SOON, "the batch ends", async || {
            let state = "SELECT state::text FROM musterd.batch_progress WHERE id = $1::text::bigint";
            let state: String = db.client().await.query_one(state, &[&id]).await.unwrap().get(0);
            ["succeeded", "failed"].contains(&state.as_str()).then_some(())
        })
        .await;
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
    let lines = daemon.log();
    for event in events(&lines) {
        let text = |key: &str| event[key].as_str().unwrap_or_else(|| panic!("{key}: {event}")).to_owned();
        text("timestamp").parse::<jiff::Timestamp>().unwrap();
        assert!(["ERROR", "WARN", "INFO", "DEBUG", "TRACE"].contains(&text("level").as_str()), "{event}");
        assert!(!text("target").is_empty() && event.get("fields").is_none(), "{event}");
    }
    assert!(lines.iter().any(|line| line.contains("\"a panic\"")), "a panic is an event, too");
    assert!(lines.iter().any(|line| line.contains("a flush is refused")), "nothing was refused");
    let leak = lines.iter().find(|line| line.contains("canary"));
    assert_eq!(leak, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn rust_log_wins_over_the_configuration() {
    let db = TestDb::new().await;
    let levels = async |toml: &str, filter: &str| {
        let daemon = Daemon::builder(&db, toml).log(filter).start();
        daemon.wait_ready().await;
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
        let events = events(&daemon.log());
        let is = |level: &str| events.iter().any(|event| event["level"] == level);
        (
            is("INFO"),
            is("DEBUG"),
            events.iter().any(|event| event["message"] == "RUST_LOG is not a log filter; using log.level"),
        )
    };
    let debug = "[log]\nlevel = \"info,musterd=debug\"\n[batcher]\nmax_interval = \"50ms\"";
    assert_eq!(levels(debug, "warn").await, (false, false, false));
    assert_eq!(levels("[log]\nlevel = \"warn\"", "info").await, (true, false, false));
    assert_eq!(levels("", "").await, (true, false, false));
    assert_eq!(levels("", "musterd=loud=1").await, (true, false, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_a_command_is_usage() {
    for args in [["frobnicate"].as_slice(), &[], &["run", "--frobnicate"], &["batch", "show", "one"]] {
        let output = musterd(args).await;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stdout(&output).is_empty() && !stderr(&output).is_empty(), "{output:?}");
    }
    for args in [["--version"].as_slice(), &["--help"], &["run", "--help"]] {
        let output = musterd(args).await;
        assert!(output.status.success() && stderr(&output).is_empty(), "{output:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_request_logs_are_for_people() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "[log]\nformat = \"human\"");
    let daemon = Process::start(config.command(&["run"]));
    let ready = daemon.err.wait_for(SOON, |line| line.ends_with(" ready")).await;
    assert!(ready.contains(" INFO ") && !ready.contains('\u{1b}'), "no colours without a terminal: {ready}");
    assert_eq!(http_get(config.http_port(), "/livez").await.unwrap().0, 200);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_the_system_never_ends_does_not_hold_up_the_exit() {
    let (db, dir) = (TestDb::new().await, run::new_dir("fifo"));
    // Who opens it for reading waits for a writer, for ever.
    rustix::fs::mkfifoat(rustix::fs::CWD, dir.join("tokens"), rustix::fs::Mode::RWXU).unwrap();
    let toml = format!("[http]\nread_tokens_file = {:?}", dir.join("tokens").display().to_string());
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon).with_token("canary-read-0123456789abcdef");
    let waiting = caller.begin("GET", "/v1/queues", &[], Some(0)).await;
    // It can be opened when the other end is: then the daemon reads, and as long as this end is open there is no end to that.
    let writer = eventually(SOON, "the daemon reads", async || {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        OpenOptions::new().write(true).custom_flags(nonblocking).open(dir.join("tokens")).ok()
    })
    .await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait_exit(SOON).await.code(), Some(0));
    drop((waiting, writer));
}
