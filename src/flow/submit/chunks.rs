//! Rows cut into chunks, in the binary form of COPY. A row is appended where it will be sent from, and never copied again.
//!
//! A chunk is the text of consecutive rows with a line feed between two of them. It closes at [`LINES`] rows, or with the row
//! that brings it to [`BYTES`].

use super::read::Gather;
use bytes::Bytes;
use sha2::{Digest, Sha256};

#[cfg(test)]
mod tests;

/// Rows that a chunk has at most.
pub(super) const LINES: i32 = 500;
/// Bytes from which on a chunk takes no more rows.
pub(super) const BYTES: usize = 256 << 10;
/// Sent on when it holds this much.
const MESSAGE: usize = 256 << 10;
/// What a message of small rows needs: the chunk that fills it goes over.
const CAPACITY: usize = MESSAGE + (64 << 10);
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";

/// Where the chunks are copied to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// `(batch_id, first_line, last_line, inputs)`.
    Batch(i64),
    /// `(first_line, last_line, inputs)`: lines are counted from 1, and shifted when they are added to their batch.
    Staged,
}

/// The chunk that takes rows, by its places in the message.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Where its tuple begins.
    tuple: usize,
    /// Where its text begins, right behind the last line and the length of the text.
    text: usize,
    lines: i32,
}

#[derive(Debug)]
pub(super) struct Chunks {
    target: Target,
    message: Vec<u8>,
    open: Option<Open>,
    /// Rows of the chunks that are closed.
    closed_lines: i32,
    /// Over every row and a line feed behind it. No row has one, so other rows are another text.
    hash: Option<Sha256>,
}

impl Chunks {
    /// `hash` is what the rows are hashed onto, where they are to be hashed.
    pub(super) fn new(target: Target, hash: Option<Sha256>) -> Self {
        let mut message = Vec::with_capacity(CAPACITY);
        message.extend_from_slice(SIGNATURE);
        message.extend_from_slice(&0_i32.to_be_bytes()); // flags
        message.extend_from_slice(&0_i32.to_be_bytes()); // length of the header's extension
        Self { target, message, open: None, closed_lines: 0, hash }
    }

    fn begin(&mut self) -> Open {
        let tuple = self.message.len();
        match self.target {
            Target::Batch(id) => {
                self.message.extend_from_slice(&4_i16.to_be_bytes());
                self.message.extend_from_slice(&8_i32.to_be_bytes());
                self.message.extend_from_slice(&id.to_be_bytes());
            }
            Target::Staged => self.message.extend_from_slice(&3_i16.to_be_bytes()),
        }
        // The last line and the length of the text are written when the chunk closes.
        for number in [4, self.closed_lines + 1, 4, 0, 0] {
            self.message.extend_from_slice(&number.to_be_bytes());
        }
        Open { tuple, text: self.message.len(), lines: 0 }
    }

    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        if let Some(hash) = &mut self.hash {
            hash.update(&self.message[open.text..]);
        }
        // Behind the last row stands no line feed.
        self.message.pop();
        self.closed_lines += open.lines;
        let length = (self.message.len() - open.text) as i32;
        self.message[open.text - 8..open.text - 4].copy_from_slice(&self.closed_lines.to_be_bytes());
        self.message[open.text - 4..open.text].copy_from_slice(&length.to_be_bytes());
    }
}

impl Gather for Chunks {
    type Message = Bytes;

    fn next_row(&mut self) -> &mut Vec<u8> {
        if self.open.is_none() {
            self.open = Some(self.begin());
        }
        &mut self.message
    }

    fn end_row(&mut self) -> Option<Bytes> {
        let open = self.open.as_mut()?;
        open.lines += 1;
        let is_full = open.lines == LINES || self.message.len() - open.text >= BYTES;
        self.message.push(b'\n');
        if !is_full {
            return None;
        }
        self.close();
        (self.message.len() >= MESSAGE)
            .then(|| std::mem::replace(&mut self.message, Vec::with_capacity(CAPACITY)).into())
    }

    fn finish(mut self) -> (Bytes, Option<[u8; 32]>) {
        match self.open {
            Some(Open { tuple, lines: 0, .. }) => self.message.truncate(tuple),
            Some(_) => self.close(),
            None => {}
        }
        self.message.extend_from_slice(&(-1_i16).to_be_bytes());
        (self.message.into(), self.hash.map(|hash| hash.finalize().into()))
    }
}
