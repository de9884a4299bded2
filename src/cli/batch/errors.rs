//! `musterd batch errors`: the failed rows of a batch by what they failed with.

use super::open;
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::{
    config::Config,
    store::errors::{self, Group},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch errors 17
  musterd batch errors 17 --json
  musterd batch errors 17 --generation 1     what had failed before the first redrive
  musterd batch rows 17 --error 6f1c8a3e     the rows of a group
  musterd batch redrive 17 --error 6f1c8a3e  run them again";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Errors {
    /// The batch's id.
    id: i64,
    /// What failed in this generation, also rows that were run again since.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    generation: Option<i32>,
    /// How many groups, the largest first.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i32).range(1..=1_000))]
    limit: i32,
}

impl Errors {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, progress) = open(global, config, self.id).await?;
        let found = errors::of_batch(&*client, self.id, self.generation, self.limit).await?;
        client.close().await;
        if global.json {
            let generation = self.generation.unwrap_or(progress.generation);
            screen::json(
                &serde_json::json!({ "batch": self.id, "generation": generation, "errors": found }),
            )?;
            return Ok(Exit::Done);
        }
        print(&found)?;
        if found.len() == self.limit as usize {
            screen::note("there may be smaller groups: --limit shows more");
        }
        Ok(Exit::Done)
    }
}

fn print(groups: &[Group]) -> Result<()> {
    let mut table = screen::table([
        screen::whole("group"),
        screen::whole("count"),
        screen::whole("share"),
        screen::spare("lines", 2),
        screen::spare("attempts", 3),
        screen::spare("code", 1),
        screen::prose("sample"),
    ]);
    for group in groups {
        let lines = match (group.first_line, group.last_line) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first} … {last}"),
        };
        table.add_row([
            Cell::new(&group.group),
            Cell::new(screen::grouped(group.count)),
            Cell::new(screen::share(group.share)),
            Cell::new(lines),
            Cell::new(group.attempts),
            Cell::new(group.code.as_deref().unwrap_or_default()),
            Cell::new(screen::excerpt(&group.sample)),
        ]);
    }
    table.print()
}
