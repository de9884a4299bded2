//! What docs/invariants.md and docs/reliability.md say is tested by name, is tested: a name that no test has any more is a lie.

use std::collections::BTreeSet;
use std::path::Path;

const NUMBERS: [(&str, u32); 2] = [("S", 26), ("L", 10)];

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// `dead::two_recoverers_at_once` is a function in tests/suite/dead.rs; a path is a file with tests in it.
fn problem(name: &str) -> Option<String> {
    if name.starts_with("src/") {
        return (!read(name).contains("#[test]") && !read(name).contains("start_paused"))
            .then(|| format!("{name} has no tests"));
    }
    let (file, test) = name.rsplit_once("::")?;
    let path = format!("tests/suite/{}.rs", file.replace("::", "/"));
    let is_there = read(&path).contains(&format!("fn {test}("));
    (!is_there).then(|| format!("{path} has no test {test}"))
}

fn is_name(quoted: &&str) -> bool {
    let is_word =
        |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | ':' | '/' | '.');
    quoted.chars().all(is_word)
        && (quoted.contains("::") || quoted.starts_with("src/") && quoted.ends_with(".rs"))
}

#[test]
fn every_test_that_the_promises_name_exists() {
    for page in ["docs/invariants.md", "docs/reliability.md"] {
        let text = read(page);
        let names: BTreeSet<&str> = quoted(&text).filter(is_name).collect();
        let wrong: Vec<String> = names.iter().filter_map(|name| problem(name)).collect();
        assert_eq!(wrong, Vec::<String>::new(), "{page}");
        if page == "docs/invariants.md" {
            assert!(names.len() > 60, "only {} names were found", names.len());
        }
    }
}

#[test]
fn every_promise_has_its_number_and_a_test() {
    let text = read("docs/invariants.md");
    for (letter, last) in NUMBERS {
        for number in 1..=last {
            let start = format!("| {letter}{number} |");
            let line = text.lines().find(|line| line.starts_with(&start));
            let line = line.unwrap_or_else(|| panic!("there is no {letter}{number}"));
            assert!(quoted(line).any(|name| name.contains("::")), "{letter}{number} has no test");
        }
    }
}
