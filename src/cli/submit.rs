//! `musterd submit`: a file, or standard input, becomes a batch.

use super::{Exit, Global, batch, screen};
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use musterd::{
    flow::{
        input::{CsvOptions, Format, Limits, Reader, check, survey},
        submit::{self, MaxFailed, Meter, Order, Submitted},
    },
    json::Json,
    queue,
};
use std::{
    fs::File,
    io::{Chain, Cursor, Read},
    path::PathBuf,
    time::{Duration, Instant},
};

const EXAMPLES: &str = "\
Examples:
  musterd submit people.csv --command noop
  musterd submit orders.ndjson --command charge --idempotency-key orders-2026-11 --wait
  seq 1000 | musterd submit - --command echo --wait
  musterd submit people.csv --command noop --dry-run

CSV: the first line names the fields, every other line becomes an object of strings. NDJSON: one JSON value a line.
JSON: one array; every element is a row.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Submit {
    /// The file to read; - for standard input.
    file: PathBuf,
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
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// The same key with the same rows is the same batch, however often it is sent.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Submit without starting; `release` starts it.
    #[arg(long)]
    hold: bool,
    /// Tries of a row in all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    max_attempts: Option<i32>,
    /// A row that runs longer is cancelled and counts as a failed try.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    row_timeout: Option<Duration>,
    /// Rows that may fail before the batch counts as failed: a number, or a share such as 5%.
    #[arg(long, value_name = "N|P%", default_value = "0")]
    max_failed: MaxFailed,
    /// A command to enqueue once the batch is over.
    #[arg(long, value_name = "COMMAND", value_parser = name)]
    on_done: Option<String>,
    /// csv, ndjson or json; by the file's name or its first bytes when left out.
    #[arg(long, value_name = "FORMAT", value_parser = ["csv", "ndjson", "json"])]
    format: Option<String>,
    /// CSV: what stands between two fields.
    #[arg(long, value_name = "CHAR", default_value = ",", value_parser = character)]
    delimiter: char,
    /// CSV: what stands around a field.
    #[arg(long, value_name = "CHAR", default_value = "\"", value_parser = character)]
    quote: char,
    /// Follow the batch to its end; exit code 1 unless it succeeded.
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// Read and check everything, report, submit nothing.
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn name(text: &str) -> Result<String, String> {
    match queue::is_valid_name(text) {
        true => Ok(text.to_owned()),
        false => Err("a name is letters, digits and _-.: only, at most 100".into()),
    }
}

pub(super) fn context(text: &str) -> Result<Json, String> {
    check(text).map_err(|refusal| format!("not JSON that can be stored: {refusal:?}"))?;
    Ok(Json::from_text(text))
}

fn character(text: &str) -> Result<char, String> {
    let text = if text == "\\t" { "\t" } else { text };
    let mut characters = text.chars();
    match (characters.next(), characters.next()) {
        (Some(one), None) => Ok(one),
        _ => Err("must be one character (\\t for a tab)".into()),
    }
}

/// The bytes looked at to tell the format, then the rest.
type Source = Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>;

impl Submit {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let limits = Limits { max_row_bytes: loaded.config.submit.max_row_bytes };
        let (source, format, size) = self.open()?;
        if self.dry_run {
            return self.survey(global, source, format, limits);
        }
        let mut client = global.connect(&loaded.config.database).await?;
        let meter = Meter::default();
        let bar = bar_for(size);
        let began = Instant::now();
        let order = self.order();
        let submitting = submit::submit(&mut client, &order, source, format, limits, meter.clone());
        let submitted = watched(submitting, &meter, &bar).await;
        bar.finish_and_clear();
        let submitted = submitted.with_context(|| format!("{} was not submitted", self.shown()))?;
        client.close().await;
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
        }
    }

    fn shown(&self) -> String {
        if self.file.as_os_str() == "-" { "standard input".into() } else { self.file.display().to_string() }
    }

    fn open(&self) -> Result<(Source, Format, Option<u64>)> {
        let (mut inner, size): (Box<dyn Read + Send>, _) = if self.file.as_os_str() == "-" {
            (Box::new(std::io::stdin()), None)
        } else {
            let file = File::open(&self.file).with_context(|| format!("cannot open {}", self.shown()))?;
            let size = file.metadata().ok().map(|metadata| metadata.len());
            (Box::new(file), size)
        };
        let mut head = Vec::new();
        Read::by_ref(&mut inner)
            .take(4096)
            .read_to_end(&mut head)
            .with_context(|| format!("cannot read {}", self.shown()))?;
        let format = self.format_of(&head)?;
        Ok((Cursor::new(head).chain(inner), format, size))
    }

    fn format_of(&self, head: &[u8]) -> Result<Format> {
        let csv = CsvOptions::new(self.delimiter, self.quote)?;
        let extension = self.file.extension().and_then(|extension| extension.to_str());
        let guessed = || Format::guess(extension, head);
        Ok(match self.format.as_deref() {
            Some("csv") => Format::Csv(csv),
            Some("ndjson") => Format::Ndjson,
            Some("json") => Format::JsonArray,
            _ => match guessed() {
                Some(Format::Csv(_)) => Format::Csv(csv),
                Some(format) => format,
                // A first line that is JSON all by itself: `seq 10` is.
                None if first_line_is_json(head) => Format::Ndjson,
                None => bail!("cannot tell the format of {}: say --format csv, ndjson or json", self.shown()),
            },
        })
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
                screen::line(&format!("{}: {error}", self.shown()))?;
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
        if self.wait {
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

fn first_line_is_json(head: &[u8]) -> bool {
    let line = head.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty());
    line.and_then(|line| std::str::from_utf8(line).ok()).is_some_and(|line| check(line.trim()).is_ok())
}

fn bar_for(size: Option<u64>) -> ProgressBar {
    // Drawn on stderr, and only on a terminal.
    let (bar, template) = match size {
        Some(size) => (
            ProgressBar::new(size),
            "submitting {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {msg}",
        ),
        None => (ProgressBar::new_spinner(), "submitting {spinner} {bytes} {binary_bytes_per_sec} {msg}"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

async fn watched<T>(work: impl Future<Output = T>, meter: &Meter, bar: &ProgressBar) -> T {
    tokio::pin!(work);
    let mut clock = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = clock.tick() => {
                bar.set_position(meter.bytes());
                bar.set_message(format!("{} rows", HumanCount(meter.rows())));
            }
        }
    }
}
