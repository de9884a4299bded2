//! Where PostgreSQL's programs are: any installed one will do, the newest wins.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::error::EmbeddedError;

/// The oldest major version Muster works with.
const OLDEST: u32 = 14;

/// The programs of one installed PostgreSQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    /// The directory that holds `postgres` and `initdb`.
    pub dir: PathBuf,
    /// Major and minor version.
    pub version: (u32, u32),
}

impl Binaries {
    /// The path of one program.
    pub fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The major version, as a data directory's `PG_VERSION` gives it.
    pub fn major(&self) -> u32 {
        self.version.0
    }
}

/// The newest PostgreSQL of this machine, or the one `MUSTERD_PG_BIN` names.
pub fn find_binaries() -> Result<Binaries, EmbeddedError> {
    Search::of_this_machine().newest()
}

/// The places to look in, and what was found there.
#[derive(Debug)]
pub(super) struct Search {
    places: Vec<PathBuf>,
    found: Vec<Binaries>,
}

impl Search {
    pub(super) fn of_this_machine() -> Self {
        Self::new(std::env::var_os("MUSTERD_PG_BIN"), std::env::var_os("PATH"))
    }

    fn new(chosen: Option<OsString>, path: Option<OsString>) -> Self {
        let places = match chosen {
            // Named by the user: whatever is wrong with it should be said, not papered over by another one.
            Some(dir) if !dir.is_empty() => vec![PathBuf::from(dir)],
            _ => usual_places(path),
        };
        let mut found: Vec<Binaries> = places.iter().filter_map(|dir| inspect(dir)).collect();
        // Stable, so that of equal versions the one earlier in the list (PATH first) is kept in front.
        found.sort_by_key(|binaries| std::cmp::Reverse(binaries.version));
        Self { places, found }
    }

    /// The newest one, if it is new enough.
    pub(super) fn newest(&self) -> Result<Binaries, EmbeddedError> {
        match self.found.first() {
            Some(binaries) if binaries.major() >= OLDEST => Ok(binaries.clone()),
            _ => Err(EmbeddedError::NotFound {
                oldest: OLDEST,
                places: list(self.places.iter().map(|place| place.display().to_string())),
                rejected: match self.installed() {
                    installed if installed.is_empty() => installed,
                    installed => format!("; found only {installed}"),
                },
            }),
        }
    }

    /// The newest minor version of `major`: a data directory can be served by no other.
    pub(super) fn of_major(&self, major: u32) -> Option<Binaries> {
        self.found.iter().find(|binaries| binaries.major() == major).cloned()
    }

    /// What is installed, for a person.
    pub(super) fn installed(&self) -> String {
        list(self.found.iter().map(|b| format!("{}.{} in {}", b.version.0, b.version.1, b.dir.display())))
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

fn usual_places(path: Option<OsString>) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> =
        path.iter().flat_map(std::env::split_paths).filter(|dir| dir.is_absolute()).collect();
    places.extend(bins_below("/usr/lib/postgresql", ""));
    places.extend(bins_below("/usr", "pgsql-"));
    places.extend(bins_below("/opt/homebrew/opt", "postgresql"));
    places.extend(bins_below("/usr/local/opt", "postgresql"));
    places.push("/usr/local/pgsql/bin".into());
    places
}

/// `parent/PREFIX*/bin`; where there is none, the pattern itself, so that the error can say where we looked.
fn bins_below(parent: &str, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut bins: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path().join("bin"))
        .filter(|bin| bin.is_dir())
        .collect();
    if bins.is_empty() {
        bins.push(Path::new(parent).join(format!("{prefix}*/bin")));
    }
    bins
}

/// The PostgreSQL in `dir`, if there is a whole server (a client package has no `initdb`) and it runs.
fn inspect(dir: &Path) -> Option<Binaries> {
    let postgres = dir.join("postgres");
    if !postgres.is_file() || !dir.join("initdb").is_file() {
        return None;
    }
    let output = Command::new(postgres).arg("--version").stdin(Stdio::null()).output().ok()?;
    let version = parse_version(&String::from_utf8_lossy(&output.stdout))?;
    Some(Binaries { dir: dir.to_path_buf(), version })
}

/// `postgres (PostgreSQL) 15.14 (Debian …)`, also `17beta1` and `18devel`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let word = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
    let mut numbers = word.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    // A beta has no minor version; it counts as the oldest of its major.
    let minor = if word.contains('.') { numbers.next()?.parse().ok()? } else { 0 };
    Some((major, minor))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A directory with programs that say they are PostgreSQL `version`.
    fn fake(root: &Path, name: &str, version: &str) -> PathBuf {
        let dir = root.join(name);
        fs::create_dir_all(&dir).unwrap();
        for program in ["postgres", "initdb"] {
            let file = dir.join(program);
            fs::write(&file, format!("#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        dir
    }

    #[test]
    fn versions_are_read_in_all_their_spellings() {
        assert_eq!(parse_version("postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"), Some((15, 14)));
        assert_eq!(parse_version("postgres (PostgreSQL) 17beta1"), Some((17, 0)));
        assert_eq!(parse_version("postgres (PostgreSQL) 18devel"), Some((18, 0)));
        assert_eq!(parse_version("command not found"), None);
    }

    #[test]
    fn the_newest_wins_wherever_it_is() {
        let root = tempfile::tempdir().unwrap();
        let path = std::env::join_paths([
            fake(root.path(), "old", "9000.1"),
            fake(root.path(), "new", "9001.2"),
            fake(root.path(), "middle", "9001.1"),
        ])
        .unwrap();
        let search = Search::new(None, Some(path));
        assert_eq!(search.newest().unwrap().dir, root.path().join("new"));
        assert_eq!(search.of_major(9000).unwrap().dir, root.path().join("old"));
        assert_eq!(search.of_major(8999), None);
    }

    #[test]
    fn the_chosen_one_is_not_replaced_by_a_better_one() {
        let root = tempfile::tempdir().unwrap();
        let chosen = fake(root.path(), "chosen", "14.1");
        let path = fake(root.path(), "path", "9001.2").into_os_string();
        let search = Search::new(Some(chosen.clone().into()), Some(path));
        assert_eq!(search.newest().unwrap(), Binaries { dir: chosen, version: (14, 1) });
    }

    #[test]
    fn one_that_is_too_old_is_named_and_refused() {
        let root = tempfile::tempdir().unwrap();
        let old = fake(root.path(), "old", "13.20");
        let error = Search::new(Some(old.clone().into()), None).newest().unwrap_err().to_string();
        assert!(error.contains(&format!("found only 13.20 in {}", old.display())), "{error}");
        assert!(error.contains("apt-get install postgresql"), "{error}");
    }

    #[test]
    fn a_client_without_a_server_is_passed_over() {
        let root = tempfile::tempdir().unwrap();
        let dir = fake(root.path(), "client", "17.1");
        fs::remove_file(dir.join("initdb")).unwrap();
        let error = Search::new(Some(dir.clone().into()), None).newest().unwrap_err().to_string();
        assert!(error.contains(&format!("looked in {}", dir.display())), "{error}");
    }

    #[test]
    fn this_machine_has_one() {
        let binaries = find_binaries().unwrap();
        assert!(binaries.program("initdb").is_file());
        assert!(binaries.major() >= OLDEST);
    }
}
