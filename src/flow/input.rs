//! Reading a submission: bytes in, rows of JSON text out, one at a time and in constant memory.
//!
//! What PostgreSQL cannot store is refused here, with its place in the source, so that a batch is never half written because
//! of one row.

use std::io::Read;

mod array;
mod csv;
mod error;
mod format;
mod json;
mod ndjson;
mod number;
mod row;
mod source;
mod special;
mod survey;

#[cfg(test)]
mod tests;

pub use error::{Field, InputError, Position, SourceLine};
pub use format::{CsvOptions, Format};
pub use json::{Fault, MAX_DEPTH, Refusal, check};
pub use survey::{Survey, survey};

use source::Source;

/// What a row may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a row: as it stands in the source, as JSON, and as PostgreSQL writes it with its exponents spelled out.
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
        Self { source: Source::new(inner), rows, limits, stage: Stage::Fresh }
    }

    /// Bytes taken from the source so far, for a progress bar.
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }

    /// Puts the next row's JSON text into `row` and returns the line it begins on; `None` after the last.
    ///
    /// After an error about one row the next call goes on with the row after it, so that all that is wrong can be told at
    /// once. Where that makes no sense (a failed read, a bad header, an array that is not JSON) the next call and every later
    /// one returns [`InputError::Stopped`]. After an error `row` is empty.
    pub fn next_row(&mut self, row: &mut Vec<u8>) -> Result<Option<SourceLine>, InputError> {
        row.clear();
        let next = match self.stage {
            Stage::Fresh => self.source.skip_bom().and_then(|()| {
                self.stage = Stage::Reading;
                self.read(row)
            }),
            Stage::Reading => self.read(row),
            Stage::Ended => return Ok(None),
            Stage::Stopped => return Err(InputError::Stopped),
        };
        match &next {
            Ok(Some(_)) => {}
            Ok(None) => self.stage = Stage::Ended,
            Err(error) => {
                row.clear();
                if self.is_final(error) {
                    self.stage = Stage::Stopped;
                }
            }
        }
        next
    }

    fn read(&mut self, row: &mut Vec<u8>) -> Result<Option<SourceLine>, InputError> {
        match &mut self.rows {
            Rows::Csv(csv) => csv.next(&mut self.source, self.limits, row),
            Rows::Ndjson => ndjson::next(&mut self.source, self.limits, row),
            Rows::Array(array) => array.next(&mut self.source, self.limits, row),
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
