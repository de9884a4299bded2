//! `musterd queue …`: the lanes of work, paused and resumed.

use super::{Exit, Global, screen, task::in_words};
use anyhow::Result;
use clap::Subcommand;
use comfy_table::Cell;
use musterd::store::queues;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  musterd queue list\n  musterd queue pause default")]
pub(super) enum QueueCommand {
    /// List the queues and what is in them.
    #[command(after_help = "Examples:\n  musterd queue list\n  musterd queue list --json")]
    List,
    /// Start nothing new in a queue, on any replica, until it is resumed.
    #[command(after_help = "Examples:\n  musterd queue pause default")]
    Pause {
        #[arg(value_parser = super::submit::name)]
        name: String,
    },
    /// Let a paused queue go on.
    #[command(after_help = "Examples:\n  musterd queue resume default")]
    Resume {
        #[arg(value_parser = super::submit::name)]
        name: String,
    },
}

impl QueueCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let report = |name: &str, paused: bool| match global.json {
            true => screen::json(&serde_json::json!({ "name": name, "paused": paused })),
            false => screen::line(&format!("queue {name} is {}", if paused { "paused" } else { "open" })),
        };
        match self {
            Self::List => print(global, &queues::list(&*client).await?)?,
            Self::Pause { name } => {
                let is_known = queues::is_known(&*client, &name).await?;
                queues::pause(&*client, &name, None).await.map_err(in_words)?;
                report(&name, true)?;
                if !is_known {
                    note_unused(&name);
                }
            }
            Self::Resume { name } => {
                queues::resume(&*client, &name, None).await.map_err(in_words)?;
                report(&name, false)?;
            }
        }
        client.close().await;
        Ok(Exit::Done)
    }
}

/// It may be a slip of the pen. Pausing a queue before anything is in it is good practice all the same.
#[expect(clippy::print_stderr, reason = "a note beside the answer, seen by a person")]
fn note_unused(name: &str) {
    eprintln!("musterd: note: queue {name} has not been used yet; it stays paused for its first user");
}

fn print(global: &Global, queues: &[queues::Shown]) -> Result<()> {
    if global.json {
        return screen::json(&queues);
    }
    let mut table = screen::table([
        screen::whole("queue"),
        screen::whole("state"),
        screen::spare("mode", 7),
        screen::spare("fibers", 6),
        screen::spare("workers", 1),
        screen::spare("tasks", 2),
        screen::spare("running", 3),
        screen::spare("batches", 4),
        screen::whole("rows waiting"),
        screen::spare("rows held", 5),
    ]);
    for queue in queues {
        let state = match queue.paused {
            true => screen::word("paused", screen::Tone::Doubtful),
            false => screen::word("open", screen::Tone::Good),
        };
        table.add_row([
            Cell::new(&queue.name),
            state,
            Cell::new(&queue.mode),
            Cell::new(queue.fibers.map(|fibers| fibers.to_string()).unwrap_or_default()),
            Cell::new(queue.workers),
            Cell::new(screen::grouped(queue.tasks_queued + queue.tasks_scheduled)),
            Cell::new(screen::grouped(queue.tasks_running)),
            Cell::new(screen::grouped(queue.batches_open)),
            Cell::new(screen::grouped(queue.rows_queued)),
            Cell::new(screen::grouped(queue.rows_held)),
        ]);
    }
    table.print()
}
