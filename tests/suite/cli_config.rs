//! `musterd config check | show`: every mistake at once, every value with its source, no secret.

use std::path::Path;

use crate::suite::support::config::{command, finish, json, stderr, stdout};
use crate::suite::support::run;

const FIVE_MISTAKES: &str = r#"
[database]
max_connections = "many"
[livness]
backend = "redis"
[liveness]
heartbeat_intervall = "30s"
heartbeat_ttl = "a while"
[batcher]
max_size = 3000
"#;

/// Each key and a word of what is said about it.
const SAID: [(&str, &str); 5] = [
    ("database.max_connections", "a whole number from 1"),
    ("livness.backend", "did you mean liveness?"),
    ("liveness.heartbeat_intervall", "did you mean liveness.heartbeat_interval?"),
    ("liveness.heartbeat_ttl", "a while"),
    ("batcher.capacity", "batcher.max_size"),
];

fn write(toml: &str) -> (std::path::PathBuf, String) {
    let dir = run::new_dir("config");
    let file = dir.join("musterd.toml");
    std::fs::write(&file, toml).unwrap();
    (dir, file.display().to_string())
}

#[tokio::test]
async fn five_mistakes_are_told_at_once_with_key_and_file() {
    let (dir, file) = write(FIVE_MISTAKES);
    for args in [vec!["config", "check", "--config", &file], vec!["run", "--config", &file]] {
        let output = finish(command(&dir, &args)).await;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_eq!(stdout(&output), "");
        let text = stderr(&output);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "musterd: the configuration has 5 problems:");
        assert_eq!(lines.len(), 6, "one line each: {text}");
        for (key, word) in SAID {
            let line = lines.iter().find(|line| line.starts_with(&format!("  {key}: "))).expect(key);
            assert!(line.contains(word), "{line}");
            // A default stands in no file; what it contradicts does.
            assert!(line.contains(&format!("file {file}:")) && line.ends_with(')'), "{line}");
        }
    }
}

#[tokio::test]
async fn the_same_as_json_and_nothing_twice() {
    let (dir, file) = write(FIVE_MISTAKES);
    let output = finish(command(&dir, &["config", "check", "--json", "--config", &file])).await;
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(2), ""));
    let answer = json(&output);
    assert_eq!(answer["ok"], false);
    let problems = answer["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 5, "{answer}");
    let misspelt = problems.iter().find(|problem| problem["key"] == "livness.backend").unwrap();
    assert_eq!(
        (&misspelt["source"], &misspelt["severity"]),
        (&format!("file {file}:5").into(), &"error".into())
    );
}

#[tokio::test]
async fn a_file_that_is_not_toml_is_told_by_its_place_and_not_quoted() {
    let (dir, file) = write("[database]\nurl = \"postgres://app:canary@db/app\" oops\n");
    let output = finish(command(&dir, &["config", "check", "--config", &file])).await;
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("not valid TOML (line 2, column ") && text.contains(&file), "{text}");
    assert!(!text.contains("canary") && text.lines().count() == 2, "{text}");
}

#[tokio::test]
async fn the_shipped_file_is_good() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/musterd.toml");
    let dir = run::new_dir("config");
    // The option is taken before and after the subcommand, and from the environment.
    let file = shipped.display().to_string();
    let before = command(&dir, &["--config", &file, "config", "check"]);
    let after = command(&dir, &["config", "check", "--config", &file]);
    let mut variable = command(&dir, &["config", "check"]);
    variable.env("MUSTERD_CONFIG", &file);
    for command in [before, after, variable] {
        let output = finish(command).await;
        assert!(output.status.success(), "{output:?}");
        assert_eq!(stdout(&output), "the configuration is good\n");
        assert_eq!(stderr(&output), "");
    }
}

#[tokio::test]
async fn a_warning_is_told_and_is_no_error() {
    let (dir, file) = write("[shutdown]\ngrace = \"60s\"");
    let output = finish(command(&dir, &["config", "check", "--config", &file])).await;
    assert!(output.status.success());
    assert!(stdout(&output).starts_with("warning: shutdown.grace: is not under"), "{output:?}");
}

#[tokio::test]
async fn every_value_is_shown_with_its_source_and_no_secret_is() {
    let (dir, file) = write(
        "[database]\nurl = \"postgres://app:canary@db:5432/app\"\n[batcher]\nmax_size = 7\n\
         [outputs.s3]\nendpoint = \"https://me:canary@minio\"",
    );
    let secret = dir.join("redis-url");
    std::fs::write(&secret, "redis://:canary@cache:6379\n").unwrap();
    let show = |more: &[&str]| {
        let mut command = command(&dir, &["config", "show", "--config", &file]);
        command.args(["--set", "outputs.s3.access_key=canary", "--set", "retry.max_attempts=9"]).args(more);
        command.env("MUSTERD__REDIS__URL_FILE", &secret).env("MUSTERD__OUTPUTS__S3__SECRET_KEY", "canary");
        command.env("MUSTERD__QUEUES__DEFAULT__FIBERS", "3");
        command
    };
    let (table, answer) = (finish(show(&[])).await, finish(show(&["--json"])).await);
    assert!(table.status.success() && answer.status.success(), "{table:?} {answer:?}");
    for output in [&table, &answer] {
        assert!(!format!("{}{}", stdout(output), stderr(output)).contains("canary"), "{}", stdout(output));
    }

    let answer = json(&answer);
    assert_eq!(answer["config"]["database"]["url"], "postgres://app:[redacted]@db:5432/app");
    assert_eq!(answer["config"]["outputs"]["s3"]["secret_key"], "[redacted]");
    let sources = [
        ("database.url", format!("file {file}:2")),
        ("batcher.max_size", format!("file {file}:4")),
        ("queues.default.fibers", "environment MUSTERD__QUEUES__DEFAULT__FIBERS".into()),
        ("redis.url", format!("environment MUSTERD__REDIS__URL_FILE, contents of {}", secret.display())),
        ("retry.max_attempts", "flag --set retry.max_attempts".into()),
        ("batcher.capacity", "default".into()),
    ];
    for (key, source) in sources {
        assert_eq!(answer["sources"][key], source.as_str(), "{key}");
        let text = stdout(&table);
        let row = text.lines().find(|line| line.trim_start().starts_with(&format!("{key} "))).expect(key);
        assert!(row.trim_end().ends_with(&source), "{row}");
    }
}

#[tokio::test]
async fn a_wrong_flag_and_a_missing_file_are_usage() {
    let dir = run::new_dir("config");
    for args in [
        ["config", "check", "--set", "batcher.max_size"],
        ["config", "check", "--config", "/nowhere/musterd.toml"],
        ["config", "check", "--colour", "red"],
    ] {
        let output = finish(command(&dir, &args)).await;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains(args[3].trim_start_matches("red")), "{output:?}");
    }
}
