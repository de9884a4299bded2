//! The examples: those of every `--help`, and the commands in the manual's blocks of shell.

use std::path::Path;

use crate::suite::support::config::{musterd, stdout};

/// A command, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) command: String,
    pub(super) place: String,
}

/// Each command once, in the order in which they are found.
pub(super) async fn all() -> Vec<Found> {
    let mut found = in_helps().await;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<_> =
        std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    // A script from its first line to its last, run as such by api/schema.rs.
    pages.retain(|path| !path.ends_with("api.md"));
    pages.push(root.join("README.md"));
    pages.sort();
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let place = page.strip_prefix(root).unwrap().display().to_string();
        found.extend(in_page(&text).into_iter().map(|command| Found { command, place: place.clone() }));
    }
    let mut seen = std::collections::HashSet::new();
    found.retain(|found| seen.insert(found.command.clone()));
    found
}

/// Every command and subcommand, as the words after `musterd`.
pub(crate) async fn commands() -> Vec<(Vec<String>, String)> {
    let mut todo = vec![Vec::<String>::new()];
    let mut all = Vec::new();
    while let Some(path) = todo.pop() {
        let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let help = stdout(&musterd(&args).await);
        let listed =
            help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        // A name stands two blanks in; what is further in is the rest of a description.
        let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        for name in names.filter_map(|line| line.split_whitespace().next()) {
            todo.push(path.iter().cloned().chain([name.to_owned()]).collect());
        }
        all.push((path, help));
    }
    all.sort();
    all
}

async fn in_helps() -> Vec<Found> {
    let mut found = Vec::new();
    for (path, help) in commands().await {
        let place = format!("musterd {} --help", path.join(" "));
        let examples = help.lines().skip_while(|line| *line != "Examples:").skip(1);
        for line in examples.take_while(|line| !line.trim().is_empty()) {
            found.push(Found { command: without_comment(line), place: place.clone() });
        }
    }
    found
}

fn in_page(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut language, mut begun) = (None, String::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("```") {
            language = if language.is_some() { None } else { Some(name.trim()) };
            continue;
        }
        let command = match language {
            Some("sh") if !line.starts_with('#') => line,
            Some("console") => match line.strip_prefix("$ ") {
                Some(command) => command,
                None => continue,
            },
            // The reference of the commands: examples as `--help` prints them, beside lines of usage.
            Some("") if ["musterd ", "seq ", "echo "].iter().any(|word| line.starts_with(word)) => line,
            _ => continue,
        };
        if let Some(more) = command.strip_suffix('\\') {
            begun.push_str(more);
            continue;
        }
        let command = without_comment(&format!("{}{command}", std::mem::take(&mut begun)));
        let is_usage = command.contains("[OPTIONS]") || command.contains('<');
        if !command.is_empty() && !is_usage {
            found.push(command);
        }
    }
    found
}

/// A comment follows after two blanks or more, or after a hash.
fn without_comment(line: &str) -> String {
    let line = line.trim();
    let end = [line.find("  "), line.find(" # ")].into_iter().flatten().min().unwrap_or(line.len());
    line[..end].trim().to_owned()
}
