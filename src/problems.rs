//! Everything that is wrong with a configuration, reported at once.

use std::fmt;

/// One thing to fix: which key, where it was set, what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    pub key: String,
    /// The file, variable or flag the value came from; empty where the key is missing.
    pub source: String,
    pub message: String,
    pub severity: Severity,
}

/// An error stops the daemon; a warning is said and lived with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Error,
    Warning,
}

/// The problems found so far, in the order they were found.
#[derive(Clone, Debug, Default)]
pub struct Problems(Vec<Problem>);

impl Problems {
    pub fn error(&mut self, key: impl Into<String>, message: impl Into<String>) {
        self.push(key.into(), message.into(), Severity::Error);
    }

    pub fn warning(&mut self, key: impl Into<String>, message: impl Into<String>) {
        self.push(key.into(), message.into(), Severity::Warning);
    }

    /// Records an error unless `holds`.
    pub fn unless(&mut self, holds: bool, key: &str, message: impl Into<String>) {
        if !holds {
            self.error(key, message);
        }
    }

    fn push(&mut self, key: String, message: String, severity: Severity) {
        self.0.push(Problem { key, source: String::new(), message, severity });
    }

    /// Takes over those problems of another's whose key is wanted.
    pub(crate) fn extend(&mut self, more: Self, wanted: impl Fn(&str) -> bool) {
        self.0.extend(more.0.into_iter().filter(|problem| wanted(&problem.key)));
    }

    /// Says for every problem where its key was set, and the other keys that it speaks of.
    /// `set` has every key that was set, with its source.
    pub(crate) fn locate(&mut self, set: &[(String, &str)]) {
        for problem in self.0.iter_mut().filter(|p| p.source.is_empty()) {
            let section = format!("{}.", problem.key);
            let own = set.iter().find(|(key, _)| *key == problem.key);
            let own = own.or_else(|| set.iter().find(|(key, _)| key.starts_with(&section)));
            let is_spoken_of = |key: &str| {
                let mut words =
                    problem.message.split(|c: char| !c.is_ascii_alphanumeric() && !"._".contains(c));
                key != problem.key && words.any(|word| word.trim_end_matches('.') == key)
            };
            let others = set.iter().filter(|(key, _)| is_spoken_of(key));
            let own = own.map(|(_, source)| (*source).to_owned());
            let sources = own.into_iter().chain(others.map(|(key, source)| format!("{key}: {source}")));
            problem.source = sources.collect::<Vec<_>>().join("; ");
        }
    }

    pub fn has_errors(&self) -> bool {
        self.0.iter().any(|p| p.severity == Severity::Error)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }

    pub fn warnings(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter().filter(|p| p.severity == Severity::Warning)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)?;
        if !self.source.is_empty() {
            write!(f, " ({})", self.source)?;
        }
        Ok(())
    }
}

/// One line that counts, then a line for each.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => write!(f, "the configuration has a problem:")?,
            count => write!(f, "the configuration has {count} problems:")?,
        }
        for problem in &self.0 {
            let mark = if problem.severity == Severity::Warning { "warning: " } else { "" };
            write!(f, "\n  {mark}{problem}")?;
        }
        Ok(())
    }
}
