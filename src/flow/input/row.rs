//! The gate that every JSON row passes: UTF-8, strict JSON, storable, and within the limits.

use super::error::{Field, Position, SourceLine};
use super::{InputError, Limits, json};

/// What a piece of the source was.
#[derive(Debug)]
pub(super) enum Taken {
    Row,
    Blank,
}

/// Copies the row that stands in `bytes`, whitespace around it left out, if it may be stored.
pub(super) fn take(
    bytes: &[u8],
    at: Position,
    limits: Limits,
    out: &mut Vec<u8>,
) -> Result<Taken, InputError> {
    let Some(first) = bytes.iter().position(|byte| !is_blank(byte)) else { return Ok(Taken::Blank) };
    let last = bytes.iter().rposition(|byte| !is_blank(byte)).unwrap_or(first);
    let at = at.after(&bytes[..first]);
    let bytes = &bytes[first..=last];

    let text = str::from_utf8(bytes).map_err(|error| InputError::Encoding {
        at: at.after(&bytes[..error.valid_up_to()]),
        field: Field::default(),
    })?;
    let expansion = json::check(text).map_err(|refusal| InputError::Json {
        at: at.after(&bytes[..refusal.offset]),
        field: Field::default(),
        fault: refusal.fault,
    })?;
    fits(bytes.len(), expansion, SourceLine(at.line), limits)?;
    out.extend_from_slice(bytes);
    Ok(Taken::Row)
}

/// Holds a row to the size limit, as it came and as PostgreSQL will write it.
///
/// Numbers such as 1e131071 take a few bytes in a jsonb and 131072 in its text. A megabyte of them can be stored and never be
/// read again: its text would pass the gigabyte that PostgreSQL allows.
fn fits(len: usize, expansion: u64, at: SourceLine, limits: Limits) -> Result<(), InputError> {
    let limit = limits.max_row_bytes;
    if len > limit {
        return Err(InputError::RowTooLarge { at, limit });
    }
    if expansion.saturating_add(len as u64) > limit as u64 {
        return Err(InputError::RowExpands { at, limit });
    }
    Ok(())
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}
