//! The line of a file on which each value stands.

use std::collections::BTreeMap;
use toml::de::{DeTable, DeValue};

/// Lines from one on, by path; none of what is not TOML.
pub(super) fn of(text: &str) -> BTreeMap<Vec<String>, usize> {
    let mut lines = BTreeMap::new();
    if let Ok(table) = DeTable::parse(text) {
        walk(&[], table.get_ref(), text, &mut lines);
    }
    lines
}

fn walk(above: &[String], table: &DeTable<'_>, text: &str, lines: &mut BTreeMap<Vec<String>, usize>) {
    for (name, value) in table {
        let path = [above, &[name.get_ref().to_string()]].concat();
        if let DeValue::Table(inner) = value.get_ref() {
            walk(&path, inner, text, lines);
        }
        let before = text.get(..name.span().start).unwrap_or_default();
        lines.insert(path, before.matches('\n').count() + 1);
    }
}
