//! `musterd why …`: why something is not moving, in a person's words.

use super::{Exit, Global, screen};
use anyhow::{Result, bail};
use clap::Subcommand;
use musterd::why::{self, Reason};

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  musterd why batch 17\n  musterd why queue default")]
pub(super) enum Why {
    /// Why a batch is where it is.
    #[command(after_help = "Examples:\n  musterd why batch 17\n  musterd why batch 17 --json")]
    Batch { id: i64 },
    /// Why a task is where it is.
    #[command(after_help = "Examples:\n  musterd why task 17")]
    Task { id: i64 },
    /// Why a queue is, or is not, being worked on.
    #[command(after_help = "Examples:\n  musterd why queue default")]
    Queue { name: String },
}

impl Why {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let (what, reasons) = match &self {
            Self::Batch { id } => (format!("batch {id}"), why::batch(&*client, *id).await?),
            Self::Task { id } => (format!("task {id}"), why::task(&*client, *id).await?),
            Self::Queue { name } => (format!("queue {name}"), why::queue(&*client, name).await?),
        };
        client.close().await;
        let Some(reasons) = reasons else { bail!("there is no {what}") };
        print(global, &what, &reasons)?;
        Ok(Exit::Done)
    }
}

fn print(global: &Global, what: &str, reasons: &[Reason]) -> Result<()> {
    if global.json {
        return screen::json(&serde_json::json!({ "subject": what, "reasons": reasons }));
    }
    for reason in reasons {
        screen::line(&reason.sentence)?;
        if let Some(advice) = &reason.what_to_do {
            screen::line(&format!("  → {advice}"))?;
        }
    }
    Ok(())
}
