//! A value made of files and secrets, made again when one of them has changed: passwords, certificates and keys are rotated while a
//! worker runs.

use crate::secret::Secret;
use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How often it is looked whether something has changed, at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What a value was made of. Two that are equal make the same value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stamp {
    /// A file by what the system knows of it: the time of its last change, its size and its number; `None` while it is away.
    File(Option<(i64, i64, u64, u64)>),
    /// A secret by its text; `None` while its file cannot be read.
    Secret(Option<Secret>),
}

impl Stamp {
    pub fn of_file(path: &Path) -> Self {
        let known = std::fs::metadata(path).ok();
        Self::File(known.map(|file| (file.mtime(), file.mtime_nsec(), file.size(), file.ino())))
    }

    pub fn of_secret(secret: &Secret) -> Self {
        Self::Secret(secret.current().ok())
    }
}

type Look = Box<dyn Fn() -> Vec<Stamp> + Send + Sync>;
type Make<T> = Box<dyn Fn() -> Result<T, String> + Send + Sync>;

/// The newest value. While what it is made of cannot be used, the value before stays good, and the log says why.
pub struct Renewed<T> {
    what: String,
    look: Look,
    make: Make<T>,
    last: Mutex<Last<T>>,
}

struct Last<T> {
    looked: Instant,
    stamps: Vec<Stamp>,
    value: Arc<T>,
}

impl<T> fmt::Debug for Renewed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewed").field("what", &self.what).finish_non_exhaustive()
    }
}

impl<T> Renewed<T> {
    /// Makes the first value; `look` says what it is made of.
    pub fn new<E: std::error::Error + 'static>(
        what: impl Into<String>,
        look: impl Fn() -> Vec<Stamp> + Send + Sync + 'static,
        make: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        // Before the value: a change between the two is then seen by the next look.
        let stamps = look();
        let last = Last { looked: Instant::now(), stamps, value: Arc::new(make()?) };
        let make = move || make().map_err(|error| crate::error_text::describe(&error));
        Ok(Self { what: what.into(), look: Box::new(look), make: Box::new(make), last: Mutex::new(last) })
    }

    pub fn get(&self) -> Arc<T> {
        self.get_at(Instant::now())
    }

    fn get_at(&self, now: Instant) -> Arc<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.stamps.is_empty() || now.saturating_duration_since(last.looked) < LOOK_EVERY {
            return Arc::clone(&last.value);
        }
        last.looked = now;
        let stamps = (self.look)();
        if stamps != last.stamps {
            match (self.make)() {
                Ok(value) => {
                    tracing::info!(
                        what = self.what,
                        "secrets or certificates have changed and were read again"
                    );
                    last.value = Arc::new(value);
                }
                Err(error) => {
                    tracing::warn!(what = self.what, error, "changed secrets or certificates cannot be used");
                }
            }
            last.stamps = stamps;
        }
        Arc::clone(&last.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_again_when_its_file_changes_and_kept_while_the_file_is_no_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        std::fs::write(&path, "1").unwrap();
        let (looked, made) = (path.clone(), path.clone());
        let number = Renewed::new(
            "number",
            move || vec![Stamp::of_file(&looked)],
            move || std::fs::read_to_string(&made).unwrap_or_default().parse::<i32>(),
        )
        .unwrap();
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        std::fs::write(&path, "22").unwrap();
        assert_eq!(*number.get(), 1, "it is not looked at every time");
        assert_eq!(*number.get_at(later(2)), 22);
        std::fs::write(&path, "odd").unwrap();
        assert_eq!(*number.get_at(later(4)), 22);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(*number.get_at(later(6)), 22);
        std::fs::write(&path, "333").unwrap();
        assert_eq!(*number.get_at(later(8)), 333);
    }
}
