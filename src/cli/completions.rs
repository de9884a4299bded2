//! `musterd completions SHELL`: a script for the shell, made from the commands themselves.

use super::{Cli, Exit};
use anyhow::Result;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

const EXAMPLES: &str = "\
Examples:
  musterd completions bash > musterd.bash        then: source musterd.bash
  musterd completions zsh > _musterd             in a directory of $fpath
  musterd completions fish > musterd.fish        in ~/.config/fish/completions";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Completions {
    /// Which shell.
    shell: Shell,
}

impl Completions {
    pub(super) fn execute(self) -> Result<Exit> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "musterd", &mut script);
        match std::io::stdout().write_all(&script) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(Exit::Done),
        }
    }
}
