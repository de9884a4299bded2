//! One window over the source: it grows to hold one record, never more, whatever the source's size.

use std::io::{ErrorKind, Read};

use super::InputError;
use super::error::{Position, SourceLine};

pub(super) const BOM: &[u8] = b"\xEF\xBB\xBF";
const CHUNK: usize = 64 * 1024;
/// A record may end in `\r\n`, and neither belongs to its size.
const LINE_END: usize = 2;

/// Finds where a record ends, resuming where the window ended before.
pub(super) trait Frame {
    /// The record's end within `window`, which begins where the record does; all before `from` was seen.
    fn end(&mut self, window: &[u8], from: usize) -> Option<End>;

    /// The record is too large: from now on windows are pieces of it, and only its end matters.
    fn skim(&mut self) {}
}

/// A record's own bytes, and the bytes up to the next one.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) len: usize,
    pub(super) next: usize,
}

/// What the source held next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Framed {
    /// A whole record at the window's start. The caller consumes it.
    Record(End),
    /// The source ended before the frame saw an end; this many bytes are left.
    Rest(usize),
    /// A record over the limit, already passed by.
    TooLarge(SourceLine),
}

#[derive(Debug)]
pub(super) struct Source<R> {
    inner: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    ended: bool,
    read: u64,
    at: Position,
}

impl<R: Read> Source<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, buffer: vec![0; CHUNK], start: 0, end: 0, ended: false, read: 0, at: Position::START }
    }

    pub(super) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// The place of the window's first byte.
    pub(super) fn position(&self) -> Position {
        self.at
    }

    pub(super) fn line(&self) -> SourceLine {
        SourceLine(self.at.line)
    }

    pub(super) fn window(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(super) fn consume(&mut self, count: usize) {
        let count = count.min(self.end - self.start);
        self.at = self.at.after(&self.buffer[self.start..self.start + count]);
        self.start += count;
    }

    /// Consumes a line of `len` bytes and its line feed, which is the only one in it.
    #[inline]
    pub(super) fn consume_line(&mut self, len: usize) {
        self.at = Position { line: self.at.line + 1, column: 1 };
        self.start += len + 1;
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Passes by the byte order mark, which is no part of the text in any format.
    pub(super) fn skip_bom(&mut self) -> Result<(), InputError> {
        while self.window().len() < BOM.len() && self.fill()? {}
        if self.window().starts_with(b"\xFF\xFE") || self.window().starts_with(b"\xFE\xFF") {
            return Err(InputError::Utf16);
        }
        if self.window().starts_with(BOM) {
            self.start += BOM.len();
        }
        Ok(())
    }

    /// Passes by JSON whitespace; the first other byte, or `None` at the source's end.
    pub(super) fn skip_blank(&mut self) -> Result<Option<u8>, InputError> {
        loop {
            let blank =
                self.window().iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
            self.consume(blank);
            if let Some(byte) = self.window().first() {
                return Ok(Some(*byte));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Brings one whole record of at most `limit` bytes into the window, or passes by a larger one.
    ///
    /// The verdict depends on the record alone and not on how the source hands out its bytes.
    pub(super) fn frame(&mut self, frame: &mut impl Frame, limit: usize) -> Result<Framed, InputError> {
        let mut seen = 0;
        loop {
            if let Some(end) = frame.end(self.window(), seen) {
                if end.len <= limit.saturating_add(LINE_END) {
                    return Ok(Framed::Record(end));
                }
                let line = self.line();
                self.consume(end.next);
                return Ok(Framed::TooLarge(line));
            }
            seen = self.window().len();
            if seen > limit.saturating_add(LINE_END) {
                return self.skim(frame).map(Framed::TooLarge);
            }
            if !self.fill()? {
                return Ok(Framed::Rest(seen));
            }
        }
    }

    /// Drops a record that is too large, window by window.
    fn skim(&mut self, frame: &mut impl Frame) -> Result<SourceLine, InputError> {
        let line = self.line();
        frame.skim();
        loop {
            self.consume(self.window().len());
            if !self.fill()? {
                return Ok(line);
            }
            if let Some(end) = frame.end(self.window(), 0) {
                self.consume(end.next);
                return Ok(line);
            }
        }
    }

    /// Reads one piece more; `false` when there is none.
    fn fill(&mut self) -> Result<bool, InputError> {
        self.make_room();
        while !self.ended {
            match self.inner.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    self.end += count;
                    self.read += count as u64;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(InputError::Read { at: self.line(), source }),
            }
        }
        Ok(false)
    }

    /// Moves the open record to the front, and grows only when it fills the buffer.
    fn make_room(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.end < self.buffer.len() {
            return;
        }
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.end > self.buffer.len() / 2 {
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
    }
}
