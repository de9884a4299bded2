//! One pass over a row's text: strict JSON (RFC 8259), and only what a jsonb column can hold and give back.

use super::number;
use super::special::find_special;

/// Arrays and objects inside one another that a row may have.
///
/// PostgreSQL's stack holds some ten thousand, but what is stored must also be read: JSON readers stop earlier (serde_json at
/// 127), and on its way to a handler a row is wrapped in a few levels more.
pub const MAX_DEPTH: u32 = 100;

/// What is wrong with a row's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("not JSON: expected {0}")]
    Expected(&'static str),
    #[error("not JSON: the string is not closed")]
    StringUnclosed,
    #[error("not JSON: a control character in a string; write it as an escape, such as \\n or \\u001b")]
    ControlCharacter,
    #[error("not JSON: no such escape; a backslash in a string is written \\\\")]
    Escape,
    #[error("PostgreSQL cannot store the character NUL (\\u0000) in jsonb; remove it")]
    Nul,
    #[error(
        "half of a surrogate pair (\\ud800 to \\udfff without its partner) is no character; write the whole pair or U+FFFD"
    )]
    LoneSurrogate,
    #[error(
        "PostgreSQL cannot hold this number (at most 131072 digits before the decimal point and 16383 after it); send it as a string"
    )]
    NumberRange,
    #[error(
        "arrays and objects are nested deeper than {MAX_DEPTH} levels; flatten the row, or send the inner part as a string"
    )]
    Depth,
}

impl Fault {
    /// Whether the text is not JSON at all, as opposed to JSON that cannot be stored.
    pub fn is_syntax(self) -> bool {
        match self {
            Self::Expected(_) | Self::StringUnclosed | Self::ControlCharacter | Self::Escape => true,
            Self::Nul | Self::LoneSurrogate | Self::NumberRange | Self::Depth => false,
        }
    }
}

/// A fault and the byte it was found at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault} (at byte {})", offset + 1)]
pub struct Refusal {
    pub offset: usize,
    pub fault: Fault,
}

/// Accepts one JSON value that jsonb can hold, or says where and why not.
///
/// Returns by how many bytes PostgreSQL's own text of the value may be longer than its numbers are here: it writes `1e131071` out.
pub fn check(text: &str) -> Result<u64, Refusal> {
    let mut scan = Scan { bytes: text.as_bytes(), at: 0, nest: Nest::default(), expansion: 0 };
    scan.document().map_err(|fault| Refusal { offset: scan.at, fault })?;
    Ok(scan.expansion)
}

/// The arrays and objects that are open, one bit each.
#[derive(Debug, Default)]
struct Nest {
    objects: u128,
    depth: u32,
}

const _: () = assert!(MAX_DEPTH <= u128::BITS);

impl Nest {
    fn open(&mut self, object: bool) -> Result<(), Fault> {
        if self.depth == MAX_DEPTH {
            return Err(Fault::Depth);
        }
        self.objects = self.objects << 1 | u128::from(object);
        self.depth += 1;
        Ok(())
    }

    fn close(&mut self) {
        self.objects >>= 1;
        self.depth -= 1;
    }

    fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }
}

struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    nest: Nest,
    expansion: u64,
}

impl Scan<'_> {
    fn document(&mut self) -> Result<(), Fault> {
        loop {
            if self.value()? && self.close_and_go_on()? {
                return Ok(());
            }
        }
    }

    /// Reads a scalar or an empty container (`true`), or opens one that has content (`false`).
    fn value(&mut self) -> Result<bool, Fault> {
        match self.token() {
            Some(b'"') => self.string()?,
            Some(b'{') => return self.open(true, b'}'),
            Some(b'[') => return self.open(false, b']'),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(b't') => self.literal(b"true")?,
            Some(b'f') => self.literal(b"false")?,
            Some(b'n') => self.literal(b"null")?,
            _ => return Err(Fault::Expected("a value")),
        }
        Ok(true)
    }

    fn open(&mut self, object: bool, closing: u8) -> Result<bool, Fault> {
        self.nest.open(object)?;
        self.at += 1;
        if self.token() == Some(closing) {
            self.at += 1;
            self.nest.close();
            return Ok(true);
        }
        if object {
            self.key()?;
        }
        Ok(false)
    }

    /// After a value: leaves what it ends, up to the next value (`false`) or the end of the text (`true`).
    fn close_and_go_on(&mut self) -> Result<bool, Fault> {
        while self.nest.depth > 0 {
            let object = self.nest.in_object();
            match (self.token(), object) {
                (Some(b','), _) => {
                    self.at += 1;
                    if object {
                        self.key()?;
                    }
                    return Ok(false);
                }
                (Some(b'}'), true) | (Some(b']'), false) => {
                    self.at += 1;
                    self.nest.close();
                }
                (_, true) => return Err(Fault::Expected("`,` or `}`")),
                (_, false) => return Err(Fault::Expected("`,` or `]`")),
            }
        }
        match self.token() {
            None => Ok(true),
            Some(_) => Err(Fault::Expected("the end of the row")),
        }
    }

    fn key(&mut self) -> Result<(), Fault> {
        if self.token() != Some(b'"') {
            return Err(Fault::Expected("a key in double quotes"));
        }
        self.string()?;
        if self.token() != Some(b':') {
            return Err(Fault::Expected("`:`"));
        }
        self.at += 1;
        Ok(())
    }

    /// The next byte that is not whitespace.
    #[inline]
    fn token(&mut self) -> Option<u8> {
        while let Some(byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(*byte);
            }
            self.at += 1;
        }
        None
    }

    fn literal(&mut self, word: &'static [u8]) -> Result<(), Fault> {
        if !self.bytes[self.at..].starts_with(word) {
            return Err(Fault::Expected("a value"));
        }
        self.at += word.len();
        Ok(())
    }

    fn number(&mut self) -> Result<(), Fault> {
        let number = number::read(&self.bytes[self.at..]).map_err(|refusal| {
            self.at += refusal.offset;
            refusal.fault
        })?;
        self.at += number.len;
        self.expansion = self.expansion.saturating_add(number.expansion);
        Ok(())
    }

    fn string(&mut self) -> Result<(), Fault> {
        self.at += 1;
        loop {
            self.at = find_special(self.bytes, self.at);
            match self.bytes.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => self.escape()?,
                Some(0) => return Err(Fault::Nul),
                Some(_) => return Err(Fault::ControlCharacter),
                None => return Err(Fault::StringUnclosed),
            }
        }
        self.at += 1;
        Ok(())
    }

    fn escape(&mut self) -> Result<(), Fault> {
        match self.bytes.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => match self.code_unit(self.at).ok_or(Fault::Escape)? {
                0 => return Err(Fault::Nul),
                0xD800..=0xDBFF => match self.code_unit(self.at + 6) {
                    Some(0xDC00..=0xDFFF) => self.at += 12,
                    _ => return Err(Fault::LoneSurrogate),
                },
                0xDC00..=0xDFFF => return Err(Fault::LoneSurrogate),
                _ => self.at += 6,
            },
            _ => return Err(Fault::Escape),
        }
        Ok(())
    }

    /// The value of a `\uXXXX` that stands at `at`.
    fn code_unit(&self, at: usize) -> Option<u32> {
        let digits = self.bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
        digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | (*digit as char).to_digit(16)?))
    }
}
