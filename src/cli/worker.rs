//! `musterd worker …`: who works here, who is going, who died.

use super::{Exit, Global, screen};
use anyhow::{Result, bail};
use clap::Subcommand;
use musterd::state::WorkerState;
use musterd::store::workers::{self, Listed};
use std::time::Duration;

const LIST_EXAMPLES: &str = "\
Examples:
  musterd worker list
  musterd worker list --json | jq '.[] | select(.state == \"dead\")'";

const SHOW_EXAMPLES: &str = "\
Examples:
  musterd worker show web-1-4711-1763350000000000000";

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  musterd worker list\n  musterd worker list --json")]
pub(super) enum WorkerCommand {
    /// List the workers of the last day: alive, draining, dead and stopped, with what they hold.
    #[command(after_help = LIST_EXAMPLES)]
    List,
    /// Show one worker.
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// The worker's id, as `worker list` gives it.
        id: String,
    },
}

impl WorkerCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let wanted = match &self {
            Self::List => None,
            Self::Show { id } => Some(id.as_str()),
        };
        let found = workers::list(&client, wanted).await?;
        client.close().await;
        match (wanted, found.as_slice()) {
            (None, all) => print(global, all)?,
            (Some(_), [worker]) => print_one(global, worker)?,
            (Some(id), _) => bail!("there is no worker {id}; `musterd worker list` shows all"),
        }
        Ok(Exit::Done)
    }
}

fn print(global: &Global, found: &[Listed]) -> Result<()> {
    if global.json {
        return screen::json(&found);
    }
    let mut table = screen::table([
        screen::whole("worker"),
        screen::whole("state"),
        screen::spare("queues", 3),
        screen::spare("blocks", 4),
        screen::spare("rows", 2),
        screen::spare("last beat", 1),
        screen::spare("version", 5),
    ]);
    for worker in found {
        table.add_row([
            comfy_table::Cell::new(&worker.id),
            state(worker),
            comfy_table::Cell::new(worker.queues.join(",")),
            comfy_table::Cell::new(screen::grouped(worker.blocks)),
            comfy_table::Cell::new(screen::grouped(worker.rows)),
            comfy_table::Cell::new(last_beat(worker)),
            comfy_table::Cell::new(&worker.version),
        ]);
    }
    table.print()
}

fn print_one(global: &Global, worker: &Listed) -> Result<()> {
    if global.json {
        return screen::json(worker);
    }
    let mut table = screen::table([screen::whole("worker"), screen::prose(&worker.id)]);
    let mut row = |name: &str, cell: comfy_table::Cell| {
        table.add_row([comfy_table::Cell::new(name), cell]);
    };
    row("state", state(worker));
    row("host", comfy_table::Cell::new(&worker.host));
    row("pid", comfy_table::Cell::new(worker.pid));
    row("version", comfy_table::Cell::new(&worker.version));
    row("queues", comfy_table::Cell::new(worker.queues.join(", ")));
    row("commands", comfy_table::Cell::new(worker.commands.join(", ")));
    row("blocks in hand", comfy_table::Cell::new(screen::grouped(worker.blocks)));
    row("rows in hand", comfy_table::Cell::new(screen::grouped(worker.rows)));
    row("tasks in hand", comfy_table::Cell::new(screen::grouped(worker.tasks)));
    row("started", comfy_table::Cell::new(worker.started_at));
    row("last beat", comfy_table::Cell::new(last_beat(worker)));
    if let Some(ended) = worker.ended_at {
        row("ended", comfy_table::Cell::new(ended));
    }
    table.print()
}

fn state(worker: &Listed) -> comfy_table::Cell {
    let tone = match worker.state {
        WorkerState::Alive => screen::Tone::Good,
        WorkerState::Draining => screen::Tone::Doubtful,
        WorkerState::Dead => screen::Tone::Bad,
        WorkerState::Stopped => screen::Tone::Plain,
    };
    screen::word(worker.state.as_str(), tone)
}

fn last_beat(worker: &Listed) -> String {
    format!("{} ago", humantime::format_duration(Duration::from_secs(worker.last_beat_seconds as u64)))
}
