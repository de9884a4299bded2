//! CSV: the header names the fields, every later record is a JSON object of strings.
//!
//! Quoting is strict (RFC 4180), because a stray quote silently joins rows; a quote inside an unquoted field is plain text.
//! Blank lines are skipped. Records end in LF or CRLF.

use std::io::Read;

use super::error::{Field, Position, SourceLine};
use super::source::{End, Framed, Source};
use super::{CsvOptions, InputError, Limits, row};
use crate::json::{check::Fault, special::find_special};

mod header;
mod record;

use record::{Piece, Record};

#[derive(Debug)]
pub(super) struct Csv {
    record: Record,
    columns: Option<Vec<header::Column>>,
}

/// A fault in a field's bytes, before it is known where the field stands.
#[derive(Clone, Copy, Debug)]
enum Flaw {
    Nul,
    BareReturn,
}

impl Csv {
    pub(super) fn new(options: CsvOptions) -> Self {
        Self { record: Record::new(options), columns: None }
    }

    /// Whether the header was read, so that the rows after a refused one mean something.
    pub(super) fn has_header(&self) -> bool {
        self.columns.is_some()
    }

    pub(super) fn next<R: Read>(
        &mut self,
        source: &mut Source<R>,
        limits: Limits,
        out: &mut Vec<u8>,
    ) -> Result<Option<SourceLine>, InputError> {
        if self.columns.is_none() {
            let Some(columns) = self.header(source, limits)? else { return Ok(None) };
            self.columns = Some(columns);
        }
        let Some(end) = self.frame(source, limits)? else { return Ok(None) };
        let line = source.line();
        let written = self.write(source, end, limits, out);
        // Consumed before the verdict is returned: after a bad row the next call goes on with the next record.
        match end.next > end.len && !self.record.has_quotes() {
            true => source.consume_line(end.len),
            false => source.consume(end.next),
        }
        written.map(|()| Some(line))
    }

    /// The names of the columns; `None` of a source that has nothing at all: it has no rows either.
    fn header<R: Read>(
        &mut self,
        source: &mut Source<R>,
        limits: Limits,
    ) -> Result<Option<Vec<header::Column>>, InputError> {
        let Some(end) = self.frame(source, limits)? else { return Ok(None) };
        let columns = header::read(&source.window()[..end.len], source.position(), &self.record)?;
        source.consume(end.next);
        self.record.keep_at_most(columns.len());
        Ok(Some(columns))
    }

    /// The next record that is not a blank line, whole in the window.
    fn frame<R: Read>(&mut self, source: &mut Source<R>, limits: Limits) -> Result<Option<End>, InputError> {
        loop {
            self.record.begin();
            let end = match source.frame(&mut self.record, limits.max_row_bytes)? {
                Framed::Record(end) => end,
                Framed::Rest(0) => return Ok(None),
                Framed::Rest(len) => {
                    self.record.finish(&source.window()[..len]);
                    End { len, next: len }
                }
                Framed::TooLarge(at) => {
                    return Err(InputError::RowTooLarge { at, limit: limits.max_row_bytes });
                }
            };
            if let Err(error) = self.record.check(&source.window()[..end.len], source.position()) {
                source.consume(end.next);
                return Err(error);
            }
            if !matches!(&source.window()[..end.len], b"" | b"\r") {
                return Ok(Some(end));
            }
            source.consume(end.next);
        }
    }

    /// Writes the record in the window as an object, its pieces under the header's names.
    fn write<R: Read>(
        &self,
        source: &Source<R>,
        end: End,
        limits: Limits,
        out: &mut Vec<u8>,
    ) -> Result<(), InputError> {
        let bytes = &source.window()[..end.len];
        let columns = self.columns.as_deref().unwrap_or_default();
        let (expected, found) = (columns.len(), self.record.count());
        if expected != found {
            return Err(InputError::FieldCount { at: source.line(), expected, found });
        }
        let place = |offset: usize| (source.position().after(&bytes[..offset]), self.field_at(offset));
        if let Err(error) = str::from_utf8(bytes) {
            let (at, field) = place(error.valid_up_to());
            return Err(InputError::Encoding { at, field });
        }
        let start = out.len();
        for (piece, column) in self.record.pieces().iter().zip(columns) {
            out.extend_from_slice(&column.opening);
            piece.write(bytes, self.record.quote(), out).map_err(|(offset, flaw)| {
                let (at, field) = place(offset);
                flaw.error(at, field)
            })?;
            out.push(b'"');
        }
        out.push(b'}');
        // PostgreSQL writes a space after each colon and comma.
        let (len, spaces) = (out.len() - start, (2 * columns.len()).saturating_sub(1));
        row::fits(len, (len + spaces) as u64, source.line(), limits)
    }

    /// The field that the record's byte `offset` belongs to.
    fn field_at(&self, offset: usize) -> Field {
        let columns = self.columns.as_deref().unwrap_or_default();
        let mut fields = self.record.pieces().iter().zip(columns);
        Field(fields.rfind(|(piece, _)| piece.start <= offset).map(|(_, column)| column.name.clone()))
    }
}

impl Flaw {
    fn error(self, at: Position, field: Field) -> InputError {
        match self {
            Self::Nul => InputError::Json { at, field, fault: Fault::Nul },
            Self::BareReturn => InputError::BareReturn { at, field },
        }
    }
}

impl Piece {
    /// Appends the piece's text as the inside of a JSON string, or says at which byte it cannot be.
    fn write(&self, record: &[u8], quote: u8, out: &mut Vec<u8>) -> Result<(), (usize, Flaw)> {
        let mut at = self.start;
        while at < self.end {
            let stop = self.next_stop(record, at, quote);
            out.extend_from_slice(&record[at..stop]);
            if stop == self.end {
                return Ok(());
            }
            match record[stop] {
                b'\r' if !self.quoted => return Err((stop, Flaw::BareReturn)),
                0 => return Err((stop, Flaw::Nul)),
                byte => escape(byte, out),
            }
            // Within quotes a quote stands for the one after it.
            at = stop + 1 + usize::from(self.doubled && record[stop] == quote);
        }
        Ok(())
    }

    /// The next byte that is not copied as it is, or the piece's end.
    fn next_stop(&self, record: &[u8], at: usize, quote: u8) -> usize {
        let special = find_special(&record[..self.end], at);
        if self.doubled && quote != b'"' {
            return memchr::memchr(quote, &record[at..special]).map_or(special, |found| at + found);
        }
        special
    }
}

fn escape(byte: u8, out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    match byte {
        b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
        b'\n' => out.extend_from_slice(b"\\n"),
        b'\r' => out.extend_from_slice(b"\\r"),
        b'\t' => out.extend_from_slice(b"\\t"),
        0..0x20 => {
            out.extend_from_slice(&[
                b'\\',
                b'u',
                b'0',
                b'0',
                HEX[usize::from(byte >> 4)],
                HEX[usize::from(byte & 15)],
            ]);
        }
        _ => out.push(byte),
    }
}
