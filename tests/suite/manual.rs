//! The manual cannot go stale: what it lists is compared with what the program has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use musterd::config::{Given, SHIPPED, load};

use crate::suite::support::config::{json, musterd, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::{SOON, eventually};

mod layers;

fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)).unwrap()
}

/// The rows of a page's tables whose first cell is code, as cells without their backticks.
fn rows(page: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| {
        let cells = line.trim().trim_matches('|').split(" | ");
        cells.map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    page.lines().filter(|line| line.starts_with("| `")).map(cells).collect()
}

/// The keys that the shipped file has only as a comment.
fn optional_keys() -> BTreeSet<String> {
    let mut section = String::new();
    let mut found = BTreeSet::new();
    for line in SHIPPED.lines() {
        // An example of a section, commented out, has a page of its own.
        if let Some(name) = line.strip_prefix('[').or(line.strip_prefix("# [")) {
            section = name.trim_end_matches(']').to_owned();
        }
        let key = line.strip_prefix("# ").and_then(|line| line.split_once(" = ")).map(|(key, _)| key);
        if let Some(key) =
            key.filter(|key| key.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit()))
        {
            found.insert(format!("{section}.{key}"));
        }
    }
    found
}

#[tokio::test]
async fn every_key_is_in_the_configuration_reference_with_its_default() {
    let documented: BTreeMap<String, Vec<String>> = rows(&page("configuration.md"))
        .into_iter()
        .filter(|cells| cells.len() == 5)
        .map(|cells| (cells[0].clone(), cells))
        .collect();
    let shown = json(&musterd(&["config", "show", "--json"]).await);
    for key in shown["sources"].as_object().unwrap().keys() {
        let pointer = format!("/{}", key.replace('.', "/"));
        let default = match shown["config"].pointer(&pointer).unwrap() {
            serde_json::Value::String(text) if text.is_empty() => "empty".to_owned(),
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        // A key that several handlers have is described once.
        let once = |key: &String| key.starts_with("handlers.") && key.ends_with(".kind");
        if once(key) && !documented.contains_key(key) {
            continue;
        }
        let cells = documented.get(key).unwrap_or_else(|| panic!("{key} is not in docs/configuration.md"));
        assert_eq!(cells[2], default, "the default of {key}");
    }
    let handlers = page("handlers.md");
    for key in optional_keys() {
        let examples = ["handlers.charge.", "handlers.resize.", "handlers.score."];
        if let Some(field) = examples.iter().find_map(|section| key.strip_prefix(section)) {
            assert!(handlers.contains(&format!("`{field}`")), "{field} is not in docs/handlers.md");
            continue;
        }
        assert_eq!(documented.get(&key).map(|cells| cells[2].as_str()), Some("not set"), "{key}");
    }
    for (key, cells) in &documented {
        assert_eq!(cells[4], format!("MUSTERD__{}", key.to_uppercase().replace('.', "__")));
        let given = Given { flags: vec![format!("{key}=?")], env: Some(Vec::new()), ..Given::default() };
        let unknown = load(&given).is_err_and(|error| error.to_string().contains("no such key"));
        assert!(!unknown, "docs/configuration.md has {key}, the program does not");
    }
}

/// The words that `--help` lists in a section, such as `Commands:`.
fn listed(help: &str, section: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != section).skip(1);
    lines
        .take_while(|line| !line.is_empty())
        // A description that goes on is indented further.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

fn long_options(help: &str) -> BTreeSet<String> {
    let words =
        help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(str::split_whitespace);
    words.filter(|word| word.starts_with("--")).map(|word| word.trim_end_matches(',').to_owned()).collect()
}

#[tokio::test]
async fn every_command_and_option_is_in_the_command_line_reference() {
    let page = page("cli.md");
    let mut todo = vec![Vec::<String>::new()];
    let mut seen = 0;
    while let Some(path) = todo.pop() {
        let mut args: Vec<&str> = path.iter().map(String::as_str).collect();
        args.push("--help");
        let help = stdout(&musterd(&args).await);
        let command = format!("musterd {}", path.join(" "));
        assert!(
            path.is_empty() || page.contains(&format!("`{command}")),
            "`{command}` is not in docs/cli.md"
        );
        assert!(help.contains("Examples:"), "`{command} --help` has no example");
        for option in long_options(&help) {
            assert!(page.contains(&format!("`{option}")), "{option} of `{command}` is not in docs/cli.md");
        }
        for name in listed(&help, "Commands:") {
            todo.push(path.iter().cloned().chain([name]).collect());
        }
        seen += 1;
    }
    assert!(seen > 7, "{seen} commands");
}

/// A daemon that has done rows, a retry and a task, and what it then says of itself.
async fn scraped() -> String {
    let db = TestDb::new().await;
    let toml = "[retry]\nbase = \"10ms\"\nmax_attempts = 2\n[handlers.fail]\nfailure = \"error\"\nrate = 1.0";
    let daemon = Daemon::builder(&db, toml).start();
    daemon.wait_ready().await;
    let client = db.client().await;
    for command in ["noop", "fail"] {
        let submit = "SELECT musterd.submit_batch(command => $1, rows => ARRAY['1'::jsonb])";
        client.execute(submit, &[&command]).await.unwrap();
    }
    client.execute("SELECT musterd.enqueue('noop')", &[]).await.unwrap();
    client.execute("SELECT musterd.enqueue('noop', queue => 'nobody-serves-it')", &[]).await.unwrap();
    eventually(SOON, "rows, a retry and a task are counted", async || {
        let (_, text) = daemon.get("/metrics").await.unwrap();
        let is_there = |line: &&str| text.lines().any(|found| found == *line);
        let wanted = [
            "musterd_rows_total{outcome=\"succeeded\"} 1",
            "musterd_rows_total{outcome=\"failed\"} 1",
            "musterd_row_retries_total 1",
            "musterd_tasks_total{state=\"succeeded\"} 1",
            "musterd_batches_completed_total 2",
            "musterd_blocks_held 0",
            // Counted now and then, so it may tell of a moment that is over.
            "musterd_queue_rows{queue=\"default\"} 0",
        ];
        wanted.iter().all(is_there).then_some(text)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_in_the_table_and_every_line_of_it_exists() {
    let scrape = scraped().await;
    let types = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let exposed: BTreeSet<(String, String)> = types
        .map(|(name, kind)| match kind {
            "counter" => (format!("{name}_total"), kind.to_owned()),
            "info" => (format!("{name}_info"), kind.to_owned()),
            _ => (name.to_owned(), kind.to_owned()),
        })
        .collect();
    let page = page("metrics.md");
    let cells = |line: &str| -> Vec<String> {
        let cells = line.trim().trim_matches('|').split('|');
        cells.map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let lines = page.lines().filter(|line| line.starts_with("| `musterd_")).map(cells);
    let table: Vec<Vec<String>> = lines.filter(|cells| cells.len() == 4).collect();
    let documented: BTreeSet<(String, String)> =
        table.iter().map(|cells| (cells[0].clone(), cells[1].clone())).collect();
    assert_eq!(exposed, documented, "/metrics and docs/metrics.md");
    for (name, kind) in &exposed {
        let series = if kind == "histogram" { format!("{name}_count") } else { name.clone() };
        let sample = scrape.lines().find(|line| line.starts_with(&series));
        let sample = sample.unwrap_or_else(|| panic!("{name} has no sample: {scrape}"));
        let labels = sample.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
        let names = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name);
        let cells = table.iter().find(|cells| cells[0] == *name).unwrap();
        for label in names {
            assert!(cells[2].contains(label), "{name} has the label {label}, docs/metrics.md does not");
        }
        assert_eq!(labels.is_empty(), cells[2].is_empty(), "{name}: {sample}");
    }
    // Every metric that an expression of the page names is one of the table.
    for word in page.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
        let name =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word);
        let is_known = documented.iter().any(|(known, _)| known == name || known == word);
        assert!(is_known || !word.starts_with("musterd_") || word.ends_with('_'), "{word} is no metric");
    }
    // Labels are names of the configuration: what submitters write makes no series.
    assert!(!scrape.contains("nobody-serves-it"), "{scrape}");
    assert!(scrape.contains("musterd_handler_seconds_count{command=\"noop\",call=\"block\"} 1"), "{scrape}");
    assert!(scrape.contains("musterd_handler_seconds_count{command=\"noop\",call=\"task\"} 1"), "{scrape}");
    assert!(scrape.contains("musterd_pickup_seconds_count{queue=\"default\",work=\"tasks\"} 1"), "{scrape}");
}
