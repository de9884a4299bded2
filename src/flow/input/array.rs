//! A JSON array, one element in memory at a time. Elements may span lines; what is not JSON ends the reading.

use std::io::Read;

use super::error::SourceLine;
use super::source::{End, Frame, Framed, Source};
use super::{InputError, Limits, row};
use crate::json::{check::Fault, special::find_special};

/// Where in the array the next element is looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Array {
    #[default]
    Unopened,
    /// After `[`: an element or `]`.
    Opened,
    /// After a comma: an element.
    Comma,
    Closed,
}

/// Finds the comma or bracket after an element. It trusts the brackets; the row's own check does not.
#[derive(Debug, Default)]
struct Element {
    depth: u64,
    string: bool,
    escaped: bool,
}

impl Frame for Element {
    fn end(&mut self, window: &[u8], from: usize) -> Option<End> {
        let mut at = from;
        while at < window.len() {
            if self.string {
                at = self.in_string(window, at)?;
                continue;
            }
            match window[at] {
                b'"' => self.string = true,
                b'[' | b'{' => self.depth += 1,
                b',' | b']' if self.depth == 0 => return Some(End { len: at, next: at }),
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            at += 1;
        }
        None
    }
}

impl Element {
    /// Passes by the rest of a string, or all of `window` if it does not end here.
    fn in_string(&mut self, window: &[u8], mut at: usize) -> Option<usize> {
        if self.escaped {
            self.escaped = false;
            at += 1;
        }
        // Strings are mostly short: this search begins at once, where memchr must first set itself up.
        loop {
            at = find_special(window, at);
            match window.get(at)? {
                b'"' => {
                    self.string = false;
                    return Some(at + 1);
                }
                b'\\' if at + 1 == window.len() => {
                    self.escaped = true;
                    return None;
                }
                b'\\' => at += 2,
                // A control character, which the row's check refuses.
                _ => at += 1,
            }
        }
    }
}

impl Array {
    /// The next element. An error that leaves the array's own structure in doubt is final: see [`is_final`].
    pub(super) fn next<R: Read>(
        &mut self,
        source: &mut Source<R>,
        limits: Limits,
        out: &mut Vec<u8>,
    ) -> Result<Option<SourceLine>, InputError> {
        if *self == Self::Unopened {
            match source.skip_blank()? {
                Some(b'[') => {}
                Some(_) => return Err(InputError::NotAnArray { at: source.position() }),
                // Nothing at all is no rows, as in the other formats.
                None => return Ok(None),
            }
            source.consume(1);
            *self = Self::Opened;
        }
        match (*self, source.skip_blank()?) {
            (Self::Closed, None) => Ok(None),
            (Self::Closed, Some(_)) => Err(InputError::AfterArray { at: source.position() }),
            (Self::Opened, Some(b']')) => {
                self.pass_delimiter(source)?;
                self.next(source, limits, out)
            }
            _ => self.element(source, limits, out).map(Some),
        }
    }

    fn element<R: Read>(
        &mut self,
        source: &mut Source<R>,
        limits: Limits,
        out: &mut Vec<u8>,
    ) -> Result<SourceLine, InputError> {
        let (line, at) = (source.line(), source.position());
        let taken = match source.frame(&mut Element::default(), limits.max_row_bytes)? {
            Framed::Record(end) => {
                let taken = row::take(&source.window()[..end.len], at, limits, out);
                source.consume(end.next);
                taken
            }
            Framed::Rest(len) => {
                source.consume(len);
                return Err(InputError::ArrayUnclosed { at: source.position() });
            }
            Framed::TooLarge(at) => Err(InputError::RowTooLarge { at, limit: limits.max_row_bytes }),
        };
        match taken {
            Ok(row::Taken::Row) => self.pass_delimiter(source).map(|()| line),
            Ok(row::Taken::Blank) => {
                Err(InputError::Json { at, field: Default::default(), fault: Fault::Expected("a value") })
            }
            // The row is refused; the array goes on after it, unless the error is final.
            Err(error) => self.pass_delimiter(source).and(Err(error)),
        }
    }

    /// Passes the comma or bracket that ended an element.
    fn pass_delimiter<R: Read>(&mut self, source: &mut Source<R>) -> Result<(), InputError> {
        *self = match source.skip_blank()? {
            Some(b',') => Self::Comma,
            Some(_) => Self::Closed,
            None => return Err(InputError::ArrayUnclosed { at: source.position() }),
        };
        source.consume(1);
        Ok(())
    }
}

/// Whether an array cannot be read on after `error`: where text is not JSON, its brackets cannot be trusted.
pub(super) fn is_final(error: &InputError) -> bool {
    match error {
        InputError::Json { fault, .. } => fault.is_syntax(),
        InputError::Encoding { .. } | InputError::RowTooLarge { .. } | InputError::RowExpands { .. } => false,
        _ => true,
    }
}
