//! `musterd batch show`.

use super::{open, redrive};
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use indicatif::HumanBytes;
use musterd::{
    config::Config,
    json::Json,
    liveness::redis,
    store::{batches::Progress, steering},
};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  musterd batch show 17
  musterd batch show 17 --json
  musterd batch show 17 --cached     asks Redis, which remembers for a day how batches ended";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Show {
    /// The batch's id.
    id: i64,
    /// Ask the status cache in Redis first, and the database only when it does not know.
    #[arg(long)]
    cached: bool,
}

impl Show {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        if self.cached
            && let Some(progress) = from_cache(config, self.id).await
        {
            summary(global, &progress)?;
            return Ok(Exit::Done);
        }
        let (client, progress) = open(global, config, self.id).await?;
        let detail = steering::detail(&*client, progress).await?;
        client.close().await;
        if global.json {
            screen::json(&detail)?;
            return Ok(Exit::Done);
        }
        summary(global, &detail.progress)?;
        if let Some(canary) = &detail.canary {
            tell(canary)?;
        }
        for outcome in &detail.redrives {
            screen::line(&redrive::headline(outcome))?;
        }
        Ok(Exit::Done)
    }
}

/// How the canary ended, and what that says of the rest.
fn tell(canary: &steering::Canary) -> Result<()> {
    let Some(report) = &canary.report else {
        return screen::line(&format!(
            "canary: {} rows run first, the others wait",
            screen::grouped(canary.rows)
        ));
    };
    let report: serde_json::Value = serde_json::from_str(report.text())?;
    let number = |key: &str| screen::grouped(report[key].as_i64().unwrap_or_default());
    let per_second = report["rows_per_second"].as_f64().unwrap_or_default();
    screen::line(&format!(
        "canary: {} rows, {} failed, {per_second} rows/s",
        number("rows"),
        number("failed")
    ))?;
    for group in report["errors"].as_array().into_iter().flatten() {
        screen::line(&format!("  error group {}: {}", screen::value(&group["group"]), group["count"]))?;
    }
    let seconds = Duration::from_secs_f64(report["rest_seconds"].as_f64().unwrap_or_default().ceil());
    let outputs = HumanBytes(report["rest_output_bytes"].as_f64().unwrap_or_default() as u64);
    let (rest, time) = (number("rest"), humantime::format_duration(seconds));
    screen::line(&format!("  at that rate the other {rest} rows take {time} and have {outputs} of outputs"))?;
    match canary.state.as_str() {
        "held" => screen::line("  the others wait: musterd batch release"),
        _ => Ok(()),
    }
}

/// What the cache says, and on stderr how old that is, or why the database is asked instead.
async fn from_cache(config: &Config, id: i64) -> Option<Progress> {
    match redis::cached_status(&config.redis, id).await {
        Ok(Some(cached)) => {
            let age = humantime::format_duration(cached.age);
            screen::note(&format!(
                "from the status cache, written {age} ago; a redrive since then is not in it"
            ));
            Some(cached.progress)
        }
        Ok(None) => {
            screen::note(&format!("the status cache does not know batch {id}; asking the database"));
            None
        }
        Err(error) => {
            screen::note(&format!("{error}; asking the database"));
            None
        }
    }
}

/// A batch with its numbers, and where its files are.
pub(in crate::cli) fn summary(global: &Global, progress: &Progress) -> Result<()> {
    if global.json {
        return screen::json(progress);
    }
    let mut table = screen::table(COLUMNS);
    table.add_row(cells(progress));
    table.print_one()?;
    if let Some(outputs) = &progress.outputs {
        let gone = if progress.outputs_gone { " (gone)" } else { "" };
        screen::line(&format!("outputs: {}{gone}", describe(outputs)))?;
    }
    if let Some(data) = data(progress) {
        screen::line(&format!("data: {data}"))?;
    }
    Ok(())
}

pub(super) const COLUMNS: [screen::Column<'static>; 10] = [
    screen::whole("batch"),
    screen::whole("state"),
    screen::whole("command"),
    screen::spare("queue", 5),
    screen::spare("rows", 1),
    screen::spare("queued", 4),
    screen::spare("running", 3),
    screen::spare("succeeded", 2),
    screen::whole("failed"),
    screen::spare("aborted", 7),
];

pub(super) fn cells(progress: &Progress) -> [Cell; 10] {
    let count = |number: i32| Cell::new(screen::grouped(number));
    let state = state(progress);
    let tone = match state {
        "succeeded" => screen::Tone::Good,
        "failed" | "aborted" => screen::Tone::Bad,
        "held" | "aborting" => screen::Tone::Doubtful,
        _ => screen::Tone::Plain,
    };
    [
        Cell::new(progress.id),
        screen::word(state, tone),
        Cell::new(&progress.command),
        Cell::new(&progress.queue),
        count(progress.rows),
        count(progress.queued),
        count(progress.running),
        count(progress.succeeded),
        count(progress.failed),
        count(progress.aborted),
    ]
}

/// The state in one word: a batch on its way to `aborted` is `aborting`.
pub(super) fn state(progress: &Progress) -> &'static str {
    if progress.aborting { "aborting" } else { progress.state.as_str() }
}

/// What is to be said of its rows beside that they are there.
fn data(progress: &Progress) -> Option<String> {
    let Some(gone) = progress.data_gone_at else {
        return match (progress.data_held, &progress.keep) {
            (true, _) => Some("stays until release-data".into()),
            (false, Some(keep)) => Some(format!("stays for {keep} after its end")),
            (false, None) => None,
        };
    };
    let record = match progress.record_until {
        Some(until) => format!("until {until:.0}"),
        None => "for ever".into(),
    };
    let archive = progress.archive.as_ref().map(|archive| {
        let archive: serde_json::Value = serde_json::from_str(archive.text()).unwrap_or_default();
        format!("; archived in {}", archive["location"].as_str().unwrap_or_default())
    });
    Some(format!("went on {gone:.0}; this record stays {record}{}", archive.unwrap_or_default()))
}

fn describe(outputs: &Json) -> String {
    let outputs: serde_json::Value = serde_json::from_str(outputs.text()).unwrap_or_default();
    let number = |key: &str| outputs[key].as_u64().unwrap_or_default();
    let files = number("file_count");
    let plural = if files == 1 { "" } else { "s" };
    let location = outputs["location"].as_str().unwrap_or_default();
    format!("{files} file{plural}, {}, listed in {location}", HumanBytes(number("bytes")))
}
