//! Readers that give what a test needs and then do what it wants to see.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::Notify;

pub(super) const MIB: u64 = 1 << 20;

/// What a source does when it has given its bytes.
pub(super) enum Then {
    End,
    Fail,
    /// Tells the test, and never gives anything again.
    Stall(Arc<Notify>),
}

/// `length` bytes that differ from place to place, so that a part in the wrong place is seen.
pub(super) struct Source {
    given: u64,
    length: u64,
    then: Then,
}

impl Source {
    pub(super) fn new(length: u64, then: Then) -> Self {
        Self { given: 0, length, then }
    }
}

pub(super) fn byte_at(place: u64) -> u8 {
    (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

impl AsyncRead for Source {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let count = (self.length - self.given).min(out.remaining() as u64);
        if count == 0 {
            return match &self.then {
                Then::End => Poll::Ready(Ok(())),
                Then::Fail => Poll::Ready(Err(io::Error::other("the cursor broke"))),
                Then::Stall(reached) => {
                    reached.notify_one();
                    Poll::Pending
                }
            };
        }
        let piece: Vec<u8> = (self.given..self.given + count).map(byte_at).collect();
        out.put_slice(&piece);
        self.given += count;
        Poll::Ready(Ok(()))
    }
}
