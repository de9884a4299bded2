//! The gate that every JSON row passes: UTF-8, strict JSON, storable, and within the limits.

use super::error::{Field, Position, SourceLine};
use super::{InputError, Limits};
use crate::json::check;

/// What a piece of the source was.
#[derive(Debug)]
pub(super) enum Taken {
    Row,
    Blank,
}

/// Appends the row that stands in `bytes` as one line, without the blanks around it, if it may be stored.
pub(super) fn take(
    bytes: &[u8],
    at: Position,
    limits: Limits,
    out: &mut Vec<u8>,
) -> Result<Taken, InputError> {
    if bytes.iter().all(check::is_blank) {
        return Ok(Taken::Blank);
    }
    if let Err(error) = str::from_utf8(bytes) {
        let at = at.after(&bytes[..error.valid_up_to()]);
        return Err(InputError::Encoding { at, field: Field::default() });
    }
    let passed = check::scan(bytes).map_err(|refusal| InputError::Json {
        at: at.after(&bytes[..refusal.offset]),
        field: Field::default(),
        fault: refusal.fault,
    })?;
    let value = &bytes[passed.start..passed.end];
    fits(value.len(), passed.printed, SourceLine(at.line), limits)?;
    check::push_as_one_line(value, &passed, out);
    Ok(Taken::Row)
}

/// Holds a row to the size limit, as it is stored and as PostgreSQL will write it.
///
/// Numbers such as 1e131071 take a few bytes in a jsonb and 131072 in its text. A megabyte of them can be stored and never be
/// read again: its text would pass the gigabyte that PostgreSQL allows.
pub(super) fn fits(len: usize, printed: u64, at: SourceLine, limits: Limits) -> Result<(), InputError> {
    let limit = limits.max_row_bytes;
    if len > limit {
        return Err(InputError::RowTooLarge { at, limit });
    }
    if printed > limit as u64 {
        return Err(InputError::RowExpands { at, limit });
    }
    Ok(())
}
