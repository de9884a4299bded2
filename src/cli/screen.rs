//! What people see: tables and colours on a terminal, JSON for machines.

mod table;

pub(super) use table::{Column, prose, spare, table, whole};

use anyhow::Result;
use comfy_table::{Cell, Color};
use serde::Serialize;
use std::io::Write;

/// Prints a value as indented JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Prints a line; a reader that has gone away (`| head`) is no error.
pub(super) fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A word beside the answer, on stderr; whoever does not read it loses nothing.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "musterd: {text}");
}

/// Columns and lines of the terminal. One that does not know its size says nought: it is taken for the usual one.
pub(super) fn size() -> (usize, usize) {
    let known = |side: u16, usual: usize| if side == 0 { usual } else { side.into() };
    crossterm::terminal::size().map_or((80, 24), |(width, height)| (known(width, 80), known(height, 24)))
}

/// A value as a person would write it: text without quotes, unless it is empty.
pub(super) fn value(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) if !text.is_empty() => text.clone(),
        other => other.to_string(),
    }
}

/// A word that says how good or bad something is; in colour on a terminal.
pub(super) fn word(text: &str, mood: Mood) -> Cell {
    let colour = match mood {
        Mood::Good => Color::Green,
        Mood::Doubtful => Color::Yellow,
        Mood::Bad => Color::Red,
        Mood::Plain => return Cell::new(text),
    };
    if colours() { Cell::new(text).fg(colour) } else { Cell::new(text) }
}

/// Whether colours are wanted; without a terminal there are none anyway.
pub(super) fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Mood {
    Good,
    Doubtful,
    Bad,
    Plain,
}

/// 1234567 as 1,234,567.
pub(super) fn grouped(number: impl Into<i64>) -> String {
    let number: i64 = number.into();
    let digits = number.unsigned_abs().to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if number < 0 { format!("-{grouped}") } else { grouped }
}

/// `1 worker`, `2 workers`.
pub(super) fn counted(number: i64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1234567, "1,234,567"), (-45678, "-45,678")];
        for (number, expected) in cases {
            assert_eq!(grouped(number), expected);
        }
    }
}
