//! What holds for any bytes of a driver and any of a server, in whatever pieces they come.

use super::{HEAD, Unnamed, head_of, string};
use bytes::BytesMut;

/// The first byte says how large the pieces are, the second how much of the rest the driver wrote; the server sent the rest.
pub(crate) fn both_ways(bytes: &[u8]) {
    let [piece, share, bytes @ ..] = bytes else { return };
    let (written, sent) = bytes.split_at(bytes.len() * usize::from(*share) / 255);
    let (mut whole, mut cut) = (Unnamed::default(), Unnamed::default());
    let (mut to_server, mut to_driver) = (BytesMut::new(), BytesMut::new());
    whole.outgoing(written, &mut to_server);
    whole.incoming(sent, &mut to_driver);
    let (mut to_server_cut, mut to_driver_cut) = (BytesMut::new(), BytesMut::new());
    let piece = usize::from(*piece % 32) + 1;
    written.chunks(piece).for_each(|piece| cut.outgoing(piece, &mut to_server_cut));
    sent.chunks(piece).for_each(|piece| cut.incoming(piece, &mut to_driver_cut));
    assert_eq!((&to_server, &to_driver), (&to_server_cut, &to_driver_cut), "the pieces change nothing");
    assert_eq!(whole.owed, cut.owed);
    has_no_names(&to_server, written);
    assert!(to_driver.len() <= sent.len(), "the driver sees nothing that the server has not sent");
}

/// Of the statements that a server gets, none has a name.
fn has_no_names(to_server: &[u8], written: &[u8]) {
    let Some(start) = written.first_chunk::<4>() else { return };
    let Some(mut rest) = to_server.get(u32::from_be_bytes(*start) as usize..) else { return };
    while let Some((tag, length)) = head_of(rest) {
        assert!(rest.len() >= length, "messages are sent whole");
        let body = &rest[HEAD..length];
        let name = match tag {
            b'P' => Some(string(body).0),
            b'B' => Some(string(string(body).1).0),
            b'D' | b'C' if body.first() == Some(&b'S') => Some(string(&body[1..]).0),
            _ => None,
        };
        assert!(name.is_none_or(<[u8]>::is_empty), "a statement has a name: {body:?}");
        rest = &rest[length..];
    }
    assert!(rest.is_empty(), "messages are sent whole");
}
