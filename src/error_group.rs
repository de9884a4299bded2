//! Errors in groups: what differs from row to row in the text of an error (numbers, ids, quoted parts, paths, addresses) is taken
//! out, and what is left, or the code that the handler gave, stands for the group.
//!
//! This is the only place that says which group an error is of. It is stored with the failure, so a later version that takes out
//! more leaves what was written as it is.

use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};
use std::{fmt, str::FromStr};

/// What of an error is read, and what of its pattern counts, in bytes.
const READ: usize = 2_000;
const KEPT: usize = 300;

/// The longest code that a handler may give, in characters.
pub const LONGEST_CODE: usize = 100;

/// A group of errors: eight hexadecimal digits for people, an integer in the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ErrorGroup(pub i32);

impl ErrorGroup {
    /// The group of an error: by the handler's code, or else by its text.
    pub fn of(error: &str, code: Option<&str>) -> Self {
        let hash = match code {
            Some(code) => Sha256::digest(format!("code\0{code}")),
            None => Sha256::digest(format!("text\0{}", pattern(error))),
        };
        Self(i32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]))
    }
}

impl fmt::Display for ErrorGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl Serialize for ErrorGroup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for ErrorGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_hex = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u32::from_str_radix(text, 16) {
            Ok(number) if is_hex => Ok(Self(number.cast_signed())),
            _ => Err("expected an error group: 8 hexadecimal digits, as \"batch errors\" shows them".into()),
        }
    }
}

/// Whether a handler's code can be one; the error says what it must be.
pub fn check_code(code: &str) -> Result<(), String> {
    let is_good =
        !code.is_empty() && code.chars().count() <= LONGEST_CODE && !code.chars().any(char::is_control);
    match is_good {
        true => Ok(()),
        false => Err(format!(
            "\"error_code\" must be a text of 1 to {LONGEST_CODE} characters without control characters"
        )),
    }
}

/// The text of an error without what differs from row to row.
pub fn pattern(error: &str) -> String {
    let mut scan = Scan { rest: cut(error, READ), out: String::with_capacity(error.len().min(KEPT + 100)) };
    while !scan.rest.is_empty() && scan.out.len() < KEPT {
        scan.step();
    }
    let mut pattern = scan.out;
    // A list is as good as its first member.
    for list in ["<n>, <n>", "<n>,<n>", "<n> <n>", "\"…\", \"…\"", "\"…\",\"…\""] {
        let one = if list.starts_with('<') { "<n>" } else { "\"…\"" };
        while pattern.contains(list) {
            pattern = pattern.replace(list, one);
        }
    }
    cut(pattern.trim_end(), KEPT).to_owned()
}

fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

struct Scan<'t> {
    rest: &'t str,
    out: String,
}

impl Scan<'_> {
    fn step(&mut self) {
        let Some(first) = self.rest.chars().next() else { return };
        if first.is_whitespace() || first.is_control() {
            if !self.out.is_empty() && !self.out.ends_with(' ') {
                self.out.push(' ');
            }
            return self.skip(first.len_utf8());
        }
        let in_word = self.out.ends_with(char::is_alphanumeric);
        if let Some(length) = quoted(self.rest, first, in_word) {
            self.out.push_str("\"…\"");
            return self.skip(length);
        }
        if !in_word && let Some((placeholder, length)) = token(self.rest) {
            self.out.push_str(placeholder);
            return self.skip(length);
        }
        if first.is_ascii_digit() {
            self.out.push_str("<n>");
            return self.skip(number(self.rest));
        }
        self.out.push(first);
        self.skip(first.len_utf8());
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }
}

/// The length of a quoted part at the start of `text`.
fn quoted(text: &str, first: char, in_word: bool) -> Option<usize> {
    let closing = match first {
        '"' | '`' => first,
        // An apostrophe within a word quotes nothing.
        '\'' if !in_word => first,
        '“' => '”',
        '‘' => '’',
        '«' => '»',
        _ => return None,
    };
    let inside = &text[first.len_utf8()..];
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        let behind = &inside[at + c.len_utf8()..];
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == closing && !(c == '\'' && behind.starts_with(char::is_alphanumeric)) {
            return Some(text.len() - behind.len());
        }
    }
    None
}

/// What stands at the start of `text` and is of this row alone, as a placeholder, and its length.
fn token(text: &str) -> Option<(&'static str, usize)> {
    let end =
        |stop: &[char]| text.find(|c: char| c.is_whitespace() || stop.contains(&c)).unwrap_or(text.len());
    let wide = text[..end(&['"', '\'', '<', '>', '`'])]
        .trim_end_matches(['.', ',', ';', ':', ')', ']', '}', '!', '?']);
    if let Some((scheme, _)) = wide.split_once("://")
        && !scheme.is_empty()
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    {
        return Some(("<url>", wide.len()));
    }
    let stops = ['"', '\'', '<', '>', '`', '(', ')', '[', ']', '{', '}', ',', ';', '=', '|'];
    let word = text[..end(&stops)].trim_end_matches(['.', ':', '!', '?']);
    let placeholder = if is_email(word) {
        "<email>"
    } else if is_path(word) {
        "<path>"
    } else if uuid::Uuid::try_parse(word).is_ok() && word.contains('-') {
        "<uuid>"
    } else if is_address(word) {
        "<address>"
    } else if is_hex(word) {
        "<hex>"
    } else if is_id(word) {
        "<id>"
    } else {
        return None;
    };
    Some((placeholder, word.len()))
}

fn is_email(word: &str) -> bool {
    matches!(word.split_once('@'), Some((name, host)) if !name.is_empty() && host.contains('.') && !host.contains('@'))
}

fn is_path(word: &str) -> bool {
    let named = |rest: &str| rest.starts_with(|c: char| c.is_alphanumeric() || "_.-".contains(c));
    word.strip_prefix('/').is_some_and(named)
        || ["./", "../", "~/", "\\\\"].iter().any(|start| word.starts_with(start))
        || matches!(word.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
        || word.matches('/').count() >= 2
}

/// An IP address, with or without a port.
fn is_address(word: &str) -> bool {
    let is_v4 = |text: &str| text.parse::<std::net::Ipv4Addr>().is_ok();
    is_v4(word)
        || matches!(word.rsplit_once(':'), Some((host, port)) if is_v4(host) && port.parse::<u16>().is_ok())
        || (word.contains(':') && word.parse::<std::net::Ipv6Addr>().is_ok())
}

fn is_hex(word: &str) -> bool {
    let all_hex = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
    word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")).is_some_and(all_hex)
        || (word.len() >= 8
            && all_hex(word)
            && word.bytes().any(|b| b.is_ascii_digit())
            && word.bytes().any(|b| b.is_ascii_alphabetic()))
}

/// Long, and of letters and digits: a key or an id, and no word.
fn is_id(word: &str) -> bool {
    word.len() >= 16
        && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-+/".contains(&b))
        && word.bytes().filter(u8::is_ascii_digit).count() >= 3
        && word.bytes().any(|b| b.is_ascii_alphabetic())
}

/// The length of the number at the start of `text`: digits, with points and commas between them.
fn number(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut at = 0;
    while is_digit(at) || (at > 0 && matches!(bytes.get(at), Some(b'.' | b',')) && is_digit(at + 1)) {
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_differs_from_row_to_row_is_taken_out() {
        let cases = [
            ("timeout after 30.5s on attempt 3", "timeout after <n>s on attempt <n>"),
            ("no customer \"Anna O'Neil\" in 'eu-west'", "no customer \"…\" in \"…\""),
            ("can't parse it, didn't try", "can't parse it, didn't try"),
            ("order 6f1e9c1e-94a7-4f0b-8d53-6f1e9c1e94a7 is gone", "order <uuid> is gone"),
            ("GET https://api.example.com/v1/x?id=7&a=b: 503", "GET <url>: <n>"),
            ("open /var/lib/app/file.csv: No such file", "open <path>: No such file"),
            ("C:\\data\\x.csv and ../up.txt, read/write", "<path> and <path>, read/write"),
            ("connect 10.0.3.17:5432 refused, [fe80::1]", "connect <address> refused, [<address>]"),
            ("user anna@example.org unknown", "user <email> unknown"),
            ("commit 9f8e7d6c5b at 0xDEADBEEF", "commit <hex> at <hex>"),
            ("cus_9s6XKzkNRiz8i3 has no card", "<id> has no card"),
            ("rows 1, 2, 3 and 1,234", "rows <n> and <n>"),
            ("line\n  two\tthree\u{1b}[31m", "line two three [<n>m"),
            ("beef decade facade", "beef decade facade"),
            ("an \"open quote", "an \"open quote"),
            ("", ""),
        ];
        for (error, expected) in cases {
            assert_eq!(pattern(error), expected, "{error:?}");
        }
    }

    #[test]
    fn a_group_is_the_same_for_ever() {
        // Stored: a change of these ids parts the failures of one error.
        assert_eq!(ErrorGroup::of("timeout after 30 s", None), ErrorGroup::of("timeout after 7 s", None));
        assert_ne!(ErrorGroup::of("timeout", None), ErrorGroup::of("timeout", Some("timeout")));
        assert_eq!(ErrorGroup::of("a", Some("E1")), ErrorGroup::of("b", Some("E1")));
        let group = ErrorGroup::of("no", None);
        assert_eq!(group.to_string().parse(), Ok(group));
        assert_eq!(ErrorGroup(-1).to_string(), "ffffffff");
        assert_eq!("ffffffff".parse(), Ok(ErrorGroup(-1)));
        for bad in ["", "fff", "+fffffff", "xyzxyzxy", "fffffffff"] {
            assert!(bad.parse::<ErrorGroup>().is_err(), "{bad}");
        }
        assert!(
            check_code("card_declined").is_ok() && check_code("").is_err() && check_code("a\nb").is_err()
        );
        assert!(check_code(&"x".repeat(101)).is_err());
    }

    proptest! {
        #[test]
        fn any_text_has_a_short_pattern_without_control_characters(error in "(?s).{0,400}") {
            let pattern = pattern(&error);
            prop_assert!(pattern.len() <= KEPT && !pattern.chars().any(char::is_control));
        }

        #[test]
        fn numbers_make_no_groups(one in 0..10_000_000_u64, other in 0..10_000_000_u64) {
            let of = |n: u64| ErrorGroup::of(&format!("row {n} of order {n}: n={n}, {n}%"), None);
            prop_assert_eq!(of(one), of(other));
        }
    }
}
