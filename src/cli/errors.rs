//! `musterd errors`: what rows of all batches failed with, by command and group.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::store::errors::{self, Common};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  musterd errors
  musterd errors --since 24h --command charge
  musterd errors --since 7d --json";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Errors {
    /// Rows that failed within this time, and were not run again.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    since: Duration,
    /// Only batches of this command.
    #[arg(long)]
    command: Option<String>,
    /// How many groups, the largest first.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i32).range(1..=1_000))]
    limit: i32,
}

impl Errors {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let since = self.since.min(LONGEST).as_secs_f64();
        let found = errors::since(&*client, since, self.command.as_deref(), self.limit).await?;
        client.close().await;
        match global.json {
            true => screen::json(&serde_json::json!({ "errors": found }))?,
            false => print(&found)?,
        }
        Ok(Exit::Done)
    }
}

/// A hundred years: what is longer is a slip, and near what a timestamp can hold.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);

fn print(groups: &[Common]) -> Result<()> {
    let mut table = screen::table([
        screen::whole("command"),
        screen::whole("group"),
        screen::whole("count"),
        screen::whole("share"),
        screen::spare("batches", 2),
        screen::spare("last batch", 1),
        screen::spare("code", 3),
        screen::prose("sample"),
    ]);
    for group in groups {
        table.add_row([
            Cell::new(&group.command),
            Cell::new(&group.group),
            Cell::new(screen::grouped(group.count)),
            Cell::new(screen::share(group.share)),
            Cell::new(screen::grouped(group.batches)),
            Cell::new(group.last_batch),
            Cell::new(group.code.as_deref().unwrap_or_default()),
            Cell::new(screen::excerpt(&group.sample)),
        ]);
    }
    table.print()
}
