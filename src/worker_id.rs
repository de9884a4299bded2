//! The name of one running process, new at every start.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

/// `host-pid-nanoseconds`, as the user's crash-recovery document has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(transparent)]
pub struct WorkerId(String);

impl WorkerId {
    /// A name no other process has had: a pid alone comes back after a restart in a container.
    pub fn new() -> Self {
        let nanoseconds =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
        Self(format!("{}-{}-{nanoseconds}", host(), std::process::id()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for WorkerId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether these bytes could be the name of a worker.
pub fn is_name(bytes: &[u8]) -> bool {
    let is_number = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
    };
    let Ok(name) = std::str::from_utf8(bytes) else { return false };
    let mut parts = name.rsplitn(3, '-');
    let (nanoseconds, pid, host) = (parts.next(), parts.next(), parts.next());
    nanoseconds.is_some_and(|part| is_number(part, 39))
        && pid.is_some_and(|part| is_number(part, 10))
        && host.is_some_and(|host| {
            (1..=255).contains(&host.len())
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.')
        })
}

/// The machine's name with nothing in it that a key or a log could misread.
pub fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let clean: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '-' })
        .collect();
    if clean.is_empty() { "localhost".to_owned() } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_starts_never_share_a_name() {
        assert_ne!(WorkerId::new(), WorkerId::new());
    }

    #[test]
    fn the_name_says_host_and_pid() {
        let id = WorkerId::new().to_string();
        assert!(id.starts_with(&format!("{}-{}-", host(), std::process::id())), "{id}");
        assert!(!id.contains(['{', '}']), "braces would make a second hash tag: {id}");
    }

    #[test]
    fn names_are_known_from_garbage() {
        for name in [WorkerId::new().as_str(), "a-1-1", "pod-7f9c-x2.example-4711-1763470800123456789"] {
            assert!(is_name(name.as_bytes()), "{name}");
        }
        for garbage in [
            &b""[..],
            b"a\0b",
            b"a\0-1-1",
            b"host",
            b"host-1",
            b"host-1-",
            b"-1-1",
            b"host-x-1",
            b"host-1-x",
            b"h{}-1-1",
            b"\xff-1-1",
        ] {
            assert!(!is_name(garbage), "{}", String::from_utf8_lossy(garbage));
        }
    }
}
