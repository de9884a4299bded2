//! One pass over a row's text: strict JSON (RFC 8259), and only what a jsonb column can hold and give back.

use std::borrow::Cow;

pub(crate) use super::scan::{Passed, scan};

/// Arrays and objects inside one another that a row may have.
///
/// PostgreSQL's stack holds some ten thousand, but what is stored must also be read: JSON readers stop earlier (serde_json at
/// 127), and on its way to a handler a row is wrapped in a few levels more.
pub const MAX_DEPTH: u32 = 100;

/// Bytes that a value may have, as it is and as PostgreSQL writes it, whatever limit is configured.
///
/// jsonb holds 16,777,216 elements in an array and 268,435,455 bytes in all, and the shortest text for an element (`1,`) is two
/// bytes that become twelve: below this size no text reaches either.
pub const LARGEST: usize = 32 << 20;

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
    #[error(
        "more than {LARGEST} bytes, with its exponents written out; PostgreSQL could not hold it or give it back"
    )]
    Size,
}

impl Fault {
    /// Whether the text is not JSON at all, as opposed to JSON that cannot be stored.
    pub fn is_syntax(self) -> bool {
        match self {
            Self::Expected(_) | Self::StringUnclosed | Self::ControlCharacter | Self::Escape => true,
            Self::Nul | Self::LoneSurrogate | Self::NumberRange | Self::Depth | Self::Size => false,
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

/// A JSON value as it is stored: one line of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneLine<'a> {
    /// The value, without blanks around it; line ends between its tokens have become spaces.
    pub text: Cow<'a, str>,
    /// By how many bytes PostgreSQL's own text of it may be longer: it writes `1e131071` out.
    pub expansion: u64,
}

/// Accepts one JSON value that jsonb can hold and give back, and makes one line of it; or says where and why not.
pub fn one_line(text: &str) -> Result<OneLine<'_>, Refusal> {
    let passed = scan_within_reason(text)?;
    let expansion = passed.expansion(passed.end - passed.start);
    let value = &text[passed.start..passed.end];
    let text = match passed.spans_lines(value.as_bytes()) {
        true => Cow::Owned(value.replace(['\n', '\r'], " ")),
        false => Cow::Borrowed(value),
    };
    Ok(OneLine { text, expansion })
}

/// Accepts one JSON value that jsonb can hold and give back, or says where and why not.
///
/// Returns by how many bytes PostgreSQL's own text of the value may be longer than this one.
pub fn check(text: &str) -> Result<u64, Refusal> {
    scan_within_reason(text).map(|passed| passed.expansion(text.len()))
}

fn scan_within_reason(text: &str) -> Result<Passed, Refusal> {
    let too_large = Refusal { offset: 0, fault: Fault::Size };
    if text.len() > LARGEST {
        return Err(too_large);
    }
    let passed = scan(text.as_bytes())?;
    if passed.printed > LARGEST as u64 { Err(too_large) } else { Ok(passed) }
}

/// What may stand between two tokens.
pub(crate) fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Appends a value that passed to `out`, with spaces for its line ends.
pub(crate) fn push_as_one_line(value: &[u8], passed: &Passed, out: &mut Vec<u8>) {
    match passed.spans_lines(value) {
        true => out.extend(value.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte })),
        false => out.extend_from_slice(value),
    }
}

#[cfg(test)]
mod tests;
