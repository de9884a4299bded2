//! The API does what its description says, whatever it is sent: Schemathesis reads the one and tries the other.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::start;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::within;

const TOKEN: &str = "the-token-of-schemathesis-0001";

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Where `make setup-test` puts it. Without it the test is skipped, and says so; in CI a skip is a failure.
fn schemathesis() -> Option<PathBuf> {
    let packages = here("target/schemathesis");
    if packages.join("requirements.txt").exists() {
        return Some(packages);
    }
    assert!(std::env::var_os("CI").is_none(), "Schemathesis is missing: make setup-test");
    println!("SKIPPED: Schemathesis is missing: make setup-test");
    None
}

/// The `sh` blocks of the manual's page, as one script.
fn examples() -> String {
    let page = std::fs::read_to_string(here("docs/api.md")).unwrap();
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    format!("set -eu\n{}", blocks.collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_of_the_manual_runs_as_it_stands() {
    let db = TestDb::new().await;
    let dir = run::new_dir("examples");
    std::fs::write(dir.join("tokens"), TOKEN).unwrap();
    let file = dir.join("tokens").display().to_string();
    let (daemon, caller) = start(&db, &format!("[http]\nwrite_tokens_file = {file:?}")).await;
    caller.with_token(TOKEN).warm_up().await;
    let mut command = Command::new("sh");
    command
        .args(["-c", &examples()])
        .env("API", format!("http://127.0.0.1:{}", daemon.config().http_port()))
        .env("TOKEN", TOKEN)
        .env_remove("http_proxy")
        .current_dir(&dir)
        .stdin(Stdio::null());
    let mut command = tokio::process::Command::from(command);
    let output = within(Duration::from_secs(120), command.kill_on_drop(true).output()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for told in [
        r#"{"id":1,"rows":2,"repeated":false}"#,
        r#"{"tasks":2,"first_id":4,"last_id":5}"#,
        "event: end",
        r#""subject":"queue default""#,
    ] {
        assert!(said.contains(told), "{told}: {said}");
    }
    assert_eq!(std::fs::read_to_string(dir.join("rows.ndjson")).unwrap().lines().count(), 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_it_is_sent_it_answers_as_it_is_described() {
    let Some(packages) = schemathesis() else { return };
    let db = TestDb::new().await;
    let dir = run::new_dir("schemathesis");
    std::fs::write(dir.join("tokens"), TOKEN).unwrap();
    let file = dir.join("tokens").display().to_string();
    let (daemon, caller) = start(&db, &format!("[http]\nrate_limit = 0\nwrite_tokens_file = {file:?}")).await;
    caller.with_token(TOKEN).warm_up().await;
    let home = here("tests/schemathesis");
    let mut command = Command::new("python3");
    command
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(home.join("schemathesis.toml"))
        .arg("run")
        .arg(format!("http://127.0.0.1:{}/v1/openapi.json", daemon.config().http_port()))
        .args(["--no-color", "--header", &format!("Authorization: Bearer {TOKEN}")])
        .env("PYTHONPATH", std::env::join_paths([&packages, &home]).unwrap())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(&dir)
        .stdin(Stdio::null());
    let mut command = tokio::process::Command::from(command);
    let output = within(Duration::from_secs(600), command.kill_on_drop(true).output()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("Stateful") && said.contains("passed"), "{said}");
    println!("{}", said.lines().find(|line| line.contains("generated")).unwrap_or_default().trim());
}
