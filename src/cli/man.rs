//! `musterd man DIR`: a manual page for every command, made from the commands themselves.

use super::{Cli, Exit, Global, screen};
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  musterd man ./man
  man ./man/musterd-submit.1";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Man {
    /// Where to write them; made if it is not there.
    dir: PathBuf,
}

impl Man {
    pub(super) fn execute(self, global: &Global) -> Result<Exit> {
        let dir = &self.dir;
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        clap_mangen::generate_to(Cli::command(), dir)
            .with_context(|| format!("cannot write the manual pages into {}", dir.display()))?;
        match global.json {
            true => screen::json(&serde_json::json!({ "dir": dir }))?,
            false => screen::line(&format!("the manual pages are in {}", dir.display()))?,
        }
        Ok(Exit::Done)
    }
}
