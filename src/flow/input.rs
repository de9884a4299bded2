//! Reading a submission: bytes in, rows of JSON text out, one line each, one at a time and in constant memory.
//!
//! The server stores this text without parsing it. So this is the only check: what jsonb cannot hold or give back is refused
//! here, with its place in the source, and what passes is read by every later `::jsonb`.

mod array;
mod csv;
mod error;
mod format;
mod ndjson;
mod row;
mod source;
mod survey;

#[cfg(test)]
mod tests;

pub use error::{Field, InputError, Position, SourceLine};
pub use format::{CsvOptions, Format};
pub use survey::{Survey, survey};

use crate::json::check::LARGEST;
use source::Source;
use std::io::Read;

/// What a row may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a row: as it stands in the source, as JSON, and as PostgreSQL writes it with its exponents spelled out. At most
    /// [`LARGEST`].
    pub max_row_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_row_bytes: 1024 * 1024 }
    }
}

/// The rows of a source, in its order.
#[derive(Debug)]
pub struct Reader<R> {
    source: Source<R>,
    rows: Rows,
    limits: Limits,
    stage: Stage,
}

#[derive(Debug)]
enum Rows {
    Csv(csv::Csv),
    Ndjson,
    Array(array::Array),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Fresh,
    Reading,
    Ended,
    Stopped,
}

impl<R: Read> Reader<R> {
    pub fn new(inner: R, format: Format, limits: Limits) -> Self {
        let rows = match format {
            Format::Csv(options) => Rows::Csv(csv::Csv::new(options)),
            Format::Ndjson => Rows::Ndjson,
            Format::JsonArray => Rows::Array(array::Array::default()),
        };
        let limits = Limits { max_row_bytes: limits.max_row_bytes.min(LARGEST) };
        Self { source: Source::new(inner), rows, limits, stage: Stage::Fresh }
    }

    /// Bytes taken from the source so far, for a progress bar.
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }

    /// Puts the next row into `row` and returns the line it begins on; `None` after the last. See [`Self::append_row`].
    pub fn next_row(&mut self, row: &mut Vec<u8>) -> Result<Option<SourceLine>, InputError> {
        row.clear();
        self.append_row(row)
    }

    /// Appends the next row's JSON text to `out`, as one line without its end, and returns the line of the source that it
    /// begins on; `None` after the last.
    ///
    /// After an error about one row the next call goes on with the row after it, so that all that is wrong can be reported at
    /// once. Where that makes no sense (a failed read, a bad header, an array that is not JSON) the next call and every later
    /// one returns [`InputError::Stopped`]. After an error `out` is as it was.
    pub fn append_row(&mut self, out: &mut Vec<u8>) -> Result<Option<SourceLine>, InputError> {
        let before = out.len();
        let next = match self.stage {
            Stage::Fresh => self.source.skip_bom().and_then(|()| {
                self.stage = Stage::Reading;
                self.read(out)
            }),
            Stage::Reading => self.read(out),
            Stage::Ended => return Ok(None),
            Stage::Stopped => return Err(InputError::Stopped),
        };
        match &next {
            Ok(Some(_)) => {}
            Ok(None) => self.stage = Stage::Ended,
            Err(error) => {
                out.truncate(before);
                if self.is_final(error) {
                    self.stage = Stage::Stopped;
                }
            }
        }
        next
    }

    fn read(&mut self, out: &mut Vec<u8>) -> Result<Option<SourceLine>, InputError> {
        match &mut self.rows {
            Rows::Csv(csv) => csv.next(&mut self.source, self.limits, out),
            Rows::Ndjson => ndjson::next(&mut self.source, self.limits, out),
            Rows::Array(array) => array.next(&mut self.source, self.limits, out),
        }
    }

    fn is_final(&self, error: &InputError) -> bool {
        match (&self.rows, error) {
            (_, InputError::Read { .. } | InputError::Utf16) => true,
            (Rows::Csv(csv), _) => !csv.has_header(),
            (Rows::Ndjson, _) => false,
            (Rows::Array(_), error) => array::is_final(error),
        }
    }
}
