//! A JSON number is accepted when PostgreSQL's numeric holds it: its limits are on digits written out, not on precision.

use super::check::{Fault, Refusal};

/// Digits before the decimal point that numeric holds.
const MAX_WHOLE: i64 = 131_072;
/// Digits after the decimal point that numeric holds; trailing zeros count, also those of a zero.
const MAX_SCALE: i64 = 16_383;
/// From here on numeric refuses an exponent, even that of a zero.
const MAX_EXPONENT: i64 = (i32::MAX / 2) as i64;

/// A number that numeric holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    /// How many bytes of the text it takes.
    pub(crate) len: usize,
    /// How many more bytes it takes once its exponent is written out.
    pub(crate) expansion: u64,
}

/// Reads the number at the start of `text`, up to the first byte that is no part of it.
#[inline]
pub(crate) fn read(text: &[u8]) -> Result<Number, Refusal> {
    // Most numbers are a few digits and nothing else.
    let len = digits(text, 0);
    let is_plain = (1..=MAX_WHOLE as usize).contains(&len)
        && (len == 1 || text[0] != b'0')
        && !matches!(text.get(len), Some(b'.' | b'e' | b'E'));
    if is_plain { Ok(Number { len, expansion: 0 }) } else { read_any(text) }
}

fn read_any(text: &[u8]) -> Result<Number, Refusal> {
    let syntax = |offset, what| Refusal { offset, fault: Fault::Expected(what) };
    let sign = usize::from(text.first() == Some(&b'-'));
    let whole = digits(text, sign);
    let mut at = sign + whole;
    if whole == 0 {
        return Err(syntax(at, "a digit"));
    }
    if whole > 1 && text[sign] == b'0' {
        return Err(syntax(sign, "a number without leading zeros"));
    }

    let mut scale = 0;
    if text.get(at) == Some(&b'.') {
        scale = digits(text, at + 1);
        at += 1 + scale;
        if scale == 0 {
            return Err(syntax(at, "a digit after the decimal point"));
        }
    }
    let coefficient = &text[sign..at];
    let exponent = match text.get(at) {
        Some(b'e' | b'E') => {
            let (len, exponent) = exponent(&text[at + 1..]);
            at += 1 + len;
            Some(exponent.ok_or(syntax(at, "a digit in the exponent"))?)
        }
        _ => None,
    };
    let written = written(coefficient, whole, scale, exponent.unwrap_or(0))
        .ok_or(Refusal { offset: 0, fault: Fault::NumberRange })?;
    let expansion = if exponent.is_some() { (written + sign as u64).saturating_sub(at as u64) } else { 0 };
    Ok(Number { len: at, expansion })
}

/// How many bytes the number takes when it is written out without its sign, or `None` if numeric does not hold it.
fn written(coefficient: &[u8], whole: usize, scale: usize, exponent: i64) -> Option<u64> {
    if exponent.abs() >= MAX_EXPONENT {
        return None;
    }
    let scale = (scale as i64 - exponent).max(0);
    let whole = match coefficient.iter().position(|byte| matches!(byte, b'1'..=b'9')) {
        // A zero has no digits to place, whatever its exponent.
        None => 1,
        Some(first) if first < whole => whole as i64 + exponent,
        // In a fraction the zeros before its first digit shift it back; `first` counts the point as one more.
        Some(first) => exponent - (first as i64 - whole as i64 - 1),
    };
    if scale > MAX_SCALE || whole > MAX_WHOLE {
        return None;
    }
    // A fraction has its point, and a zero before it.
    Some((whole.max(1) + scale + i64::from(scale > 0)) as u64)
}

/// The bytes an exponent takes, and its value if it has one; a huge one is only huge.
fn exponent(text: &[u8]) -> (usize, Option<i64>) {
    let signed = usize::from(matches!(text.first(), Some(b'+' | b'-')));
    let count = digits(text, signed);
    let size = text[signed..signed + count]
        .iter()
        .fold(0_i64, |size, digit| size.saturating_mul(10).saturating_add(i64::from(digit - b'0')));
    let value = if text.first() == Some(&b'-') { -size } else { size };
    (signed + count, (count > 0).then_some(value))
}

#[inline]
fn digits(text: &[u8], from: usize) -> usize {
    text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_ends_where_it_ends() {
        for (text, len) in [("0", 1), ("-0.0,", 4), ("12]", 2), ("1.5e+3 ", 6), ("7E-2}", 4)] {
            assert_eq!(read(text.as_bytes()).unwrap().len, len, "{text}");
        }
    }

    #[test]
    fn a_malformed_number_says_which_digit_is_missing() {
        for (text, offset) in
            [("-", 1), ("-x", 1), ("1.", 2), ("1.e5", 2), ("1e", 2), ("1e+", 3), ("01", 0), ("-01", 1)]
        {
            let refusal = read(text.as_bytes()).unwrap_err();
            assert_eq!(refusal.offset, offset, "{text}");
            assert!(refusal.fault.is_syntax(), "{text}");
        }
    }

    #[test]
    fn an_exponent_is_charged_for_the_digits_it_stands_for() {
        for (text, written) in [
            ("1e131071", 131_072),
            ("-1e131071", 131_073),
            ("1e-16383", 2 + 16_383),
            ("-12.5e1", 4),
            ("-12.5e3", 6),
            ("15e-3", 5),
            ("0.001e9", 7),
            ("0e-3", 5),
        ] {
            let expansion = read(text.as_bytes()).unwrap().expansion;
            assert_eq!(text.len() as u64 + expansion, written.max(text.len() as u64), "{text}");
        }
        assert_eq!(read(b"0e400000").unwrap().expansion, 0);
        assert_eq!(read(b"12345.678").unwrap().expansion, 0);
    }
}
