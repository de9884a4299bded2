//! The manifest: what a batch's files are, how large, and what they hash to. It has no date and no host in it, so that
//! every upload of a generation writes the same bytes.

use crate::{
    json::Json,
    objects::{self, Key, MANIFEST, ObjectError},
    store::batches::Closed,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Files that are named with the batch itself; all of them are in the manifest.
const SHOWN: usize = 1_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub batch: i64,
    /// Of this batch alone, for ever: an id can be handed out again after a failover.
    pub uid: String,
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

/// Where the files of this end of a batch lie. Beside the id there is a piece of the batch's own uid: after a failover an id can be
/// handed out again. An aborted batch can be seen closed with fewer outcomes than it ends with, so then their number is part of
/// it: it decides the content.
pub fn folder(closed: &Closed) -> String {
    let Closed { id, generation, rows, succeeded, failed, .. } = closed;
    let home = home_of(*id, closed.uid);
    match succeeded + failed {
        done if done == *rows => format!("{home}/g{generation}-r{rows}"),
        done => format!("{home}/g{generation}-r{rows}-d{done}"),
    }
}

fn home_of(id: i64, uid: Uuid) -> String {
    format!("batches/{id}-{}", &uid.simple().to_string()[..8])
}

/// Where the files of all ends of a batch lie, and nothing else.
pub fn home(id: i64, uid: Uuid) -> Result<Key, ObjectError> {
    Key::new(home_of(id, uid))
}

/// Where the manifest of this end of a batch lies.
pub(super) fn key(closed: &Closed) -> Result<Key, ObjectError> {
    Key::new(format!("{}/{MANIFEST}", folder(closed)))
}

impl Manifest {
    pub(super) fn of(closed: &Closed) -> Self {
        Self {
            batch: closed.id,
            uid: closed.uid.to_string(),
            generation: closed.generation,
            rows: closed.rows,
            succeeded: closed.succeeded,
            failed: closed.failed,
            files: Vec::new(),
        }
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
        let uid = Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        let (id, generation, rows, succeeded, failed, recorded) = (7, 1, 10, 9, 1, 10);
        let whole =
            Closed { id, uid, generation, rows, succeeded, failed, recorded, outputs: true, aborting: false };
        assert_eq!(folder(&whole), "batches/7-01234567/g1-r10");
        assert_eq!(folder(&Closed { generation: 2, ..whole.clone() }), "batches/7-01234567/g2-r10");
        assert_eq!(folder(&Closed { rows: 12, succeeded: 11, ..whole.clone() }), "batches/7-01234567/g1-r12");
        assert_eq!(folder(&Closed { succeeded: 3, ..whole.clone() }), "batches/7-01234567/g1-r10-d4");
        let other = Closed { uid: Uuid::from_u128(1), ..whole.clone() };
        assert_ne!(folder(&other), folder(&whole), "another batch that was given the same id");
    }
}
