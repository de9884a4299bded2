//! Bearer tokens with a scope, from files that may change at any time. They are compared as hashes, in constant time,
//! and appear nowhere else.

use sha2::{Digest, Sha256};
use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use subtle::{Choice, ConstantTimeEq};
use tokio::sync::Mutex;

/// What a token allows; to write is to read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    Read,
    Write,
}

/// How long what was read is good: a token that was taken away is refused this much later at the latest.
const FRESH: Duration = Duration::from_secs(1);
/// Shorter ones can be guessed.
const SHORTEST: usize = 16;
/// More than any list of tokens needs.
const LARGEST_FILE: u64 = 1 << 20;

type Hash = [u8; 32];

/// The tokens of both scopes.
#[derive(Debug)]
pub(crate) struct Tokens {
    read: Option<PathBuf>,
    write: Option<PathBuf>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    at: Option<Instant>,
    read: Vec<Hash>,
    write: Vec<Hash>,
    /// What was complained about last, so that it is said once.
    complaint: Option<String>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Known({} read, {} write)", self.read.len(), self.write.len())
    }
}

impl Tokens {
    pub(crate) fn new(read: Option<PathBuf>, write: Option<PathBuf>) -> Self {
        Self { read, write, known: Mutex::default() }
    }

    /// Whether there are to be any: then nobody gets in without one, even while the files cannot be read.
    pub(crate) fn are_wanted(&self) -> bool {
        self.read.is_some() || self.write.is_some()
    }

    /// What the token allows, if it is one.
    pub(crate) async fn scope_of(&self, token: &str) -> Option<Scope> {
        let asked: Hash = Sha256::digest(token).into();
        let mut known = self.known.lock().await;
        if known.at.is_none_or(|at| at.elapsed() >= FRESH) {
            self.refresh(&mut known).await;
        }
        // Every token is compared whatever was found: the time says nothing.
        let among =
            |hashes: &[Hash]| hashes.iter().fold(Choice::from(0), |found, hash| found | hash.ct_eq(&asked));
        let (write, read) = (among(&known.write), among(&known.read));
        match (bool::from(write), bool::from(read)) {
            (true, _) => Some(Scope::Write),
            (false, true) => Some(Scope::Read),
            (false, false) => None,
        }
    }

    async fn refresh(&self, known: &mut Known) {
        let (read, write) = (self.read.clone(), self.write.clone());
        let reading = tokio::task::spawn_blocking(move || (load(read.as_deref()), load(write.as_deref())));
        let Ok((read, write)) = reading.await else { return };
        let mut complaints = Vec::new();
        let mut take = |loaded: io::Result<Loaded>, key: &str, hashes: &mut Vec<Hash>| match loaded {
            Ok(loaded) => {
                *hashes = loaded.hashes;
                if loaded.too_short > 0 {
                    let short = loaded.too_short;
                    complaints.push(format!(
                        "{key}: {short} tokens have fewer than {SHORTEST} characters and are not taken"
                    ));
                }
            }
            // Those that were read last stay good: a file that is being replaced is away for a moment.
            Err(error) => complaints.push(format!("{key}: {error}")),
        };
        take(read, "http.read_tokens_file", &mut known.read);
        take(write, "http.write_tokens_file", &mut known.write);
        known.at = Some(Instant::now());
        let complaint = (!complaints.is_empty()).then(|| complaints.join("; "));
        if complaint != known.complaint
            && let Some(complaint) = &complaint
        {
            tracing::warn!(problem = complaint, "not all tokens of the API can be used");
        }
        known.complaint = complaint;
    }
}

#[derive(Default)]
struct Loaded {
    hashes: Vec<Hash>,
    too_short: usize,
}

/// One token a line; of a directory, those of all its files but hidden ones.
fn load(path: Option<&Path>) -> io::Result<Loaded> {
    let mut loaded = Loaded::default();
    let Some(path) = path else { return Ok(loaded) };
    if !path.is_dir() {
        return load_file(path, &mut loaded).map(|()| loaded);
    }
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && path.is_file() {
            load_file(&path, &mut loaded)?;
        }
    }
    Ok(loaded)
}

fn load_file(path: &Path, loaded: &mut Loaded) -> io::Result<()> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LARGEST_FILE).read_to_string(&mut text)?;
    for token in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match token.len() {
            ..SHORTEST => loaded.too_short += 1,
            _ => loaded.hashes.push(Sha256::digest(token).into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: &str = "read-canary-0123456789";
    const WRITE: &str = "write-canary-0123456789";

    #[tokio::test]
    async fn a_directory_of_secrets_is_read_as_one_and_hidden_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("one"), format!("{READ}\n")).unwrap();
        std::fs::write(dir.path().join("two"), format!("# a comment\n\n{WRITE}")).unwrap();
        std::fs::write(dir.path().join("..data"), "hidden-canary-0123456789").unwrap();
        let tokens = Tokens::new(Some(dir.path().into()), None);
        assert!(tokens.are_wanted());
        assert_eq!(tokens.scope_of(READ).await, Some(Scope::Read));
        assert_eq!(tokens.scope_of(WRITE).await, Some(Scope::Read));
        assert_eq!(tokens.scope_of("hidden-canary-0123456789").await, None);
        assert!(!format!("{tokens:?}").contains("canary"));
    }

    #[tokio::test]
    async fn short_tokens_empty_lines_and_absent_files_let_nobody_in() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        std::fs::write(&file, "short\n\n  \n").unwrap();
        let tokens = Tokens::new(Some(dir.path().join("absent")), Some(file));
        for token in ["", "short", " ", "absent"] {
            assert_eq!(tokens.scope_of(token).await, None, "{token:?}");
        }
    }

    #[tokio::test]
    async fn to_write_is_to_read_as_well() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        std::fs::write(&file, WRITE).unwrap();
        let tokens = Tokens::new(None, Some(file));
        assert_eq!(tokens.scope_of(WRITE).await, Some(Scope::Write));
        assert!(Scope::Write >= Scope::Read);
    }
}
