//! `musterd batch redrive`: failed rows again, all or some of them; and what became of them.

use super::open;
use crate::cli::{
    Exit, Global, screen,
    submit::{context, name},
};
use anyhow::{Result, bail};
use clap::Args;
use musterd::{
    config::Config,
    error_group::ErrorGroup,
    json::Json,
    lines::Lines,
    store::steering::{self, Outcome, Preview},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch redrive 17
  musterd batch redrive 17 --error 6f1c8a3e --dry-run
  musterd batch redrive 17 --error 6f1c8a3e --lines 1-5000
  musterd batch redrive 17 --where '{\"country\": \"DE\"}' --command charge_v2
  musterd batch watch 17";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Redrive {
    /// The batch's id.
    id: i64,
    /// Only rows that failed with an error of this group, as "batch errors" shows them. May be repeated.
    #[arg(long, value_name = "GROUP")]
    error: Vec<ErrorGroup>,
    /// Only these lines, such as 5-90,200.
    #[arg(long, value_name = "LINES", value_parser = Lines::parse)]
    lines: Option<Lines>,
    /// Only rows whose input contains this JSON.
    #[arg(long = "where", value_name = "JSON", value_parser = context)]
    input: Option<Json>,
    /// Only if the batch is still in this generation: a repeat is then refused.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    generation: Option<i32>,
    /// What every row's handler gets from now on, in place of the batch's context.
    #[arg(long, value_name = "JSON", value_parser = context)]
    context: Option<Json>,
    /// The command that runs the rows from now on.
    #[arg(long, value_name = "COMMAND", value_parser = name)]
    command: Option<String>,
    /// Show what would run again, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

impl Redrive {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, progress) = open(global, config, self.id).await?;
        let Self { id, error, lines, input, generation, context, command, dry_run } = self;
        let what = steering::Redrive { groups: error, lines, input, generation, context, command };
        if dry_run {
            let preview = steering::preview(&client, id, &what).await?;
            client.close().await;
            show(global, &preview)?;
            return Ok(Exit::Done);
        }
        let redriven = steering::redrive(&client, id, &what, None).await?;
        client.close().await;
        if global.json {
            screen::json(&redriven)?;
        } else if redriven.rows > 0 {
            let rows = screen::counted(redriven.rows.into(), "row runs", "rows run");
            screen::line(&format!("batch {id}: {rows} again, in generation {}", progress.generation + 1))?;
        } else if !progress.is_over() {
            bail!(
                "batch {id} is {}: only one that has ended is redriven, and nothing was changed",
                redriven.state
            );
        } else {
            screen::line(&format!("batch {id}: {}, no failed row to run again", redriven.state))?;
        }
        Ok(Exit::Done)
    }
}

fn show(global: &Global, preview: &Preview) -> Result<()> {
    if global.json {
        return screen::json(preview);
    }
    let rows = screen::counted(preview.rows.into(), "row", "rows");
    screen::line(&format!("batch {}: {rows} would run again; nothing was changed", preview.id))?;
    if !preview.first_lines.is_empty() {
        let lines: Vec<String> = preview.first_lines.iter().map(ToString::to_string).collect();
        let more = if preview.rows as usize > lines.len() { ", …" } else { "" };
        screen::line(&format!("lines {}{more}", lines.join(", ")))?;
    }
    let groups: Vec<serde_json::Value> = serde_json::from_str(preview.errors.text())?;
    for group in groups {
        let count = group["count"].as_i64().unwrap_or_default();
        screen::line(&format!("error group {}: {}", screen::value(&group["group"]), screen::grouped(count)))?;
    }
    Ok(())
}

/// What became of the rows of a redrive, in a sentence.
pub(super) fn headline(outcome: &Outcome) -> String {
    let number = |rows: i32| screen::grouped(rows);
    let mut text = format!(
        "generation {}: of {} that had failed {} are fixed, {} fail as before, {} fail otherwise",
        outcome.generation,
        number(outcome.redriven),
        number(outcome.fixed),
        number(outcome.same),
        number(outcome.otherwise)
    );
    if outcome.left_over > 0 {
        text.push_str(&format!(", {} have no outcome", number(outcome.left_over)));
    }
    text
}
