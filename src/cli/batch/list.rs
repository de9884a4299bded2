//! `musterd batch list`: the newest first, a page at a time.

use super::show;
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::{
    config::Config,
    store::listing::{self, Filter},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch list
  musterd batch list --state running --state held --queue bulk
  musterd batch list --command charge --limit 50 --before 1200     the page after batch 1200";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct List {
    /// Only batches in this state. May be repeated.
    #[arg(long, value_name = "STATE", value_parser = ["held", "queued", "running", "succeeded", "failed", "aborted"])]
    state: Vec<String>,
    /// Only batches of this command.
    #[arg(long)]
    command: Option<String>,
    /// Only batches of this queue.
    #[arg(long)]
    queue: Option<String>,
    /// How many.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
    /// Only batches with a smaller id: the next page.
    #[arg(long, value_name = "ID")]
    before: Option<i64>,
}

impl List {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let client = global.connect(&config.database).await?;
        let filter = Filter {
            states: Some(self.state).filter(|states| !states.is_empty()),
            command: self.command,
            queue: self.queue,
            before: self.before,
            limit: self.limit,
        };
        let found = listing::batches(&client, &filter).await?;
        client.close().await;
        let next = found.last().filter(|_| found.len() as i64 == filter.limit).map(|last| last.id);
        if global.json {
            screen::json(&serde_json::json!({ "batches": found, "next_before": next }))?;
            return Ok(Exit::Done);
        }
        let [batch, state, command, queue, rows, queued, running, succeeded, failed, aborted] = show::COLUMNS;
        let created = screen::spare("created", 6);
        let mut table = screen::table([
            batch, state, command, queue, rows, queued, running, succeeded, failed, aborted, created,
        ]);
        for progress in &found {
            let created = format!("{:.0}", progress.created_at);
            table.add_row(show::cells(progress).into_iter().chain([Cell::new(created)]));
        }
        table.print()?;
        if let Some(next) = next {
            screen::line(&format!("more: --before {next}"))?;
        }
        Ok(Exit::Done)
    }
}
