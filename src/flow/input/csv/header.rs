//! The header row: every column has a name of its own, and brings the JSON that goes before its values.

use std::collections::HashMap;

use super::super::InputError;
use super::super::error::{Field, Position, SourceLine};
use super::Flaw;
use super::record::{Piece, Record};

#[derive(Debug)]
pub(super) struct Column {
    pub(super) name: String,
    /// All that stands between the previous value's closing quote and this value's text.
    pub(super) opening: Vec<u8>,
}

pub(super) fn read(bytes: &[u8], at: Position, record: &Record) -> Result<Vec<Column>, InputError> {
    let field = Field::default();
    let text = str::from_utf8(bytes).map_err(|error| InputError::Encoding {
        at: at.after(&bytes[..error.valid_up_to()]),
        field: field.clone(),
    })?;
    let line = SourceLine(at.line);
    let mut first_seen: HashMap<String, usize> = HashMap::new();
    let mut columns: Vec<Column> = Vec::with_capacity(record.pieces().len());
    for (index, piece) in record.pieces().iter().enumerate() {
        let number = index + 1;
        let name = name(text, piece, record.quote());
        if name.trim().is_empty() {
            return Err(InputError::HeaderUnnamed { at: line, column: number });
        }
        if let Some(first) = first_seen.insert(name.clone(), number) {
            return Err(InputError::HeaderTwice { at: line, column: number, first, name });
        }
        let opening = opening(bytes, piece, record.quote(), index == 0)
            .map_err(|(offset, flaw)| flaw.error(at.after(&bytes[..offset]), field.clone()))?;
        columns.push(Column { name, opening });
    }
    Ok(columns)
}

fn name(text: &str, piece: &Piece, quote: u8) -> String {
    let name = &text[piece.start..piece.end];
    let quote = char::from(quote).to_string();
    if piece.doubled { name.replace(&quote.repeat(2), &quote) } else { name.to_owned() }
}

fn opening(record: &[u8], piece: &Piece, quote: u8, first: bool) -> Result<Vec<u8>, (usize, Flaw)> {
    let mut opening = if first { b"{\"".to_vec() } else { b",\"".to_vec() };
    piece.write(record, quote, &mut opening)?;
    opening.extend_from_slice(b"\":\"");
    Ok(opening)
}
