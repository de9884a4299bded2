//! The W3C trace context of a request: taken if it is one, left out if it is not, never an error.

use std::fmt;

/// A `traceparent` of version 00: `00-TRACE-PARENT-FLAGS`, in lower case hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct Traceparent(Box<str>);

/// The length of a traceparent of version 00, which later versions begin with.
const LENGTH: usize = 55;

impl Traceparent {
    /// What the text says, if it is a trace context. One of a later version is taken for what we know of it.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim_matches([' ', '\t']);
        let known = text.get(..LENGTH)?;
        let mut parts = known.split('-');
        let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_whole = match version {
            "00" => text.len() == LENGTH,
            "ff" => false,
            _ => text.len() == LENGTH || text.as_bytes()[LENGTH] == b'-',
        };
        let is_sound = is_whole
            && parts.next().is_none()
            && is_hex(version, 2)
            && is_hex(trace, 32)
            && is_hex(parent, 16)
            && is_hex(flags, 2)
            && [trace, parent].iter().all(|id| id.bytes().any(|digit| digit != b'0'));
        is_sound.then(|| Self(format!("00-{trace}-{parent}-{flags}").into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parsed(text: &str) -> Option<String> {
        Traceparent::parse(text).map(|trace| trace.as_str().to_owned())
    }

    #[test]
    fn a_trace_context_is_kept_as_it_is() {
        assert_eq!(parsed(GOOD).as_deref(), Some(GOOD));
        assert_eq!(parsed(&format!(" {GOOD}\t")).as_deref(), Some(GOOD));
    }

    #[test]
    fn one_of_a_later_version_is_taken_for_what_we_know_of_it() {
        let later = GOOD.replacen("00", "cc", 1);
        assert_eq!(parsed(&later).as_deref(), Some(GOOD));
        assert_eq!(parsed(&format!("{later}-what-comes")).as_deref(), Some(GOOD));
        assert_eq!(parsed(&format!("{later}.what-comes")), None);
    }

    #[test]
    fn what_is_none_is_left_out() {
        let zero_trace = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
        let zero_parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01";
        let more = format!("{GOOD}-more");
        let forbidden = GOOD.replacen("00", "ff", 1);
        let upper = GOOD.to_uppercase();
        let cut = &GOOD[..54];
        let wide = "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b-01";
        for text in ["", "00", zero_trace, zero_parent, &more, &forbidden, &upper, cut, wide] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
