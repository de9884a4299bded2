//! The pass itself: one loop, no recursion, no allocation.

use super::{
    check::{Fault, MAX_DEPTH, Refusal, is_blank},
    number,
    special::find_special,
};

/// What a text that passed was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    /// Where the value begins and ends; around it are only blanks.
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Blanks between its tokens.
    blanks: usize,
    /// Bytes of the text that PostgreSQL writes for it, at most: a space after every `,` and `:`, no other blanks, and all
    /// exponents written out.
    pub(crate) printed: u64,
}

impl Passed {
    /// By how many bytes PostgreSQL's text of the value may be longer than `len`.
    pub(crate) fn expansion(&self, len: usize) -> u64 {
        self.printed.saturating_sub(len as u64)
    }

    /// Whether a line of it ends before the value does. What passed has line ends only between its tokens.
    pub(super) fn spans_lines(&self, value: &[u8]) -> bool {
        self.blanks > 0 && memchr::memchr2(b'\n', b'\r', value).is_some()
    }
}

/// Reads UTF-8 that is one JSON value with blanks around it.
pub(crate) fn scan(bytes: &[u8]) -> Result<Passed, Refusal> {
    let mut scan = Scan { bytes, at: 0, blanks: 0, nest: Nest::default(), growth: 0 };
    scan.passed().map_err(|fault| Refusal { offset: scan.at, fault })
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
    /// Blanks passed so far.
    blanks: usize,
    nest: Nest,
    /// What PostgreSQL adds when it writes the value: spaces and digits.
    growth: u64,
}

impl Scan<'_> {
    fn passed(&mut self) -> Result<Passed, Fault> {
        self.token();
        let start = self.at;
        loop {
            if self.value()? && self.close_and_go_on()? {
                break;
            }
        }
        let (end, blanks) = (self.at, self.blanks - start);
        if self.token().is_some() {
            return Err(Fault::Expected("the end of the row"));
        }
        let printed = ((end - start - blanks) as u64).saturating_add(self.growth);
        Ok(Passed { start, end, blanks, printed })
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

    /// After a value: leaves what it ends, up to the next value (`false`) or the end of the outermost one (`true`).
    fn close_and_go_on(&mut self) -> Result<bool, Fault> {
        while self.nest.depth > 0 {
            let object = self.nest.in_object();
            match (self.token(), object) {
                (Some(b','), _) => {
                    self.at += 1;
                    self.growth += 1;
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
        Ok(true)
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
        self.growth += 1;
        Ok(())
    }

    /// The next byte that is not a blank.
    #[inline]
    fn token(&mut self) -> Option<u8> {
        match self.bytes.get(self.at) {
            Some(byte) if *byte > b' ' => Some(*byte),
            _ => self.token_after_blanks(),
        }
    }

    fn token_after_blanks(&mut self) -> Option<u8> {
        let rest = self.bytes.get(self.at..)?;
        let blanks = rest.iter().take_while(|byte| is_blank(byte)).count();
        self.at += blanks;
        self.blanks += blanks;
        rest.get(blanks).copied()
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
        self.growth = self.growth.saturating_add(number.expansion);
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
