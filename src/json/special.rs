//! The one search that reading and writing JSON strings share: most bytes need no look of their own.

/// The first byte from `at` on that a JSON string cannot hold as it is: a quote, a backslash or a control character.
#[inline]
pub(crate) fn find_special(bytes: &[u8], mut at: usize) -> usize {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGHS: u64 = ONES << 7;
    // Eight bytes at a time. A borrow can only raise a false alarm above a true one, and the lowest is taken.
    while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        let word = u64::from_le_bytes(*chunk);
        let quote = word ^ (ONES * b'"' as u64);
        let slash = word ^ (ONES * b'\\' as u64);
        let hits = (word.wrapping_sub(ONES * 0x20) & !word)
            | (quote.wrapping_sub(ONES) & !quote)
            | (slash.wrapping_sub(ONES) & !slash);
        if hits & HIGHS != 0 {
            return at + ((hits & HIGHS).trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    let tail = bytes.get(at..).unwrap_or_default();
    at + tail.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..0x20)).unwrap_or(tail.len())
}
