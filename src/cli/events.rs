//! `musterd events`: what operators did, and what Muster did unasked.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::store::events::{self, Event, Filter, KINDS};

const EXAMPLES: &str = "\
Examples:
  musterd events
  musterd events --batch 17
  musterd events --kind abort --limit 50";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Events {
    /// Only those of this batch.
    #[arg(long, value_name = "ID")]
    batch: Option<i64>,
    /// Only those of this task.
    #[arg(long, value_name = "ID", conflicts_with = "batch")]
    task: Option<i64>,
    /// Only those of this kind.
    #[arg(long, value_name = "KIND", value_parser = KINDS)]
    kind: Option<String>,
    /// How many.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
    /// Only events with a smaller id: the next page.
    #[arg(long, value_name = "ID")]
    before: Option<i64>,
}

impl Events {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let Self { batch, task, kind, limit, before } = self;
        let filter = Filter { batch, task, kind, before, limit };
        let found = events::list(&*client, &filter).await?;
        client.close().await;
        let next = found.last().filter(|_| found.len() as i64 == limit).map(|last| last.id);
        if global.json {
            screen::json(&serde_json::json!({ "events": found, "next_before": next }))?;
            return Ok(Exit::Done);
        }
        print(&found)?;
        if let Some(next) = next {
            screen::line(&format!("more: --before {next}"))?;
        }
        Ok(Exit::Done)
    }
}

fn print(events: &[Event]) -> Result<()> {
    let mut table = screen::table([
        screen::spare("event", 2),
        screen::whole("at"),
        screen::whole("kind"),
        screen::whole("of"),
        screen::whole("actor"),
        screen::spare("detail", 1),
    ]);
    for event in events {
        let actor = match &event.client {
            Some(client) => format!("{client} by {}", event.actor),
            None => event.actor.clone(),
        };
        table.add_row([
            Cell::new(event.id),
            Cell::new(format!("{:.0}", event.at)),
            Cell::new(&event.kind),
            Cell::new(subject(event)),
            Cell::new(actor),
            Cell::new(event.detail.as_ref().map_or("", |detail| detail.text())),
        ]);
    }
    table.print()
}

fn subject(event: &Event) -> String {
    match (event.batch, event.task, &event.worker) {
        (Some(batch), ..) => format!("batch {batch}"),
        (_, Some(task), _) => format!("task {task}"),
        (.., Some(worker)) => format!("worker {worker}"),
        (None, None, None) => String::new(),
    }
}
