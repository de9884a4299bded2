//! Bearer tokens with a scope and the name of their holder, from files that may change at any time. They are compared as hashes,
//! in constant time, and appear nowhere else.

mod source;

#[cfg(feature = "fuzzing")]
pub(crate) use source::fuzzing::any_file as fuzz_tokens;

use sha2::{Digest, Sha256};
use source::{Hash, Source, look};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use subtle::{Choice, ConstantTimeEq};
use tokio::{sync::Mutex, time::Instant};

/// What a token allows; to write is to read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    Read,
    Write,
}

/// Who asks: the holder of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) name: Arc<str>,
    pub(crate) scope: Scope,
    /// The most that the token of another holder allows.
    pub(crate) others: Option<Scope>,
}

impl Holder {
    /// Whether the token of another holder allows this.
    pub(crate) fn has_others(&self, wanted: Scope) -> bool {
        self.others.is_some_and(|others| others >= wanted)
    }
}

/// How long what was read is good: a token that was taken out of its file is refused this much later at the latest.
const FRESH: Duration = Duration::from_secs(1);

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
    read: Source,
    write: Source,
    /// What was complained about last, so that it is said once.
    complaint: Option<String>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Known({} read, {} write)", self.read.tokens().count(), self.write.tokens().count())
    }
}

impl Tokens {
    pub(crate) fn new(read: Option<PathBuf>, write: Option<PathBuf>) -> Self {
        Self { read, write, known: Mutex::default() }
    }

    /// Whether there are to be any: then no request gets in without one, even while the files cannot be read.
    pub(crate) fn are_wanted(&self) -> bool {
        self.read.is_some() || self.write.is_some()
    }

    /// Whose token it is and what it allows, if it is one.
    pub(crate) async fn holder_of(&self, token: &str) -> Option<Holder> {
        let asked: Hash = Sha256::digest(token).into();
        let mut known = self.known.lock().await;
        if known.at.is_none_or(|at| at.elapsed() >= FRESH) {
            self.refresh(&mut known).await;
        }
        let found = find(&known.write, &asked, Scope::Write).or(find(&known.read, &asked, Scope::Read));
        found.map(|(name, scope)| {
            let has_other = |source: &Source| source.tokens().any(|token| token.name != name);
            let writes = has_other(&known.write).then_some(Scope::Write);
            Holder { others: writes.or(has_other(&known.read).then_some(Scope::Read)), name, scope }
        })
    }

    async fn refresh(&self, known: &mut Known) {
        let (read, write) = (self.read.clone(), self.write.clone());
        let reading = tokio::task::spawn_blocking(move || (look(read.as_deref()), look(write.as_deref())));
        let Ok((read, write)) = reading.await else { return };
        let now = Instant::now();
        let mut complaints = Vec::new();
        let mut say = |key: &str, problems: Vec<String>, source: &Source| {
            let valid = source.tokens().count();
            complaints
                .extend(problems.iter().map(|problem| format!("{key}: {problem}; {valid} tokens are valid")));
        };
        say("http.read_tokens_file", known.read.take(read, now), &known.read);
        say("http.write_tokens_file", known.write.take(write, now), &known.write);
        known.at = Some(now);
        let complaint = (!complaints.is_empty()).then(|| complaints.join("; "));
        if complaint != known.complaint
            && let Some(complaint) = &complaint
        {
            tracing::error!(
                problem = complaint,
                grace = source::GRACE.as_secs(),
                "not all tokens of the API can be used; those of a file that cannot be read end with its grace"
            );
        }
        known.complaint = complaint;
    }
}

/// Every token is compared whatever was found: the time says nothing.
fn find(source: &Source, asked: &Hash, scope: Scope) -> Option<(Arc<str>, Scope)> {
    let mut found = None;
    for token in source.tokens() {
        let is_it: Choice = token.hash.ct_eq(asked);
        if bool::from(is_it) {
            found = Some((Arc::clone(&token.name), scope));
        }
    }
    found
}

/// What is wrong with a file of tokens, or a directory of them; how many tokens it has.
pub(crate) fn examine(path: &Path) -> (usize, Vec<String>) {
    let mut source = Source::default();
    let problems = source.take(look(Some(path)), Instant::now());
    (source.tokens().count(), problems)
}

#[cfg(test)]
mod tests;
