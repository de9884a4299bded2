//! What a reader promises, rule by rule. The properties and PostgreSQL's own verdicts stand in the files beside this one.

use std::io::{self, Read};

use super::*;
use crate::json::{
    check::{Fault, MAX_DEPTH, Refusal, check, one_line},
    special,
};

mod array;
mod csv;
#[path = "../../../tests/corpus/jsonb.rs"]
mod jsonb;
mod ndjson;
mod postgres;
mod properties;

/// A source that hands out its bytes a few at a time, as a slow body does.
pub(super) struct Drip<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl<'a> Drip<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, step: 0 }
    }
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

/// A row and its line, or an error's text; read whole and drop by drop, which must not differ.
type Outcome = Result<(u64, String), String>;

pub(super) fn read(bytes: impl AsRef<[u8]>, format: Format) -> Vec<Outcome> {
    read_within(bytes, format, Limits::default())
}

pub(super) fn read_within(bytes: impl AsRef<[u8]>, format: Format, limits: Limits) -> Vec<Outcome> {
    let bytes = bytes.as_ref();
    let whole = drain(Reader::new(bytes, format, limits));
    let dripped = drain(Reader::new(Drip::new(bytes), format, limits));
    assert_eq!(whole, dripped, "the pieces a source comes in change nothing");
    whole
}

fn drain<R: Read>(mut reader: Reader<R>) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let mut row = b"left over".to_vec();
    loop {
        match reader.next_row(&mut row) {
            Ok(Some(SourceLine(line))) => outcomes.push(Ok((line, String::from_utf8(row.clone()).unwrap()))),
            Ok(None) => return outcomes,
            Err(InputError::Stopped) => {
                outcomes.push(Err("stopped".into()));
                return outcomes;
            }
            Err(error) => {
                assert!(row.is_empty(), "an error leaves no row");
                outcomes.push(Err(error.to_string()));
            }
        }
    }
}

pub(super) fn row(line: u64, text: &str) -> Outcome {
    Ok((line, text.to_owned()))
}

/// Asserts that outcome `index` is an error whose text begins with `start`.
pub(super) fn assert_error(outcomes: &[Outcome], index: usize, start: &str) {
    match &outcomes[index] {
        Err(text) => assert!(text.starts_with(start), "{text:?} does not begin with {start:?}"),
        Ok(row) => panic!("{row:?} is no error"),
    }
}

#[test]
fn a_failed_read_stops_the_reading() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the wire was cut"))
        }
    }
    let mut reader = Reader::new((&b"1\n2\n3"[..]).chain(Broken), Format::Ndjson, Limits::default());
    let mut row = Vec::new();
    assert_eq!(reader.next_row(&mut row).unwrap(), Some(SourceLine(1)));
    assert_eq!(reader.next_row(&mut row).unwrap(), Some(SourceLine(2)));
    let error = reader.next_row(&mut row).unwrap_err();
    assert!(
        matches!(error, InputError::Read { at: SourceLine(3), .. }),
        "the 3 may be half of a row: {error}"
    );
    assert!(matches!(reader.next_row(&mut row), Err(InputError::Stopped)));
}

#[test]
fn an_interrupted_read_is_tried_again() {
    struct Interrupted(bool);
    impl Read for Interrupted {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0 = !self.0;
            if self.0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            buffer[..2].copy_from_slice(b"7\n");
            Ok(2)
        }
    }
    let mut reader = Reader::new(Interrupted(false).take(6), Format::Ndjson, Limits::default());
    assert_eq!(survey(&mut reader, 9).rows, 3);
}

#[test]
fn the_byte_order_mark_is_no_text_in_any_format() {
    let csv = Format::Csv(CsvOptions::default());
    assert_eq!(read("\u{FEFF}a\n1\n", csv), [row(2, r#"{"a":"1"}"#)]);
    assert_eq!(read("\u{FEFF}1\n", Format::Ndjson), [row(1, "1")]);
    assert_eq!(read("\u{FEFF}[1]", Format::JsonArray), [row(1, "1")]);
    assert_eq!(read("\u{FEFF}", Format::Ndjson), []);
}

#[test]
fn utf_16_is_called_by_its_name() {
    for head in [b"\xFF\xFEa\0", b"\xFE\xFF\0a"] {
        let outcomes = read(head, Format::Csv(CsvOptions::default()));
        assert_error(&outcomes, 0, "the input is UTF-16");
        assert_error(&outcomes, 1, "stopped");
    }
}

#[test]
fn the_window_does_not_grow_with_the_source() {
    let line = format!("\"{}\"\n", "x".repeat(1000));
    let endless = io::repeat(b' ').take(50_000_000);
    let source = io::Cursor::new(line.repeat(2000)).chain(endless);
    let mut reader = Reader::new(source, Format::Ndjson, Limits { max_row_bytes: 2000 });
    let survey = survey(&mut reader, 9);
    assert_eq!((survey.rows, survey.errors.len(), survey.bytes_read), (2000, 1, 52_006_000));
    assert!(reader.source.capacity() <= 64 * 1024, "{}", reader.source.capacity());
}

#[test]
fn a_survey_lists_all_errors_up_to_a_number() {
    let source = "1\nx\n2\ny\nz\n3\n";
    let found = survey(&mut Reader::new(source.as_bytes(), Format::Ndjson, Limits::default()), 2);
    assert_eq!((found.rows, found.row_bytes, found.bytes_read), (3, 3, 12));
    assert_eq!((found.errors.len(), found.more_errors, found.stopped), (2, 1, false));
    assert!(!found.is_clean());

    let found = survey(&mut Reader::new(&b"[1, x, 2]"[..], Format::JsonArray, Limits::default()), 2);
    assert_eq!((found.rows, found.errors.len(), found.stopped), (1, 1, true));
    assert!(survey(&mut Reader::new(&b"[1, 2]"[..], Format::JsonArray, Limits::default()), 2).is_clean());
}
