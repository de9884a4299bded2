//! `musterd why …`: why something is not moving, in a person's words.

use super::{Exit, Global, screen};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use musterd::why::{self, Limits, Reason};
use std::time::Duration;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  musterd why batch 17\n  musterd why queue default")]
pub(super) enum Why {
    /// Why a batch is where it is.
    #[command(
        after_help = "Examples:\n  musterd why batch 17\n  musterd why batch 17 --json\n  musterd why batch 17 --long-transaction 1m"
    )]
    Batch {
        id: i64,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Why a task is where it is.
    #[command(after_help = "Examples:\n  musterd why task 17\n  musterd why task 17 --json")]
    Task {
        id: i64,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Why a queue is, or is not, being worked on.
    #[command(after_help = "Examples:\n  musterd why queue default\n  musterd why queue default --json")]
    Queue {
        name: String,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Why what has ended is still there.
    #[command(after_help = "Examples:\n  musterd why retention\n  musterd why retention --json")]
    Retention,
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct LimitArgs {
    /// Name a transaction that has been open for longer than this.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    long_transaction: Duration,
}

impl From<LimitArgs> for Limits {
    fn from(args: LimitArgs) -> Self {
        Self { long_transaction: args.long_transaction }
    }
}

impl Why {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let (what, reasons) = match &self {
            Self::Batch { id, limits } => {
                (format!("batch {id}"), why::batch_with(&*client, *id, (*limits).into()).await?)
            }
            Self::Task { id, limits } => {
                (format!("task {id}"), why::task_with(&*client, *id, (*limits).into()).await?)
            }
            Self::Queue { name, limits } => {
                (format!("queue {name}"), why::queue_with(&*client, name, (*limits).into()).await?)
            }
            Self::Retention => ("retention".to_owned(), Some(why::retention(&*client).await?)),
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
