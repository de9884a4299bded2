//! What shells, pagers and scripts need of the program: completions, manual pages, exit codes, no colours unasked.

use std::collections::BTreeSet;
use std::path::Path;

use crate::suite::examples::commands;
use crate::suite::support::config::{TestConfig, finish, json, musterd, musterd_in, stderr, stdout};
use crate::suite::support::database::TestDb;
use crate::suite::support::run;

#[tokio::test(flavor = "multi_thread")]
async fn every_shell_gets_a_script_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = musterd(&["completions", shell]).await;
        let script = stdout(&output);
        assert!(output.status.success() && stderr(&output).is_empty(), "{output:?}");
        for word in ["submit", "idempotency-key", "worker", "long-transaction"] {
            assert!(script.contains(word), "{shell} does not know {word}");
        }
    }
    // A real shell reads it.
    let dir = run::new_dir("completions");
    std::fs::write(dir.join("musterd.bash"), stdout(&musterd(&["completions", "bash"]).await)).unwrap();
    let mut bash = std::process::Command::new("bash");
    let script = "source ./musterd.bash && COMP_WORDS=(musterd que) COMP_CWORD=1 && _musterd musterd que musterd && echo ${COMPREPLY[@]}";
    bash.args(["--norc", "-c", script]).current_dir(&dir);
    assert_eq!(stdout(&finish(bash).await).trim(), "queue");
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_a_manual_page_for_every_command() {
    let dir = run::new_dir("man");
    let output = musterd_in(&dir, &["man", "more", "--json"]).await;
    assert_eq!(json(&output), serde_json::json!({ "dir": "more" }));
    let output = musterd_in(&dir, &["man", "pages"]).await;
    assert!(output.status.success(), "{output:?}");
    for (path, help) in commands().await {
        let name = [&["musterd".to_owned()], path.as_slice()].concat().join("-");
        let page = std::fs::read_to_string(dir.join("pages").join(format!("{name}.1")));
        let page = page.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        // Up to the first sign that troff writes in its own way.
        let first = help.lines().next().unwrap().split(['\'', '-', '.', '`', '…']).next().unwrap();
        assert!(page.contains(first), "{name} does not say {first:?}");
    }
}

/// The commands in the table of exit codes, by their names.
fn tabled() -> BTreeSet<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/cli.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, table) = page.split_once("## Exit codes").expect("a table of exit codes");
    let cells =
        table.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|line| line.split(" | ").next());
    cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`').to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_codes_are_as_the_table_says_for_every_command() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let tabled = tabled();
    let all = commands().await;
    let is_group =
        |path: &Vec<String>| all.iter().any(|(other, _)| other.len() > path.len() && other.starts_with(path));
    let single: Vec<&Vec<String>> = all.iter().map(|(path, _)| path).filter(|path| !is_group(path)).collect();
    let names: BTreeSet<String> = single.iter().map(|path| path.join(" ")).collect();
    assert_eq!(names, tabled, "the commands, and the table of exit codes in docs/cli.md");
    std::fs::write(config.dir().join("rows.ndjson"), "1\n").unwrap();
    let nowhere = ["--set", "database.url=postgres://127.0.0.1:1/nowhere"];
    for path in single {
        let name = path.join(" ");
        let words: Vec<&str> = path.iter().map(String::as_str).collect();
        let unknown = config.musterd(&[words.as_slice(), &["--frobnicate"]].concat()).await;
        assert_eq!(unknown.status.code(), Some(2), "{name} --frobnicate: {unknown:?}");
        let more: &[&str] = match name.as_str() {
            // They ask no database.
            "completions" | "man" | "config check" | "config show" | "handler test" | "dev" => continue,
            "submit" => &["rows.ndjson", "--command", "noop"],
            "enqueue" => &["noop"],
            "batch append" => &["1", "rows.ndjson"],
            "batch export" => &["1", "--all"],
            "queue pause" | "queue resume" | "why queue" => &["default"],
            "worker show" => &["nobody"],
            "run" | "migrate" | "doctor" | "top" | "events" | "errors" | "prune" | "why retention" => &[],
            name if name.ends_with(" list") => &[],
            _ => &["1"],
        };
        let lost = config.musterd(&[words.as_slice(), more, &nowhere].concat()).await;
        assert_eq!(lost.status.code(), Some(1), "{name} without a database: {lost:?}");
        let wrong =
            config.musterd(&[words.as_slice(), more, &["--set", "batcher.max_size=0"]].concat()).await;
        assert_eq!(wrong.status.code(), Some(2), "{name} with a wrong configuration: {wrong:?}");
    }
}
