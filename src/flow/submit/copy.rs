//! Rows in the binary form of COPY, written without a detour through values.

use bytes::{BufMut, Bytes, BytesMut};

/// Sent on when it holds this much.
const FULL: usize = 256 << 10;
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";
const JSONB_VERSION: u8 = 1;

/// `COPY musterd.rows (batch_id, line, input)`.
pub(super) struct Buffer {
    batch: i64,
    bytes: BytesMut,
}

impl Buffer {
    pub(super) fn new(batch: i64) -> Self {
        let mut bytes = BytesMut::with_capacity(FULL * 2);
        bytes.put_slice(SIGNATURE);
        bytes.put_i32(0); // flags
        bytes.put_i32(0); // length of the header's extension
        Self { batch, bytes }
    }

    pub(super) fn push(&mut self, line: i32, json: &[u8]) {
        self.bytes.put_i16(3);
        self.bytes.put_i32(8);
        self.bytes.put_i64(self.batch);
        self.bytes.put_i32(4);
        self.bytes.put_i32(line);
        self.bytes.put_i32(json.len() as i32 + 1);
        self.bytes.put_u8(JSONB_VERSION);
        self.bytes.put_slice(json);
    }

    pub(super) fn take_if_full(&mut self) -> Option<Bytes> {
        (self.bytes.len() >= FULL).then(|| {
            let taken = self.bytes.split().freeze();
            self.bytes.reserve(FULL * 2);
            taken
        })
    }

    /// What is left, with the mark that nothing follows.
    pub(super) fn finish(mut self) -> Bytes {
        self.bytes.put_i16(-1);
        self.bytes.freeze()
    }
}
