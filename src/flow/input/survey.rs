//! A dry run: reads all of a source and lists everything that is wrong with it, up to a number of errors.

use std::io::Read;

use super::{InputError, Reader};

/// What a source holds.
#[derive(Debug, Default)]
pub struct Survey {
    /// Rows that would be submitted.
    pub rows: u64,
    /// Bytes of their JSON text.
    pub row_bytes: u64,
    /// Bytes of the source.
    pub bytes_read: u64,
    /// The first errors, in the source's order.
    pub errors: Vec<InputError>,
    /// Errors beyond those; they are counted and not kept.
    pub more_errors: u64,
    /// Whether an error ended the reading before the source did, so that there may be more of them.
    pub stopped: bool,
}

impl Survey {
    /// Whether the source would be submitted as it is.
    pub fn is_clean(&self) -> bool {
        self.errors.is_empty() && self.more_errors == 0
    }
}

/// Reads what is left of `reader`, keeping the first `max_errors` errors.
pub fn survey<R: Read>(reader: &mut Reader<R>, max_errors: usize) -> Survey {
    let mut survey = Survey::default();
    let mut row = Vec::new();
    loop {
        match reader.next_row(&mut row) {
            Ok(Some(_)) => {
                survey.rows += 1;
                survey.row_bytes += row.len() as u64;
            }
            Ok(None) => break,
            Err(InputError::Stopped) => {
                survey.stopped = true;
                break;
            }
            Err(error) if survey.errors.len() < max_errors => survey.errors.push(error),
            Err(_) => survey.more_errors += 1,
        }
    }
    survey.bytes_read = reader.bytes_read();
    survey
}
