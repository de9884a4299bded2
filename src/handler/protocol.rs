//! `muster/1`: what `http` and `exec` handlers are sent and what they answer. One module for both.
//!
//! The contract is docs/protocol.md with its JSON Schemas. Inputs, payloads and results are passed through as the text
//! they are, never parsed and printed again. What is wrong with a reply concerns the rows it is wrong about, and no others.

mod assign;
mod reply;
mod request;

pub use assign::{Leftovers, assign};
pub use reply::{BadReply, RowsReply, has_outcome, names_request, read_row, read_rows, read_task};
pub use request::{RowLines, request_key, rows_request, task_request};

/// The protocol's name and version, in every request.
pub const VERSION: &str = "muster/1";

/// The most a handler's own words may take in a row's error.
const LONGEST_QUOTE: usize = 500;

/// The beginning of what a handler wrote, fit for an error message.
pub fn quote(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(LONGEST_QUOTE)];
    let text = String::from_utf8_lossy(cut);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let text = text.trim();
    if bytes.len() > LONGEST_QUOTE { format!("{text}…") } else { text.to_owned() }
}

#[cfg(test)]
mod tests;
