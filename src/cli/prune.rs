//! `musterd prune`: a pass of retention now, by the times that the workers declared, or what it would do.

use super::{Exit, Global, screen};
use anyhow::{Context, Result, bail};
use clap::Args;
use comfy_table::Cell;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use musterd::{
    metrics::Metrics,
    objects,
    store::{
        Store,
        retention::{self, Planned},
    },
    upkeep::retention::{Gone, Meter, Pass},
};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const EXAMPLES: &str = "\
Examples:
  musterd prune --dry-run
  musterd prune
  musterd prune --gently --json

What goes is decided by [retention] of the worker that started last, not by a configuration given here; but with archives or output
files, [outputs] must be the workers' own.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Prune {
    /// Show what would go and about how much that frees; delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// Rest nine times as long as it works, as the workers do; else as long.
    #[arg(long, conflicts_with = "dry_run")]
    gently: bool,
}

impl Prune {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let config = global.load()?.config;
        let client = global.connect(&config.database).await?;
        let Some(wanted) = retention::wanted(&*client).await? else {
            bail!("no worker has declared [retention] yet: start one (musterd run)");
        };
        let plan = retention::plan(&*client, None).await.context("could not see what would go")?;
        client.close().await;
        if self.dry_run {
            return show(global, &plan);
        }
        if wanted.archive || wanted.outputs {
            objects::Store::open(&config.outputs)?
                .probe()
                .await
                .context("[outputs], which retention needs")?;
        }
        let pass = Pass {
            store: Store::open(&config.database)?,
            objects: objects::Store::open(&config.outputs)?,
            metrics: Metrics::default(),
            rests: if self.gently { 9.0 } else { 1.0 },
            walk_every: Duration::ZERO,
            stop: CancellationToken::new(),
            meter: Meter::default(),
        };
        let gone = with_bar(&pass, &plan).await?;
        pass.objects.wait_for_cleanup().await;
        report(global, &gone)
    }
}

/// Rows and tasks, as the meter counts them.
fn steps(plan: &[Planned]) -> u64 {
    let steps = plan.iter().map(|part| part.lines.unwrap_or(part.items));
    u64::try_from(steps.sum::<i64>()).unwrap_or_default()
}

async fn with_bar(pass: &Pass, plan: &[Planned]) -> Result<Gone> {
    let bar = ProgressBar::new(steps(plan));
    if let Ok(style) = ProgressStyle::with_template("pruning {wide_bar} {human_pos}/{human_len} {eta}") {
        bar.set_style(style);
    }
    let mut running = std::pin::pin!(pass.run());
    let mut clock = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            done = &mut running => {
                bar.finish_and_clear();
                return Ok(done?);
            }
            _ = clock.tick() => bar.set_position(pass.meter.done()),
        }
    }
}

fn show(global: &Global, plan: &[Planned]) -> Result<Exit> {
    if global.json {
        let bytes: i64 = plan.iter().map(|part| part.bytes).sum();
        screen::json(&serde_json::json!({ "would_go": plan, "bytes": bytes }))?;
        return Ok(Exit::Done);
    }
    let mut table = screen::table([
        screen::whole("what"),
        screen::whole("how many"),
        screen::whole("frees about"),
        screen::spare("oldest", 1),
    ]);
    for part in plan {
        let count = match (part.what.as_str(), part.lines) {
            ("rows", Some(lines)) => {
                format!("{} of {} batches", screen::grouped(lines), screen::grouped(part.items))
            }
            (_, _) => format!("about {} tasks", screen::grouped(part.items)),
        };
        table.add_row([
            Cell::new(&part.what),
            Cell::new(count),
            Cell::new(HumanBytes(u64::try_from(part.bytes).unwrap_or_default())),
            Cell::new(part.oldest.map(|at| format!("{at:.0}")).unwrap_or_default()),
        ]);
    }
    table.print()?;
    Ok(Exit::Done)
}

fn report(global: &Global, gone: &Gone) -> Result<Exit> {
    if global.json {
        screen::json(gone)?;
    } else {
        screen::line(&format!(
            "{} rows of {} batches ({}), bodies of {} tasks, {} records and {} events went",
            HumanCount(gone.rows),
            HumanCount(gone.batches),
            HumanBytes(gone.bytes),
            HumanCount(gone.bodies),
            HumanCount(gone.records),
            HumanCount(gone.events),
        ))?;
        if gone.archived > 0 {
            screen::line(&format!("archived: {} batches", HumanCount(gone.archived)))?;
        }
        if gone.abandoned > 0 {
            screen::line(&format!(
                "aborted, because they were held for too long: {}",
                HumanCount(gone.abandoned)
            ))?;
        }
    }
    if let Some(trouble) = &gone.trouble {
        screen::note(trouble);
    }
    if gone.busy {
        screen::note(
            "another worker is pruning just now; this one has stopped: run it again for what is left",
        );
    }
    Ok(if gone.trouble.is_some() || gone.busy { Exit::Failed } else { Exit::Done })
}
