//! Prepared statements without their names, for a pooler in transaction mode.
//!
//! The driver prepares by name and uses the name later; behind such a pooler "later" is another server session, which
//! does not know it, or knows another client's. So the names stay on this side: every use of a statement is sent together
//! with its text, as the unnamed one, and the acknowledgement that the driver does not expect is taken out of the answers. All
//! of it happens within one message group (up to its Sync), which no pooler takes apart.
//!
//! Pure bookkeeping over the bytes of one connection; `wire` moves them.

use bytes::{Buf, BufMut, BytesMut};
use std::collections::{HashMap, VecDeque};

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;

/// A tag and the four bytes of the length.
const HEAD: usize = 5;
/// Made ready for the rest of a message; what a head says is believed when the bytes are there.
const RESERVED: usize = 1 << 20;

/// What the answers still owe us, in order.
#[derive(Debug, PartialEq, Eq)]
enum Owed {
    /// An acknowledgement of Parse, of the statement with this name, that the driver waits for.
    Parsed(Vec<u8>),
    /// One that it knows nothing of.
    ParsedAgain,
    /// The end of a message group, asked for by Sync.
    Synced,
    /// The end of a simple query.
    Queried,
}

/// The translation of one connection, both ways.
#[derive(Debug, Default)]
pub(super) struct Unnamed {
    /// The first message has no tag.
    started: bool,
    /// What the driver has written and is not a whole message yet.
    partial: BytesMut,
    /// Text and parameter types of every statement it has a name for.
    known: HashMap<Vec<u8>, Vec<u8>>,
    /// The statement that is the unnamed one in the group being written.
    current: Option<Vec<u8>>,
    owed: VecDeque<Owed>,
    /// Syncs that a server taking in a COPY passes over.
    passed_over: usize,
    /// Bytes of an answer that are passed on unseen.
    passing: usize,
    /// An answer's head, as far as it has come.
    head: BytesMut,
}

impl Unnamed {
    /// Takes what the driver wrote; puts what the server is to get to `out`.
    pub(super) fn outgoing(&mut self, written: &[u8], out: &mut BytesMut) {
        self.partial.extend_from_slice(written);
        if !self.started {
            let Some(length) = self.partial.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes)) else {
                return;
            };
            if self.partial.len() < length as usize {
                return;
            }
            out.put(self.partial.split_to(length as usize));
            self.started = true;
        }
        while let Some((tag, length)) = head_of(&self.partial) {
            if self.partial.len() < length {
                self.partial.reserve((length - self.partial.len()).min(RESERVED));
                return;
            }
            let message = self.partial.split_to(length);
            self.rewrite(tag, &message, out);
        }
    }

    fn rewrite(&mut self, tag: u8, message: &[u8], out: &mut BytesMut) {
        let body = &message[HEAD..];
        match tag {
            b'P' => {
                let (name, rest) = string(body);
                self.owed.push_back(Owed::Parsed(name.to_vec()));
                self.current = Some(name.to_vec());
                if !name.is_empty() {
                    self.known.insert(name.to_vec(), rest.to_vec());
                }
                send(b'P', &[b"\0", rest], out);
            }
            b'B' => {
                let (portal, rest) = string(body);
                let (name, rest) = string(rest);
                self.recall(name, out);
                send(b'B', &[portal, b"\0\0", rest], out);
            }
            b'D' | b'C' if body.first() == Some(&b'S') => {
                let (name, _) = string(&body[1..]);
                match tag {
                    b'D' => self.recall(name, out),
                    // Closing the unnamed statement, wherever it goes, takes nothing from any client.
                    _ => drop(self.known.remove(name)),
                }
                send(tag, &[b"S\0"], out);
            }
            b'S' => {
                match self.passed_over {
                    0 => self.owed.push_back(Owed::Synced),
                    _ => self.passed_over -= 1,
                }
                self.current = None;
                out.put(message);
            }
            b'Q' => {
                self.owed.push_back(Owed::Queried);
                self.current = None;
                out.put(message);
            }
            _ => out.put(message),
        }
    }

    /// Makes the statement of this name the unnamed one of the group.
    fn recall(&mut self, name: &[u8], out: &mut BytesMut) {
        if name.is_empty() || self.current.as_deref() == Some(name) {
            return;
        }
        // Without its text the server is asked as the driver asked, and answers that there is no such statement.
        if let Some(text) = self.known.get(name) {
            send(b'P', &[b"\0", text], out);
            self.owed.push_back(Owed::ParsedAgain);
            self.current = Some(name.to_vec());
        }
    }

    /// Takes what the server sent; puts what the driver is to see to `out`.
    pub(super) fn incoming(&mut self, mut sent: &[u8], out: &mut BytesMut) {
        while !sent.is_empty() {
            if self.passing > 0 {
                let some = self.passing.min(sent.len());
                out.put(&sent[..some]);
                sent.advance(some);
                self.passing -= some;
                continue;
            }
            let some = (HEAD - self.head.len()).min(sent.len());
            self.head.extend_from_slice(&sent[..some]);
            sent.advance(some);
            if let Some((tag, length)) = head_of(&self.head) {
                self.passing = length - HEAD;
                if self.is_for_the_driver(tag) {
                    out.put(&self.head[..]);
                }
                self.head.clear();
            }
        }
    }

    fn is_for_the_driver(&mut self, tag: u8) -> bool {
        match tag {
            b'1' => self.owed.pop_front() != Some(Owed::ParsedAgain),
            b'Z' => {
                // After an error the rest of the group is never acknowledged, and the driver has no use for its statements.
                while let Some(owed) = self.owed.pop_front() {
                    match owed {
                        Owed::Synced | Owed::Queried => break,
                        Owed::Parsed(name) => drop(self.known.remove(&name)),
                        Owed::ParsedAgain => {}
                    }
                }
                true
            }
            b'G' => {
                // The Sync behind the COPY's beginning is passed over; the one behind its end is answered.
                match self.owed.iter().position(|owed| matches!(owed, Owed::Synced | Owed::Queried)) {
                    Some(at) if self.owed[at] == Owed::Synced => drop(self.owed.remove(at)),
                    Some(_) => {}
                    None => self.passed_over += 1,
                }
                true
            }
            _ => true,
        }
    }
}

/// The tag and the whole length of the message that begins here, once its head is there.
fn head_of(bytes: &[u8]) -> Option<(u8, usize)> {
    let head = bytes.first_chunk::<HEAD>()?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    Some((head[0], 1 + (length as usize).max(4)))
}

/// What is before the next NUL and what is behind it.
fn string(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = memchr::memchr(0, bytes).unwrap_or(bytes.len());
    (&bytes[..end], bytes.get(end + 1..).unwrap_or_default())
}

fn send(tag: u8, parts: &[&[u8]], out: &mut BytesMut) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.reserve(HEAD + length);
    out.put_u8(tag);
    // The driver has written the message with a length of four bytes; a name less, it has not grown.
    out.put_u32(u32::try_from(length + 4).unwrap_or(u32::MAX));
    for part in parts {
        out.put(*part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        send(tag, &[body], &mut out);
        out.to_vec()
    }

    /// As tags with the beginnings of their bodies.
    fn shown(mut bytes: &[u8]) -> Vec<String> {
        let mut all = Vec::new();
        while let Some((tag, length)) = head_of(bytes) {
            let body = String::from_utf8_lossy(&bytes[HEAD..length]).replace('\0', "|");
            all.push(format!("{}{body}", char::from(tag)));
            bytes = &bytes[length..];
        }
        all
    }

    /// A connection past its start; bytes go through one by one, as the unkindest network would have it.
    struct Line(Unnamed);

    impl Line {
        fn new() -> Self {
            let mut line = Unnamed::default();
            line.outgoing(&[0, 0, 0, 8, 0, 3, 0, 0], &mut BytesMut::new());
            Self(line)
        }

        fn write(&mut self, messages: &[(u8, &str)]) -> Vec<String> {
            let mut out = BytesMut::new();
            for (tag, body) in messages {
                for byte in message(*tag, body.replace('|', "\0").as_bytes()) {
                    self.0.outgoing(&[byte], &mut out);
                }
            }
            shown(&out)
        }

        fn answer(&mut self, tags: &str) -> String {
            let mut out = BytesMut::new();
            for tag in tags.bytes() {
                for byte in message(tag, if tag == b'Z' { b"I" } else { b"" }) {
                    self.0.incoming(&[byte], &mut out);
                }
            }
            shown(&out).iter().map(|shown| shown.chars().next().unwrap()).collect()
        }
    }

    #[test]
    fn a_statement_is_sent_with_every_use_and_acknowledged_once() {
        let mut line = Line::new();
        let sent = line.write(&[(b'P', "s0|SELECT $1|xx"), (b'D', "Ss0|"), (b'S', "")]);
        assert_eq!(sent, ["P|SELECT $1|xx", "DS|", "S"]);
        assert_eq!(line.answer("1tTZ"), "1tTZ");
        for _ in 0..2 {
            let sent = line.write(&[(b'B', "|s0|yy"), (b'E', "|zz"), (b'S', "")]);
            assert_eq!(sent, ["P|SELECT $1|xx", "B||yy", "E|zz", "S"]);
            assert_eq!(line.answer("12DCZ"), "2DCZ");
        }
        assert_eq!(line.write(&[(b'C', "Ss0|"), (b'S', "")]), ["CS|", "S"]);
        assert_eq!(line.answer("3Z"), "3Z");
        // Forgotten: the server says so.
        assert_eq!(line.write(&[(b'B', "|s0|"), (b'S', "")]), ["B||", "S"]);
    }

    #[test]
    fn an_error_in_the_middle_of_a_pipeline_confuses_nothing() {
        let mut line = Line::new();
        line.write(&[(b'P', "a|A|"), (b'S', ""), (b'P', "b|B|"), (b'S', "")]);
        assert_eq!(line.answer("1Z1Z"), "1Z1Z");
        line.write(&[(b'Q', "BEGIN|"), (b'B', "|a|"), (b'S', ""), (b'B', "p|b|"), (b'S', "")]);
        assert_eq!(line.answer("CZ"), "CZ");
        assert_eq!(line.answer("EZ"), "EZ", "the statement itself was refused");
        assert_eq!(line.answer("12Z"), "2Z");
    }

    #[test]
    fn a_statement_that_was_refused_is_not_remembered() {
        let mut line = Line::new();
        line.write(&[(b'P', "good|A|"), (b'S', "")]);
        assert_eq!(line.answer("1Z"), "1Z");
        for n in 0..1000 {
            line.write(&[(b'P', &format!("bad{n}|B|")), (b'D', &format!("Sbad{n}|")), (b'S', "")]);
            assert_eq!(line.answer("EZ"), "EZ");
        }
        assert_eq!(line.0.known.len(), 1, "statements that failed stay for the connection's life");
        assert_eq!(line.write(&[(b'B', "|good|"), (b'S', "")]), ["P|A|", "B||", "S"]);
    }

    #[test]
    fn the_sync_that_a_copy_passes_over_is_not_waited_for() {
        let mut line = Line::new();
        line.write(&[(b'P', "c|COPY|"), (b'S', ""), (b'B', "|c|"), (b'E', "|"), (b'S', "")]);
        assert_eq!(line.answer("1Z12G"), "1Z2G");
        line.write(&[(b'd', "rows"), (b'c', ""), (b'S', ""), (b'B', "|c|"), (b'S', "")]);
        assert_eq!(line.answer("CZ12Z"), "CZ2Z");
        // One that was refused before it began takes no rows, and is synchronized twice.
        line.write(&[
            (b'B', "|c|"),
            (b'E', "|"),
            (b'S', ""),
            (b'f', "no|"),
            (b'S', ""),
            (b'B', "|c|"),
            (b'S', ""),
        ]);
        assert_eq!(line.answer("12EZZ12Z"), "2EZZ2Z");
    }

    #[test]
    fn what_needs_no_translation_passes_as_it_is() {
        let mut line = Line::new();
        let sent = line.write(&[(b'P', "|SELECT 1|"), (b'B', "||"), (b'D', "P|"), (b'C', "Pp|"), (b'S', "")]);
        assert_eq!(sent, ["P|SELECT 1|", "B||", "DP|", "CPp|", "S"]);
        assert_eq!(line.answer("1NA2SZ"), "1NA2SZ");
    }
}
