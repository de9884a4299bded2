//! A temporary directory of one process: no other user reads it, and it goes with the process.

use std::{
    os::unix::fs::{DirBuilderExt, chown},
    path::{Path, PathBuf},
    sync::Once,
};

#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// `None`: none can be made, and the program has what our environment names.
    pub(super) fn new(handler: &str, owner: Option<(u32, u32)>) -> Option<Self> {
        let parent = std::env::temp_dir();
        let dir = parent.join(format!("musterd-{handler}-{}", uuid::Uuid::new_v4().simple()));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&dir).and_then(|()| {
            let scratch = Self(dir);
            match owner {
                Some((user, group)) => chown(&scratch.0, Some(user), Some(group)).map(|()| scratch),
                None => Ok(scratch),
            }
        });
        match made {
            Ok(scratch) => Some(scratch),
            Err(error) => {
                static COMPLAINT: Once = Once::new();
                COMPLAINT.call_once(|| {
                    tracing::warn!(dir = %parent.display(), %error, "programs get no temporary directories of their own");
                });
                None
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What the program itself has removed is fine.
        if let Err(error) = std::fs::remove_dir_all(&self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(dir = %self.0.display(), %error, "a temporary directory could not be removed");
        }
    }
}
