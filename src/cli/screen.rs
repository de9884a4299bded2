//! What people see: tables and colours on a terminal, JSON for machines.

mod table;

pub(super) use table::{Column, prose, spare, table, whole};

use anyhow::Result;
use comfy_table::{Cell, Color};
use serde::Serialize;
use std::{borrow::Cow, io::Write};

/// Prints a value as indented JSON. What a terminal would obey stands in strings only, where JSON has a way to write it.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    let mut text = String::new();
    for c in serde_json::to_string_pretty(value)?.chars() {
        match is_command(c) {
            true => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => text.push(c),
        }
    }
    put(&text)
}

/// Whether a terminal would obey it, or show what follows in another order: no text of a handler reaches one like that.
fn is_command(c: char) -> bool {
    (c.is_control() && !matches!(c, '\n' | '\t'))
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A text as a terminal may show it: what it would obey is written out.
pub(crate) fn safe(text: &str) -> Cow<'_, str> {
    if !text.contains(is_command) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\r' => shown.push(' '),
            c if is_command(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    shown.into()
}

/// A text on one line.
pub(super) fn one_line(text: &str) -> String {
    safe(&text.replace(['\n', '\r', '\t'], " ")).into_owned()
}

/// The beginning of a text on one line.
pub(super) fn excerpt(text: &str) -> String {
    const SHOWN: usize = 200;
    let line = one_line(text);
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// A share of a whole, as a percentage.
pub(super) fn share(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Prints a line.
pub(super) fn line(text: &str) -> Result<()> {
    put(&safe(text))
}

/// Prints a line as it is; a reader that has gone away (`| head`) is no error.
fn put(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A note beside the answer, on stderr; a reader of stdout alone loses nothing.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "musterd: {}", safe(text));
}

/// Columns and lines of the terminal. One that does not know its size says zero: it is taken for the usual one.
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
pub(super) fn word(text: &str, tone: Tone) -> Cell {
    let colour = match tone {
        Tone::Good => Color::Green,
        Tone::Doubtful => Color::Yellow,
        Tone::Bad => Color::Red,
        Tone::Plain => return Cell::new(safe(text)),
    };
    let cell = Cell::new(safe(text));
    if colours() { cell.fg(colour) } else { cell }
}

/// Whether colours are wanted; without a terminal there are none anyway.
pub(super) fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Tone {
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
    fn no_text_steers_the_terminal() {
        let text = "red \u{1b}[31m, title \u{1b}]0;x\u{7}, C1 \u{9b}2J, back\u{8}, over\r, turned \u{202e}";
        let shown = safe(text);
        assert!(!shown.chars().any(|c| c.is_control()) && !shown.contains('\u{202e}'), "{shown}");
        assert!(shown.starts_with("red \\u{1b}[31m"), "{shown}");
        assert!(matches!(safe("plain, ünïcode\nand more"), Cow::Borrowed(_)));
        assert_eq!(one_line("a\r\nb\tc"), "a  b c");
        assert_eq!(excerpt(&"x".repeat(300)).chars().count(), 201);
    }

    #[test]
    fn large_numbers_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1234567, "1,234,567"), (-45678, "-45,678")];
        for (number, expected) in cases {
            assert_eq!(grouped(number), expected);
        }
    }
}
