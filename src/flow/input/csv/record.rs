//! One CSV record: where it ends, and where its fields stand, found in the same pass.

use super::super::error::Position;
use super::super::source::{End, Frame};
use super::super::{CsvOptions, InputError};

/// Where a field's text stands in its record, quotes around it left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Piece {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) quoted: bool,
    /// It holds doubled quotes, each of which stands for one.
    pub(super) doubled: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// At the first byte of a field.
    Start,
    Plain,
    Quoted,
    /// After a quote in a quoted field: it was the closing one, or the first of two.
    Quote,
    /// After a closing quote and a carriage return.
    Return,
}

#[derive(Debug)]
pub(super) struct Record {
    options: CsvOptions,
    state: State,
    open: Piece,
    pieces: Vec<Piece>,
    count: usize,
    /// Pieces beyond the header's are only counted: memory does not grow with a broken record.
    keep: usize,
    /// Where text follows a closing quote.
    stray: Option<usize>,
    unclosed: Option<usize>,
    skimming: bool,
    /// A field of it is quoted.
    quotes: bool,
}

impl Record {
    pub(super) fn new(options: CsvOptions) -> Self {
        Self {
            options,
            state: State::Start,
            open: Piece::default(),
            pieces: Vec::new(),
            count: 0,
            keep: usize::MAX,
            stray: None,
            unclosed: None,
            skimming: false,
            quotes: false,
        }
    }

    pub(super) fn keep_at_most(&mut self, columns: usize) {
        self.keep = columns;
    }

    pub(super) fn begin(&mut self) {
        self.pieces.clear();
        (self.state, self.count, self.stray, self.unclosed) = (State::Start, 0, None, None);
        (self.skimming, self.quotes) = (false, false);
    }

    pub(super) fn quote(&self) -> u8 {
        self.options.quote()
    }

    /// Whether a line feed may stand within a field.
    pub(super) fn has_quotes(&self) -> bool {
        self.quotes
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The source ends here, `len` bytes into the record.
    pub(super) fn finish(&mut self, window: &[u8]) {
        match self.state {
            State::Start => self.open = Piece { start: window.len(), ..Piece::default() },
            State::Quoted => self.unclosed = Some(self.open.start - 1),
            State::Plain | State::Quote | State::Return => {}
        }
        self.last(window, window.len());
    }

    /// Refuses a record whose quotes leave its fields in doubt.
    pub(super) fn check(&self, record: &[u8], at: Position) -> Result<(), InputError> {
        if let Some(offset) = self.stray {
            return Err(InputError::QuoteThenText { at: at.after(&record[..offset]) });
        }
        if let Some(offset) = self.unclosed {
            return Err(InputError::QuoteUnclosed { at: at.after(&record[..offset]) });
        }
        Ok(())
    }

    /// Closes the open field at `end`; a quoted one ended before its quote.
    fn close(&mut self, end: usize) {
        if !self.open.quoted {
            self.open.end = end;
        }
        self.count += 1;
        if self.pieces.len() < self.keep && !self.skimming {
            self.pieces.push(self.open);
        }
        self.state = State::Start;
    }

    /// Closes the record's last field; the carriage return of a CRLF is no part of it.
    fn last(&mut self, window: &[u8], end: usize) {
        let text = &window[self.open.start.min(end)..end];
        self.close(end - usize::from(text.ends_with(b"\r")));
    }

    /// One step from `at` in a field that has begun; the new place, or `None` when the window has no more.
    fn step(&mut self, window: &[u8], at: usize) -> Option<usize> {
        let (delimiter, quote) = (self.options.delimiter(), self.options.quote());
        match (self.state, window[at]) {
            (State::Start, byte) => {
                let quoted = byte == quote;
                self.quotes |= quoted;
                let start = at + usize::from(quoted);
                self.open = Piece { start, end: start, quoted, doubled: false };
                self.state = if quoted { State::Quoted } else { State::Plain };
                return Some(start);
            }
            (State::Plain, _) => {
                let found = at + memchr::memchr2(delimiter, b'\n', &window[at..])?;
                if window[found] == b'\n' {
                    return Some(found);
                }
                self.close(found);
                return Some(found + 1);
            }
            (State::Quoted, _) => {
                self.open.end = at + memchr::memchr(quote, &window[at..])?;
                self.state = State::Quote;
                return Some(self.open.end + 1);
            }
            (State::Quote, byte) if byte == quote => {
                self.open.doubled = true;
                self.state = State::Quoted;
            }
            (State::Quote, byte) if byte == delimiter => self.close(at),
            (State::Quote, b'\r') => self.state = State::Return,
            (State::Quote | State::Return, _) => {
                // Read on as plain text, so that the next line is found again.
                self.stray.get_or_insert(at);
                self.state = State::Plain;
                return Some(at);
            }
        }
        Some(at + 1)
    }
}

impl Frame for Record {
    fn end(&mut self, window: &[u8], from: usize) -> Option<End> {
        let mut at = from;
        while at < window.len() {
            let in_quotes = matches!(self.state, State::Quoted | State::Start);
            if !in_quotes && window[at] == b'\n' {
                self.last(window, at);
                return Some(End { len: at, next: at + 1 });
            }
            at = self.step(window, at)?;
        }
        None
    }

    fn skim(&mut self) {
        self.skimming = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_passed_by_leaves_no_pieces_behind() {
        let mut record = Record::new(CsvOptions::default());
        record.begin();
        record.skim();
        for _ in 0..100 {
            assert!(record.end(&[b','; 1000], 0).is_none());
        }
        assert_eq!((record.count(), record.pieces.capacity()), (100_000, 0));
    }

    #[test]
    fn fields_beyond_the_headers_are_only_counted() {
        let mut record = Record::new(CsvOptions::default());
        record.keep_at_most(2);
        record.begin();
        assert!(record.end(b"1,2,3,4\n", 0).is_some());
        assert_eq!((record.count(), record.pieces.len()), (4, 2));
    }
}
