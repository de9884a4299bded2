//! Where the tokens of one scope come from: a file, or a directory of files, that may change, go or become unreadable at any time.
//!
//! What was read last stays valid for [`GRACE`] while its file cannot be read, and no longer: a token whose file was taken
//! away is gone within a minute. A file of a directory that cannot be read costs the others nothing.

use crate::queue::is_valid_name;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;

/// How long tokens stay valid while their file cannot be read: one that is being replaced is away for a moment.
pub(super) const GRACE: Duration = Duration::from_secs(60);
/// Shorter ones can be guessed.
const SHORTEST: usize = 16;
/// More than any list of tokens needs. A larger file is refused: cut, it would end in half a token.
const LARGEST_FILE: u64 = 1 << 20;

pub(super) type Hash = [u8; 32];

/// A token, by its hash, and the name of its holder.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) name: Arc<str>,
    pub(super) hash: Hash,
}

/// The tokens of one file, and how many of its lines are none.
#[derive(Default)]
pub(super) struct Parsed {
    tokens: Vec<Token>,
    too_short: usize,
    bad_names: usize,
}

/// What a look at the files found: each with its tokens, or why it cannot be read.
pub(super) type Look = io::Result<BTreeMap<PathBuf, io::Result<Parsed>>>;

struct Held {
    tokens: Vec<Token>,
    read_at: Instant,
}

/// The tokens of one scope as they were read last, by file.
#[derive(Default)]
pub(super) struct Source(BTreeMap<PathBuf, Held>);

impl Source {
    pub(super) fn tokens(&self) -> impl Iterator<Item = &Token> {
        self.0.values().flat_map(|held| &held.tokens)
    }

    /// Takes in what a look found; what is wrong with it, in a person's words.
    pub(super) fn take(&mut self, look: Look, now: Instant) -> Vec<String> {
        let mut problems = Vec::new();
        match look {
            Ok(files) => {
                // A file that is gone from its directory was taken away; that is no trouble.
                self.0.retain(|path, _| files.contains_key(path));
                for (path, parsed) in files {
                    match parsed {
                        Ok(parsed) => {
                            problems.extend(parsed.complaints(&path));
                            self.0.insert(path, Held { tokens: parsed.tokens, read_at: now });
                        }
                        Err(error) => problems.push(format!("{}: {error}", path.display())),
                    }
                }
            }
            Err(error) => problems.push(error.to_string()),
        }
        self.0.retain(|_, held| now.duration_since(held.read_at) < GRACE);
        problems
    }
}

impl Parsed {
    fn complaints(&self, path: &Path) -> Vec<String> {
        let path = path.display();
        let mut complaints = Vec::new();
        if self.too_short > 0 {
            complaints.push(format!(
                "{path}: {} tokens have fewer than {SHORTEST} characters and are not taken",
                self.too_short
            ));
        }
        if self.bad_names > 0 {
            complaints.push(format!(
                "{path}: {} lines have no name before their first colon and are not taken; a line is NAME:TOKEN",
                self.bad_names
            ));
        }
        complaints
    }

    fn of(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            parsed.add(line);
        }
        parsed
    }

    /// One token a line, with the name of its holder before it: `NAME:TOKEN`. Without one its name is a piece of its hash.
    fn add(&mut self, line: &str) {
        let (name, token) = match line.split_once(':') {
            Some((name, token)) => (Some(name.trim()), token.trim()),
            None => (None, line),
        };
        let hash: Hash = Sha256::digest(token).into();
        let name = match name {
            _ if token.len() < SHORTEST => {
                self.too_short += 1;
                return;
            }
            Some(name) if !is_valid_name(name) => {
                self.bad_names += 1;
                return;
            }
            Some(name) => name.to_owned(),
            None => format!("sha256-{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3]),
        };
        self.tokens.push(Token { name: name.into(), hash });
    }
}

/// Looks at a file, or at all files of a directory but hidden ones.
pub(super) fn look(path: Option<&Path>) -> Look {
    let mut files = BTreeMap::new();
    let Some(path) = path else { return Ok(files) };
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if !std::fs::metadata(path).map_err(named)?.is_dir() {
        files.insert(path.to_owned(), read(path));
        return Ok(files);
    }
    for entry in std::fs::read_dir(path).map_err(named)? {
        let path = entry.map_err(named)?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        // What cannot be asked about is no directory: reading it says what is wrong.
        if !is_hidden && !path.is_dir() {
            let parsed = read(&path);
            files.insert(path, parsed);
        }
    }
    Ok(files)
}

fn read(path: &Path) -> io::Result<Parsed> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LARGEST_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LARGEST_FILE {
        return Err(io::Error::other(format!("has more than {LARGEST_FILE} bytes and is not taken")));
    }
    Ok(Parsed::of(&text))
}
