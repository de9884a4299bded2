//! NDJSON: a line is a row, whatever JSON value it holds. Blank lines are skipped and are no rows.

use std::io::Read;

use super::error::SourceLine;
use super::source::{End, Frame, Framed, Source};
use super::{InputError, Limits, row};

#[derive(Debug)]
struct Line;

impl Frame for Line {
    fn end(&mut self, window: &[u8], from: usize) -> Option<End> {
        let len = from + memchr::memchr(b'\n', &window[from..])?;
        Some(End { len, next: len + 1 })
    }
}

pub(super) fn next<R: Read>(
    source: &mut Source<R>,
    limits: Limits,
    out: &mut Vec<u8>,
) -> Result<Option<SourceLine>, InputError> {
    loop {
        let (len, ended) = match source.frame(&mut Line, limits.max_row_bytes)? {
            Framed::Record(end) => (end.len, true),
            Framed::Rest(0) => return Ok(None),
            Framed::Rest(len) => (len, false),
            Framed::TooLarge(at) => return Err(InputError::RowTooLarge { at, limit: limits.max_row_bytes }),
        };
        let line = source.line();
        let taken = row::take(&source.window()[..len], source.position(), limits, out);
        // Consumed before the verdict is returned: after a bad row the next call goes on with the next line.
        match ended {
            true => source.consume_line(len),
            false => source.consume(len),
        }
        match taken? {
            row::Taken::Blank => {}
            row::Taken::Row => return Ok(Some(line)),
        }
    }
}
