//! Rows in any format: whatever comes, each is refused with its place or is one line of JSON that the next reader takes.

use crate::flow::input::{CsvOptions, Format, InputError, Limits, Reader};
use crate::json::check::{check, one_line};
use serde_json::value::RawValue;
use std::{
    collections::BTreeMap,
    io::{self, Read},
};

/// Hands out its bytes a few at a time, as a slow body does.
struct Drip<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl Read for Drip<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.step = self.step % 7 + 1;
        let count = self.step.min(self.bytes.len()).min(buffer.len());
        buffer[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes = &self.bytes[count..];
        Ok(count)
    }
}

/// The rows with their lines, and the words of the errors.
fn drain(mut reader: Reader<impl Read>, limits: Limits) -> Vec<Result<(u64, String), String>> {
    let (mut read, mut row) = (Vec::new(), Vec::new());
    loop {
        match reader.next_row(&mut row) {
            Ok(Some(line)) => {
                let text = String::from_utf8(row.clone()).expect("a row is UTF-8");
                assert!(!text.contains(['\n', '\r']), "a row is one line: {text:?}");
                assert!(row.len() <= limits.max_row_bytes, "a row has at most the bytes it may have");
                assert!(is_json(&text), "a row is JSON: {text:?}");
                assert!(one_line(&text).is_ok_and(|line| line.text == text), "a row passes the check again");
                read.push(Ok((line.0, text)));
            }
            Ok(None) => return read,
            Err(InputError::Stopped) => {
                read.push(Err("stopped".to_owned()));
                return read;
            }
            Err(error) => {
                assert!(row.is_empty(), "an error leaves no row");
                read.push(Err(error.to_string()));
            }
        }
    }
}

fn read(source: &[u8], format: Format, limits: Limits) -> Vec<Result<(u64, String), String>> {
    let whole = drain(Reader::new(source, format, limits), limits);
    let dripped = drain(Reader::new(Drip { bytes: source, step: 0 }, format, limits), limits);
    assert_eq!(whole, dripped, "the pieces a source comes in change nothing");
    assert!(whole.len() <= source.len() + 2, "every row and every error takes some of the source");
    whole
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok()
}

fn limits(byte: u8) -> Limits {
    Limits { max_row_bytes: [0, 1, 8, 60, 1 << 20][usize::from(byte) % 5] }
}

/// NDJSON, and the same bytes as one array; the first byte is the limit of a row.
pub fn rows(bytes: &[u8]) {
    let [limit, source @ ..] = bytes else { return };
    for format in [Format::Ndjson, Format::JsonArray] {
        read(source, format, limits(*limit));
    }
    Format::guess(None, source);
}

/// CSV in one of some dialects. What was read, and written by another writer, is read again.
pub fn csv(bytes: &[u8]) {
    const DIALECTS: [(char, char); 5] = [(',', '"'), (';', '"'), ('\t', '"'), (',', '\''), ('|', '\\')];
    let [dialect, limit, source @ ..] = bytes else { return };
    let (delimiter, quote) = DIALECTS[usize::from(*dialect) % DIALECTS.len()];
    let options = CsvOptions::new(delimiter, quote).expect("the dialects are good ones");
    let read_rows = read(source, Format::Csv(options), limits(*limit));
    let rows: Vec<BTreeMap<String, String>> = read_rows
        .iter()
        .flatten()
        .map(|(_, text)| serde_json::from_str(text).expect("a row of CSV is an object of strings"))
        .collect();
    let Some(first) = rows.first() else { return };
    let mut writer = ::csv::WriterBuilder::new()
        .delimiter(options.delimiter())
        .quote(options.quote())
        .quote_style(::csv::QuoteStyle::Always)
        .from_writer(Vec::new());
    writer.write_record(first.keys()).expect("memory takes all");
    for row in &rows {
        assert!(row.keys().eq(first.keys()), "every row has the columns of the header");
        writer.write_record(row.values()).expect("memory takes all");
    }
    let written = writer.into_inner().expect("memory takes all");
    let again: Vec<BTreeMap<String, String>> = read(&written, Format::Csv(options), Limits::default())
        .into_iter()
        .map(|row| serde_json::from_str(&row.expect("what was read can be read again").1).expect("an object"))
        .collect();
    assert_eq!(again, rows);
}

/// The check of one value: as strict as another reader of JSON, and stricter only where PostgreSQL is.
pub fn json(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let (checked, line) = (check(text), one_line(text));
    match (&checked, &line) {
        (Ok(_), Ok(line)) => {
            assert!(is_json(text), "only we take {text:?}");
            assert!(!line.text.contains(['\n', '\r']) && line.text == line.text.trim(), "{text:?}");
            let (given, kept) = (values(text), values(&line.text));
            assert_eq!(given, kept, "{text:?} is another value as a line");
        }
        (Err(refusal), Err(same)) => {
            assert_eq!(refusal, same, "{text:?}");
            assert!(refusal.offset <= text.len(), "{text:?}: {refusal}");
            assert!(!refusal.fault.is_syntax() || !is_json(text), "only we refuse {text:?}: {refusal}");
        }
        _ => panic!("{text:?}: {checked:?} {line:?}"),
    }
}

/// Numbers of any size are compared as they are written.
fn values(text: &str) -> String {
    let mut words = String::new();
    let mut within = false;
    let mut escaped = false;
    for character in text.chars() {
        match character {
            '"' if !escaped => within = !within,
            ' ' | '\t' | '\r' | '\n' if !within => continue,
            _ => {}
        }
        escaped = character == '\\' && !escaped;
        words.push(character);
    }
    words
}
