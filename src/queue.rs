//! A queue: a named lane of work with a number of fibers.

use crate::problems::Problems;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// The queue that work goes to unless another is named.
pub const DEFAULT: &str = "default";

/// The largest block a queue may ask for: its rows are in memory together.
const MAX_BLOCK: u32 = 100_000;

/// A `[queues.NAME]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Rows and tasks that run at the same time in one replica.
    pub fibers: NonZeroU32,
    pub mode: Mode,
    /// The largest block; smaller ones as the work needs.
    pub block_size: NonZeroU32,
}

/// What the fibers of a queue may work on at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Everything, in priority order.
    #[default]
    Parallel,
    /// The first unfinished scope's children; top-level tasks while there is none.
    Structured,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            fibers: NonZeroU32::new(8).expect("eight is not zero"),
            mode: Mode::default(),
            block_size: NonZeroU32::new(500).expect("five hundred is not zero"),
        }
    }
}

impl Config {
    pub(crate) fn check(&self, name: &str, problems: &mut Problems) {
        let section = format!("queues.{name}");
        problems.unless(
            is_valid_name(name),
            &section,
            "a queue's name is letters, digits and _-.: only, at most 100",
        );
        problems.unless(
            self.block_size.get() <= MAX_BLOCK,
            &format!("{section}.block_size"),
            format!("must be at most {MAX_BLOCK}: the rows of a block are in memory together"),
        );
        problems.unless(
            self.fibers.get() <= 10_000,
            &format!("{section}.fibers"),
            "must be at most 10000; add replicas instead",
        );
    }
}

/// Whether a queue or command name is one we take: short, printable, safe in keys and file names.
pub fn is_valid_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    (1..=100).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && name.chars().all(allowed)
}
