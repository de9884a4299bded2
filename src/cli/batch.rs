//! `musterd batch …`: seeing and steering batches. One file per command.

mod append;
mod data;
mod download;
mod errors;
mod export;
mod follow;
mod list;
mod outputs;
mod redrive;
mod rows;
mod show;
mod steer;

pub(super) use follow::{View, follow, wait};
pub(super) use show::summary;

use super::{Exit, Global};
use anyhow::{Result, bail};
use clap::Subcommand;
use musterd::{
    config::Config,
    store::{
        batches::{self, Progress},
        connect::OneShot,
    },
};

const EXAMPLES: &str = "\
Examples:
  musterd batch list --state running
  musterd batch show 17
  musterd batch rows 17 --failed";

#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub(super) enum BatchCommand {
    /// List batches, the newest first.
    List(list::List),
    /// Show a batch: its state, how many rows are queued, running and done, its outputs.
    Show(show::Show),
    /// Follow a batch to its end with a live bar; exit code 1 unless it succeeded.
    Watch(follow::Watch),
    /// Show rows of a batch: line, state, attempts, error.
    Rows(rows::Rows),
    /// Show what rows of a batch failed with, in groups, the largest first.
    Errors(errors::Errors),
    /// Show the output files of a batch, or download and check them.
    Outputs(outputs::Outputs),
    /// Write rows with their results and errors to a file, to be corrected and submitted again.
    Export(export::Export),
    /// Keep a batch from being claimed; what runs, runs on.
    Hold(steer::Hold),
    /// Let a held batch go.
    Release(steer::Release),
    /// Add the rows of a file to a batch that is held or running.
    Append(append::Append),
    /// Run failed rows of an ended batch again, in place: all, or some of them.
    Redrive(Box<redrive::Redrive>),
    /// Stop a batch for good: rows that have not ended are aborted.
    Abort(steer::Abort),
    /// Keep the rows and results of a batch, however old it gets.
    HoldData(data::HoldData),
    /// Let the rows and results of a batch go again when retention says so.
    ReleaseData(data::ReleaseData),
}

impl BatchCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let config = global.load()?.config;
        match self {
            Self::List(command) => command.execute(global, &config).await,
            Self::Show(command) => command.execute(global, &config).await,
            Self::Watch(command) => command.execute(global, &config).await,
            Self::Rows(command) => command.execute(global, &config).await,
            Self::Errors(command) => command.execute(global, &config).await,
            Self::Outputs(command) => command.execute(global, &config).await,
            Self::Export(command) => command.execute(global, &config).await,
            Self::Hold(command) => command.execute(global, &config).await,
            Self::Release(command) => command.execute(global, &config).await,
            Self::Append(command) => command.execute(global, &config).await,
            Self::Redrive(command) => command.execute(global, &config).await,
            Self::Abort(command) => command.execute(global, &config).await,
            Self::HoldData(command) => command.execute(global, &config).await,
            Self::ReleaseData(command) => command.execute(global, &config).await,
        }
    }
}

/// A connection, and the batch as it is now; an id that is none is reported before anything else is done.
async fn open(global: &Global, config: &Config, id: i64) -> Result<(OneShot, Progress)> {
    let client = global.connect(&config.database).await?;
    let progress = find(&client, id).await?;
    Ok((client, progress))
}

async fn find(client: &OneShot, id: i64) -> Result<Progress> {
    match batches::progress(&**client, id).await? {
        Some(progress) => Ok(progress),
        None => bail!("there is no batch {id}"),
    }
}
