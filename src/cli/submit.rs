//! `musterd submit`: a file, or standard input, becomes a batch.

use super::{
    Exit, Global, batch,
    input::{InputFile, Opened, SUBMITTING, Source, with_bar},
    screen,
};
use anyhow::{Context, Result};
use clap::Args;
use indicatif::{HumanBytes, HumanCount};
use musterd::{
    flow::{
        input::{Format, Limits, Reader, survey},
        submit::{self, Canary, Given, MaxFailed, Meter, OnBudget, Order, Submitted},
    },
    json::{Json, check::check},
    keep, queue,
    traceparent::Traceparent,
};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

const EXAMPLES: &str = "\
Examples:
  musterd submit people.csv --command noop
  musterd submit orders.ndjson --command charge --idempotency-key orders-2026-11 --wait
  seq 1000 | musterd submit - --command echo --wait
  musterd submit people.csv --command noop --canary 2% --sample --auto-release 'failed<0.5%'
  musterd submit people.csv --command noop --dry-run

CSV: the first line names the fields, every other line becomes an object of strings. NDJSON: one JSON value a line.
JSON: one array; every element is a row.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Submit {
    #[command(flatten)]
    input: InputFile,
    /// The command that runs every row.
    #[arg(long, value_parser = name)]
    command: String,
    /// The queue; the command's own when left out.
    #[arg(long, value_parser = name)]
    queue: Option<String>,
    /// A JSON value that every row's handler gets.
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = context)]
    context: Json,
    /// Smaller runs sooner; 100 when left out.
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1_000_000..=1_000_000))]
    priority: Option<i32>,
    /// The same key with the same rows is the same batch, however often it is sent.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Submit without starting; `release` starts it.
    #[arg(long)]
    hold: bool,
    /// Tries of a row in all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=1_000))]
    max_attempts: Option<i32>,
    /// A row that runs longer is cancelled and counts as a failed try.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    row_timeout: Option<Duration>,
    /// Rows that may fail before the batch counts as failed: a number, or a share such as 5%.
    #[arg(long, value_name = "N|P%", default_value = "0")]
    max_failed: MaxFailed,
    /// What to do as soon as more rows have failed than that; left out, the batch runs to its end all the same.
    #[arg(long, value_name = "hold|abort")]
    on_budget: Option<OnBudget>,
    /// Rows that run first, alone: a number, or a share such as 2%. Then the batch is held with a report; `release` goes on.
    #[arg(long, value_name = "N|P%")]
    canary: Option<String>,
    /// Spread the canary over the file; left out, it is the first rows.
    #[arg(long, requires = "canary")]
    sample: bool,
    /// Go on by itself if this is true of the canary, such as 'failed<0.5%'.
    #[arg(long, value_name = "CONDITION", requires = "canary")]
    auto_release: Option<String>,
    /// How long its rows and results stay after its end, such as 90d; as [retention] says when left out.
    #[arg(long, value_name = "TIME", value_parser = keep::parse_time)]
    keep: Option<Duration>,
    /// A command to enqueue once the batch is over.
    #[arg(long, value_name = "COMMAND", value_parser = name)]
    on_done: Option<String>,
    /// The W3C trace context to hand on to the handlers; what is none is left out.
    #[arg(long, value_name = "TRACE", env = "TRACEPARENT", hide_env_values = true)]
    traceparent: Option<String>,
    /// Follow the batch to its end; exit code 1 unless it succeeded.
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// Read and check everything, report, submit nothing.
    #[arg(long)]
    dry_run: bool,
}

pub(in crate::cli) fn name(text: &str) -> Result<String, String> {
    match queue::is_valid_name(text) {
        true => Ok(text.to_owned()),
        false => Err("a name is letters, digits and _-.: only, at most 100".into()),
    }
}

pub(in crate::cli) fn context(text: &str) -> Result<Json, String> {
    check(text).map_err(|refusal| refusal.to_string())?;
    Ok(Json::from_text(text))
}

impl Submit {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let limits = Limits { max_row_bytes: loaded.config.submit.max_row_bytes };
        let Opened { source, format, size } = self.input.open()?;
        if self.dry_run {
            return self.survey(global, source, format, limits);
        }
        let mut client = global.connect(&loaded.config.database).await?;
        let meter = Meter::default();
        let began = Instant::now();
        let order = self.order();
        let given = Given { source, format, limits, exported: self.input.exported };
        let submitting = submit::submit(&mut client, &order, given, meter.clone());
        let submitted = with_bar(SUBMITTING, submitting, &meter, size).await;
        let submitted = submitted.with_context(|| format!("{} was not submitted", self.input.shown()))?;
        client.close().await;
        if submitted.rows == 0 {
            screen::note(&format!("{} has no rows: the batch is empty", self.input.shown()));
        }
        self.report(global, &submitted, &meter, began.elapsed())?;
        if self.wait {
            return batch::wait(global, &loaded.config.database, submitted.id).await;
        }
        Ok(Exit::Done)
    }

    fn order(&self) -> Order {
        Order {
            command: self.command.clone(),
            queue: self.queue.clone(),
            context: self.context.clone(),
            priority: self.priority,
            idempotency_key: self.idempotency_key.clone(),
            hold: self.hold,
            max_attempts: self.max_attempts,
            row_timeout: self.row_timeout,
            max_failed: self.max_failed,
            on_done: self.on_done.clone(),
            on_budget: self.on_budget,
            canary: self.canary.clone().map(|rows| Canary {
                rows,
                sample: self.sample,
                auto_release: self.auto_release.clone(),
            }),
            keep: self.keep,
            traceparent: self.traceparent.as_deref().and_then(Traceparent::parse),
        }
    }

    fn survey(&self, global: &Global, source: Source, format: Format, limits: Limits) -> Result<Exit> {
        const SHOWN: usize = 20;
        let found = survey(&mut Reader::new(source, format, limits), SHOWN);
        let errors: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
        if global.json {
            screen::json(&serde_json::json!({
                "ok": found.is_clean(), "rows": found.rows, "bytes": found.bytes_read,
                "errors": errors, "more_errors": found.more_errors,
            }))?;
        } else {
            for error in &errors {
                screen::line(&format!("{}: {error}", self.input.shown()))?;
            }
            if found.more_errors > 0 {
                screen::line(&format!("… and {} more", found.more_errors))?;
            }
            let verdict = if found.is_clean() {
                "nothing wrong; nothing was submitted"
            } else {
                "nothing was submitted"
            };
            screen::line(&format!("{} rows: {verdict}", HumanCount(found.rows)))?;
        }
        Ok(if found.is_clean() { Exit::Done } else { Exit::Failed })
    }

    fn report(&self, global: &Global, submitted: &Submitted, meter: &Meter, took: Duration) -> Result<()> {
        if global.json {
            // With --wait the batch itself is printed at its end.
            return if self.wait { Ok(()) } else { screen::json(submitted) };
        }
        // A program that reads this finds the id on the first line, with --wait too.
        if self.wait && std::io::stdout().is_terminal() {
            let again = if submitted.repeated { " (was there already)" } else { "" };
            let rate = submitted.rows as f64 / took.as_secs_f64().max(1e-6);
            return screen::line(&format!(
                "batch {}{again}: {} rows, {} in {:.1} s, {} rows/s",
                submitted.id,
                HumanCount(submitted.rows),
                HumanBytes(meter.bytes()),
                took.as_secs_f64(),
                HumanCount(rate as u64),
            ));
        }
        screen::line(&submitted.id.to_string())
    }
}
