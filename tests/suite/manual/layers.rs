//! The map in ARCHITECTURE.md is the building: its table of layers is compared with what the files of `src/` use, and the rules that it
//! states about SQL and about lengths are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The source files by their path below `src/`.
type Files = BTreeMap<String, String>;

/// What a file and a function may have, in lines.
const FILE_LINES: usize = 400;
const FUNCTION_LINES: usize = 70;

/// Words that a statement begins with.
const STATEMENTS: [&str; 21] = [
    "ALTER ",
    "BEGIN",
    "CALL ",
    "COMMIT",
    "COPY ",
    "CREATE ",
    "DELETE FROM ",
    "DROP ",
    "EXPLAIN ",
    "INSERT INTO ",
    "LISTEN ",
    "LOCK ",
    "NOTIFY ",
    "ROLLBACK",
    "SELECT ",
    "SET LOCAL ",
    "SET ROLE ",
    "TRUNCATE ",
    "UNLISTEN ",
    "UPDATE ",
    "WITH ",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Files {
    let (mut files, mut folders) = (Files::new(), vec![root().join("src")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root().join("src")).unwrap().to_str().unwrap().to_owned();
                files.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

/// The number of each module's layer, the lowest layer 0: the rows of the table, which names the highest first.
fn layers(map: &str) -> BTreeMap<String, usize> {
    let below = map.split("\n| layer | modules |").nth(1).expect("the table of layers");
    let rows: Vec<&str> = below.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    let modules = |row: &str| -> Vec<String> {
        let cell = row.split('|').nth(2).unwrap_or_default();
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let ranked = rows.iter().rev().enumerate();
    ranked.flat_map(|(rank, row)| modules(row).into_iter().map(move |module| (module, rank))).collect()
}

/// The module that stands directly below the crate, of a path below `src/`.
fn module(path: &str) -> &str {
    path.split('/').next().unwrap_or_default().trim_end_matches(".rs")
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The modules that a text names behind `crate::`, alone or in braces.
fn used(text: &str) -> BTreeSet<String> {
    let word =
        |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let text = without_comments(text);
    let mut used = BTreeSet::new();
    for path in text.split("crate::").skip(1) {
        let Some(group) = path.strip_prefix('{') else {
            used.insert(word(path));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                _ if begins && !c.is_whitespace() => {
                    used.insert(word(&group[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    used
}

/// Uses of a module that is not below, and modules that the table does not have.
fn crossings(files: &Files, layers: &BTreeMap<String, usize>) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| !["lib.rs", "main.rs"].contains(&path.as_str())) {
        let own = module(path);
        let Some(rank) = layers.get(own) else {
            found.push(format!("src/{path}: the table of layers in ARCHITECTURE.md has no module {own}"));
            continue;
        };
        for other in used(text).into_iter().filter(|other| other != own) {
            match layers.get(&other) {
                Some(below) if below < rank => {}
                Some(_) => {
                    found.push(format!("src/{path}: {own} uses {other}, which is not in a layer below it"))
                }
                None => {
                    found.push(format!("src/{path}: uses {other}, which the table of layers does not have"))
                }
            }
        }
    }
    found
}

/// What of a file is compiled into the program.
fn program(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or_default()
}

/// Statements in files that are not below `store/`.
fn statements(files: &Files) -> Vec<String> {
    let outside = |path: &str| module(path) != "store" && !path.contains("tests");
    let mut found = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| outside(path)) {
        for literal in program(text).split('"').skip(1) {
            let begins = literal.trim_start();
            if STATEMENTS.iter().any(|word| begins.starts_with(word)) || begins.ends_with(".sql") {
                let shown: String = begins.chars().take(40).collect();
                found.push(format!("src/{path}: SQL outside store/: {shown:?}"));
            }
        }
    }
    found
}

/// Files and functions that are too long to be read at once.
fn too_long(files: &Files) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in files {
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > FILE_LINES {
            found.push(format!("src/{path}: {} lines, at most {FILE_LINES}", lines.len()));
        }
        for (at, line) in lines.iter().enumerate() {
            let indent = &line[..line.len() - line.trim_start().len()];
            let is_function = line.trim_start().starts_with("fn ")
                || (["pub", "async ", "const ", "unsafe "]
                    .iter()
                    .any(|word| line.trim_start().starts_with(word))
                    && line.contains(" fn "));
            if !is_function {
                continue;
            }
            let end = format!("{indent}}}");
            let body = lines[at..].iter().position(|line| {
                *line == end
                    || (line.ends_with(';')
                        && line.starts_with(indent)
                        && !line[indent.len()..].starts_with(' '))
            });
            let length = body.map_or(1, |last| last + 1);
            if length > FUNCTION_LINES {
                let name =
                    line.split("fn ").nth(1).unwrap_or_default().split(['(', '<']).next().unwrap_or_default();
                found.push(format!("src/{path}: {name} has {length} lines, at most {FUNCTION_LINES}"));
            }
        }
    }
    found
}

fn map() -> String {
    std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

#[test]
fn every_module_uses_only_what_is_below_it() {
    let (files, layers) = (sources(), layers(&map()));
    let modules: BTreeSet<&str> = files.keys().map(|path| module(path)).collect();
    let listed = layers.keys().filter(|name| !modules.contains(name.as_str()));
    let gone: Vec<String> =
        listed.map(|name| format!("ARCHITECTURE.md: there is no module {name}")).collect();
    let found = [crossings(&files, &layers), gone].concat();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn sql_is_in_the_store_only() {
    let found = statements(&sources());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn files_and_functions_can_be_read_at_once() {
    let found = too_long(&sources());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn planted_violations_are_found() {
    let table = "# Map\n\n| layer | modules |\n|---|---|\n| top | `cli`, `http` |\n| doors | `store` |\n| words | `json` |\n\n`none`\n";
    let layers = layers(table);
    assert_eq!(
        layers.iter().map(|(name, rank)| (name.as_str(), *rank)).collect::<Vec<_>>(),
        [("cli", 2), ("http", 2), ("json", 0), ("store", 1)]
    );
    let file = |path: &str, text: &str| Files::from([(path.to_owned(), text.to_owned())]);
    let crossed = |path: &str, text: &str| crossings(&file(path, text), &layers).len();
    assert_eq!(crossed("store/blocks.rs", "use crate::{json::{Json, check}, store::page};"), 0);
    assert_eq!(
        crossed("store/blocks.rs", "use crate::{\n    json::Json,\n    http::{Api, Port},\n};"),
        1,
        "up"
    );
    assert_eq!(crossed("json.rs", "fn a() { crate::store::open() }"), 1, "up, by its full path");
    assert_eq!(crossed("cli.rs", "use crate::http;"), 1, "beside: two could use each other");
    assert_eq!(
        crossed("cli.rs", "use crate::elsewhere::Thing; // crate::nowhere"),
        1,
        "a module that is not in the table"
    );
    assert_eq!(crossed("elsewhere.rs", ""), 1, "a file that is not in the table");
    let found = |path: &str, text: &str| statements(&file(path, text)).len();
    assert_eq!(found("http/api.rs", "let sql = \"SELECT 1\"; let doc = \"UPDATE t SET a = 1\";"), 2);
    assert_eq!(found("http/api.rs", "const A: &str = include_str!(\"a.sql\");"), 1);
    assert_eq!(found("http/api.rs", "let sql = \"\n    INSERT INTO t VALUES (1)\";"), 1);
    assert_eq!(found("store/blocks.rs", "let sql = \"SELECT 1\";"), 0);
    assert_eq!(
        found("http/api.rs", "let text = \"SELECTED\"; #[cfg(test)] const A: &str = \"SELECT 1\";"),
        0
    );
    let body = |lines: usize| {
        format!("impl A {{\n    pub(super) async fn long(\n{}    }}\n}}\n", "        a();\n".repeat(lines))
    };
    assert_eq!(too_long(&file("a.rs", &body(FUNCTION_LINES - 2))).len(), 0);
    assert_eq!(too_long(&file("a.rs", &body(FUNCTION_LINES - 1))).len(), 1);
    assert_eq!(too_long(&file("a.rs", &"//\n".repeat(FILE_LINES))).len(), 0);
    assert_eq!(too_long(&file("a.rs", &"//\n".repeat(FILE_LINES + 1))).len(), 1);
}
