//! `musterd batch append`: more rows for a batch that is held or running.

use super::open;
use crate::cli::{
    Exit, Global,
    input::{InputFile, Opened, SUBMITTING, with_bar},
    screen,
};
use anyhow::{Context, Result};
use clap::Args;
use indicatif::HumanCount;
use musterd::{
    config::Config,
    flow::{
        input::Limits,
        submit::{self, Given, Meter},
    },
};

const EXAMPLES: &str = "\
Examples:
  musterd submit monday.csv --command charge --hold     prints the batch's id, say 17
  musterd batch append 17 tuesday.csv
  musterd batch release 17

All rows of the file are added, or none. A batch that has ended or is being aborted takes no more.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Append {
    /// The batch's id.
    id: i64,
    /// The same key with the same rows adds them once, however often it is sent; with other rows it is refused.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    #[command(flatten)]
    input: InputFile,
}

impl Append {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (mut client, _) = open(global, config, self.id).await?;
        let Opened { source, format, size } = self.input.open()?;
        let limits = Limits { max_row_bytes: config.submit.max_row_bytes };
        let (meter, exported) = (Meter::default(), self.input.exported);
        let given = Given { source, format, limits, exported };
        let key = self.idempotency_key.as_deref();
        let appending = submit::append(&mut client, self.id, key, given, meter.clone());
        let appended = with_bar(SUBMITTING, appending, &meter, size).await;
        let appended = appended.with_context(|| format!("{} was not appended", self.input.shown()))?;
        client.close().await;
        match global.json {
            true => screen::json(&appended)?,
            false if appended.repeated => screen::line(&format!(
                "batch {}: the key stands for these rows already, nothing was added; it had {} rows then",
                appended.id,
                HumanCount(appended.rows as u64),
            ))?,
            false => screen::line(&format!(
                "batch {}: {} rows added, {} in all",
                appended.id,
                HumanCount(appended.added),
                HumanCount(appended.rows as u64),
            ))?,
        }
        Ok(Exit::Done)
    }
}
