//! `musterd batch rows`: the rows of a batch from a line on, all or those in one state.

use super::open;
use crate::cli::{Exit, Global, screen, task::in_words};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::{
    config::Config,
    error_group::ErrorGroup,
    store::{
        listing::{self, RowView, Which},
        retention,
    },
};

const EXAMPLES: &str = "\
Examples:
  musterd batch rows 17 --failed
  musterd batch rows 17 --error 6f1c8a3e
  musterd batch rows 17 --generation 1            what failed before the first redrive
  musterd batch rows 17 --from 100000 --limit 100
  musterd batch rows 17 --state running --json";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Rows {
    /// The batch's id.
    id: i64,
    /// Only rows in this state.
    #[arg(long, value_name = "STATE", value_parser = ["queued", "running", "succeeded", "failed", "aborted"], group = "which")]
    state: Option<String>,
    /// Only rows that failed.
    #[arg(long, group = "which")]
    failed: bool,
    /// Only rows that failed with an error of this group, as "batch errors" shows them.
    #[arg(long, value_name = "GROUP", group = "which")]
    error: Option<ErrorGroup>,
    /// Only rows that failed in this generation, those that were run again since among them.
    #[arg(long, value_name = "N", group = "which", value_parser = clap::value_parser!(i32).range(1..))]
    generation: Option<i32>,
    /// Only rows that succeeded.
    #[arg(long, group = "which")]
    succeeded: bool,
    /// Only rows that wait.
    #[arg(long, group = "which")]
    queued: bool,
    /// The first line to show.
    #[arg(long, value_name = "LINE", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..))]
    from: i32,
    /// How many.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
}

/// What of a payload fits in a table.
const SHOWN: usize = 60;

impl Rows {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, _) = open(global, config, self.id).await?;
        let page = listing::rows(&client, self.id, self.which(), self.from, self.limit, usize::MAX).await?;
        retention::check_data(&*client, self.id).await.map_err(in_words)?;
        client.close().await;
        if global.json {
            screen::json(&page)?;
            return Ok(Exit::Done);
        }
        print(&page.rows)?;
        if let Some(next) = page.next_from {
            screen::line(&format!("more: --from {next}"))?;
        }
        Ok(Exit::Done)
    }

    fn which(&self) -> Which {
        match self.state.as_deref() {
            Some("queued") => Which::Queued,
            Some("running") => Which::Running,
            Some("succeeded") => Which::Succeeded,
            Some("failed") => Which::Failed,
            Some(_) => Which::Aborted,
            None if self.failed => Which::Failed,
            None if let Some(group) = self.error => Which::InGroup(group),
            None if let Some(generation) = self.generation => Which::FailedIn(generation),
            None if self.succeeded => Which::Succeeded,
            None if self.queued => Which::Queued,
            None => Which::All,
        }
    }
}

fn print(rows: &[RowView]) -> Result<()> {
    let mut table = screen::table([
        screen::whole("line"),
        screen::whole("state"),
        screen::spare("attempt", 3),
        screen::prose("error"),
        screen::spare("input", 1),
        screen::spare("result", 2),
    ]);
    for row in rows {
        let tone = match row.state {
            "succeeded" => screen::Tone::Good,
            "failed" | "aborted" => screen::Tone::Bad,
            _ => screen::Tone::Plain,
        };
        table.add_row([
            Cell::new(row.line),
            screen::word(row.state, tone),
            Cell::new(row.attempt.map(|attempt| attempt.to_string()).unwrap_or_default()),
            // Whole: it is what people came for. On one line, so that a row is one.
            Cell::new(screen::one_line(row.error.as_deref().unwrap_or_default())),
            Cell::new(cut(row.input.text())),
            Cell::new(cut(row.result.as_ref().map_or("", |result| result.text()))),
        ]);
    }
    table.print()
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
