//! The manifest: what a batch's files are, how large, and what they hash to. It has no date and no host in it, so that
//! every upload of a generation writes the same bytes.

use crate::{
    json::Json,
    objects::{self, Key, MANIFEST, ObjectError},
    store::batches::Closed,
};
use serde::{Deserialize, Serialize};

/// Files that are named with the batch itself; all of them are in the manifest.
const SHOWN: usize = 1_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub batch: i64,
    pub generation: i32,
    pub rows: i32,
    pub succeeded: i32,
    pub failed: i32,
    pub files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    pub key: String,
    pub bytes: u64,
    /// Rows that added to it.
    pub rows: u64,
    pub sha256: String,
}

/// Where the files of this end of a batch lie. An aborted batch can be seen closed with fewer results than it ends
/// with, so then their number is part of it: it decides the content.
pub fn folder(closed: &Closed) -> String {
    let Closed { id, generation, rows, succeeded, failed, .. } = closed;
    match succeeded + failed {
        done if done == *rows => format!("batches/{id}/g{generation}-r{rows}"),
        done => format!("batches/{id}/g{generation}-r{rows}-d{done}"),
    }
}

impl Manifest {
    pub(super) fn of(closed: &Closed) -> Self {
        Self {
            batch: closed.id,
            generation: closed.generation,
            rows: closed.rows,
            succeeded: closed.succeeded,
            failed: closed.failed,
            files: Vec::new(),
        }
    }

    pub(super) fn key(&self) -> Result<Key, ObjectError> {
        let closed = Closed {
            id: self.batch,
            generation: self.generation,
            rows: self.rows,
            succeeded: self.succeeded,
            failed: self.failed,
            outputs: true,
        };
        Key::new(format!("{}/{MANIFEST}", folder(&closed)))
    }

    /// What `batches.outputs` says.
    pub(super) fn summary(&self, key: &Key, store: &objects::Store) -> Result<Json, serde_json::Error> {
        Json::of(&serde_json::json!({
            "manifest": key.as_str(),
            "location": store.location(key),
            "generation": self.generation,
            "bytes": self.files.iter().map(|file| file.bytes).sum::<u64>(),
            "file_count": self.files.len(),
            "files": self.files.iter().take(SHOWN).collect::<Vec<_>>(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_changes_with_all_that_its_content_depends_on() {
        let whole = Closed { id: 7, generation: 1, rows: 10, succeeded: 9, failed: 1, outputs: true };
        assert_eq!(folder(&whole), "batches/7/g1-r10");
        assert_eq!(folder(&Closed { generation: 2, ..whole.clone() }), "batches/7/g2-r10");
        assert_eq!(folder(&Closed { rows: 12, succeeded: 11, ..whole.clone() }), "batches/7/g1-r12");
        assert_eq!(folder(&Closed { succeeded: 3, ..whole.clone() }), "batches/7/g1-r10-d4");
    }
}
