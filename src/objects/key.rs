//! A key names one object the same way in every store: what one of them cannot hold, none accepts.

use std::fmt;

use super::ObjectError;

/// S3 allows 1,024 bytes with the prefix; this leaves room for it.
const MAX_BYTES: usize = 768;
/// What common file systems allow for one name.
const MAX_SEGMENT: usize = 255;
/// Names of this form belong to the file store's unfinished writes.
pub(super) const TEMP_PREFIX: &str = ".musterd-tmp-";

/// A relative path of `/`-separated names: no empty name, no `.` or `..`, no control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    pub fn new(text: impl Into<String>) -> Result<Self, ObjectError> {
        let text = text.into();
        match problem(&text) {
            None => Ok(Self(text)),
            Some(problem) => Err(ObjectError::Key { key: text, problem }),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why `text` cannot be a key, if it cannot.
pub(super) fn problem(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("it is empty");
    }
    if text.len() > MAX_BYTES {
        return Some("it is longer than 768 bytes");
    }
    if text.chars().any(char::is_control) {
        return Some("it has a control character");
    }
    text.split('/').find_map(segment_problem)
}

fn segment_problem(segment: &str) -> Option<&'static str> {
    match segment {
        "" => Some("it has an empty name between slashes"),
        "." | ".." => Some("it has a name that is only dots"),
        _ if segment.len() > MAX_SEGMENT => Some("it has a name longer than 255 bytes"),
        _ if segment.starts_with(TEMP_PREFIX) => Some("it has a name reserved for unfinished writes"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_and_odd_names_are_keys() {
        for text in ["a", "batches/7/g1-100/out.txt", "ü b+c/日本.csv", ".hidden", "a..b", "100%"] {
            assert_eq!(Key::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn what_a_store_cannot_hold_is_refused() {
        let long = "x".repeat(256);
        let longer = ["y".repeat(200), "y".repeat(200), "y".repeat(200), "y".repeat(200)].join("/");
        for text in ["", "/a", "a/", "a//b", "..", "a/../b", "a/./b", "a\0b", "a\nb", &long, &longer] {
            assert!(matches!(Key::new(text), Err(ObjectError::Key { .. })), "{text:?}");
        }
        assert!(Key::new(format!("a/{TEMP_PREFIX}1")).is_err());
    }
}
