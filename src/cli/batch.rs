//! `musterd batch …`: seeing a batch.

use super::{Exit, Global, screen};
use anyhow::{Result, bail};
use clap::Subcommand;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use musterd::store::{
    batches::{self, Progress},
    connect::OneShot,
};
use std::time::{Duration, Instant};

const SHOW_EXAMPLES: &str = "\
Examples:
  musterd batch show 17
  musterd batch show 17 --json";

#[derive(Debug, Subcommand)]
pub(super) enum BatchCommand {
    /// Show a batch: its state and how many rows are queued, running and done.
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// The batch's id.
        id: i64,
    },
}

impl BatchCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        match self {
            Self::Show { id } => {
                let client = global.connect(&loaded.config.database).await?;
                let progress = find(&client, id).await?;
                client.close().await;
                print(global, &progress)?;
                Ok(Exit::Done)
            }
        }
    }
}

async fn find(client: &OneShot, id: i64) -> Result<Progress> {
    match batches::progress(&**client, id).await? {
        Some(progress) => Ok(progress),
        None => bail!("there is no batch {id}"),
    }
}

fn print(global: &Global, progress: &Progress) -> Result<()> {
    if global.json {
        return screen::json(progress);
    }
    let mood = match progress.state.as_str() {
        "succeeded" => screen::Mood::Good,
        "failed" | "aborted" => screen::Mood::Bad,
        _ => screen::Mood::Plain,
    };
    let mut table = screen::table([
        "batch",
        "state",
        "command",
        "rows",
        "queued",
        "running",
        "succeeded",
        "failed",
        "aborted",
    ]);
    let count = |number: i32| comfy_table::Cell::new(screen::grouped(number));
    table.add_row([
        comfy_table::Cell::new(progress.id),
        screen::word(&progress.state, mood),
        comfy_table::Cell::new(&progress.command),
        count(progress.rows),
        count(progress.queued),
        count(progress.running),
        count(progress.succeeded),
        count(progress.failed),
        count(progress.aborted),
    ]);
    screen::print(&table)
}

/// How often a waiting command asks; the answer costs the same for ten rows and ten million.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Follows a batch to its end, with a bar on a terminal. Done only when it succeeded.
pub(super) async fn wait(global: &Global, database: &musterd::store::Config, id: i64) -> Result<Exit> {
    let client = global.connect(database).await?;
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{msg} {wide_bar} {human_pos}/{human_len} {per_sec} {eta}")
    {
        bar.set_style(style);
    }
    let began = Instant::now();
    let progress = loop {
        let progress = find(&client, id).await?;
        bar.set_length(progress.rows as u64);
        bar.set_position(progress.done() as u64);
        let failed =
            if progress.failed > 0 { format!(" ({} failed)", progress.failed) } else { String::new() };
        bar.set_message(format!("{}{failed}", progress.state));
        if progress.is_over() {
            break progress;
        }
        tokio::time::sleep(ASK_EVERY).await;
    };
    bar.finish_and_clear();
    client.close().await;
    print(global, &progress)?;
    if !global.json {
        let rate = f64::from(progress.rows) / began.elapsed().as_secs_f64().max(1e-3);
        let took = HumanDuration(began.elapsed());
        screen::line(&format!("{} after {took}, {} rows/s", progress.state, screen::grouped(rate as i64)))?;
    }
    Ok(if progress.state == "succeeded" { Exit::Done } else { Exit::Failed })
}
