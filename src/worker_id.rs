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
}
