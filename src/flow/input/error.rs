//! Every refusal says what is wrong, where it stands in the source, and what to do; never the payload itself.

use std::fmt;
use std::io;

use crate::json::check::Fault;

/// The physical line of the source on which a row begins, counted from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceLine(pub u64);

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.0)
    }
}

/// A place in the source: physical line and character of that line, both counted from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub line: u64,
    pub column: u64,
}

impl Position {
    pub(super) const START: Self = Self { line: 1, column: 1 };

    /// The place right after `bytes`, when they begin here.
    pub(super) fn after(self, bytes: &[u8]) -> Self {
        let lines = memchr::memchr_iter(b'\n', bytes).count();
        // Characters and not bytes: a column is what an editor shows.
        match memchr::memrchr(b'\n', bytes) {
            Some(last) => Self { line: self.line + lines as u64, column: 1 + characters(&bytes[last + 1..]) },
            None => Self { line: self.line, column: self.column + characters(bytes) },
        }
    }
}

/// A byte that does not continue a character begins one; that holds in broken UTF-8 too.
fn characters(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count() as u64
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// The CSV field an error stands in, as the header calls it; shows as nothing for the other formats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Field(pub Option<String>);

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(name) => write!(f, ", field {name:?}"),
            None => Ok(()),
        }
    }
}

/// Why a source, or one row of it, is refused.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error(
        "reading the input failed after {at}; nothing was submitted, see that the source is whole and submit it again"
    )]
    Read { at: SourceLine, source: io::Error },
    #[error("the input is UTF-16; save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`) and submit that")]
    Utf16,
    #[error("{at}{field}: invalid UTF-8; save the file as UTF-8 and submit it again")]
    Encoding { at: Position, field: Field },
    #[error(
        "{at}: the row has more than {limit} bytes; make it smaller, or raise the limit (in CSV a quote that is never closed does this)"
    )]
    RowTooLarge { at: SourceLine, limit: usize },
    #[error(
        "{at}: PostgreSQL would write the row as more than {limit} bytes, with its exponents in digits and a space after every comma and colon; make it smaller, send such numbers as strings, or raise the limit"
    )]
    RowExpands { at: SourceLine, limit: usize },
    #[error("{at}{field}: {fault}")]
    Json { at: Position, field: Field, fault: Fault },

    #[error(
        "{0:?} cannot be a CSV delimiter or quote: they are two different ASCII characters, neither a line end"
    )]
    CsvOptions(char),
    #[error("{at}: column {column} of the header has no name; give it one, or remove the column")]
    HeaderUnnamed { at: SourceLine, column: usize },
    #[error("{at}: columns {first} and {column} of the header are both called {name:?}; rename one")]
    HeaderTwice { at: SourceLine, column: usize, first: usize, name: String },
    #[error(
        "{at}: {found} fields where the header has {expected}; see whether a delimiter is missing or unquoted"
    )]
    FieldCount { at: SourceLine, expected: usize, found: usize },
    #[error("{at}: this quote is never closed; close it, or double it if it belongs to the text")]
    QuoteUnclosed { at: Position },
    #[error("{at}: text after a closing quote; double the quotes that belong to the text")]
    QuoteThenText { at: Position },
    #[error(
        "{at}{field}: a carriage return without a line feed; quote the field, or save the file with LF or CRLF line ends"
    )]
    BareReturn { at: Position, field: Field },

    #[error("{at}: a JSON array must begin with `[`; for one value per line choose NDJSON")]
    NotAnArray { at: Position },
    #[error("{at}: the input ends before the array's `]`; see that the file is whole")]
    ArrayUnclosed { at: Position },
    #[error("{at}: there is more after the array's `]`; remove it, or choose NDJSON if every line is a row")]
    AfterArray { at: Position },

    /// Not a finding of its own: the one before this was of the kind that ends the reading.
    #[error("reading stopped at an earlier error")]
    Stopped,
}
