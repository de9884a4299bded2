//! A file of rows, as `submit` and `batch append` take it.

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use musterd::{
    flow::{
        input::{CsvOptions, Format},
        submit::Meter,
    },
    json::check::check,
};
use std::{
    fs::File,
    io::{Chain, Cursor, Read},
    path::{Path, PathBuf},
    time::Duration,
};

#[derive(Debug, Args)]
pub(super) struct InputFile {
    /// The file to read; - for standard input.
    file: PathBuf,
    /// csv, ndjson or json; by the file's name or its first bytes when left out.
    #[arg(long, value_name = "FORMAT", value_parser = ["csv", "ndjson", "json"])]
    format: Option<String>,
    /// CSV: what stands between two fields; when left out a tab in a .tsv file, else a comma, semicolon or tab, by the header.
    #[arg(long, value_name = "CHAR", value_parser = CsvOptions::character)]
    delimiter: Option<char>,
    /// CSV: what stands around a field.
    #[arg(long, value_name = "CHAR", default_value = "\"", value_parser = CsvOptions::character)]
    quote: char,
    /// The file was written by `batch export`: take the inputs, leave _line, _state, _attempt, _error, _result, _started_at and
    /// _run_seconds out.
    #[arg(long)]
    pub(super) exported: bool,
}

/// The bytes looked at to tell the format, then the rest.
pub(super) type Source = Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>;

/// A file that was opened, and what is known of it.
pub(super) struct Opened {
    pub(super) source: Source,
    pub(super) format: Format,
    pub(super) size: Option<u64>,
}

impl InputFile {
    /// What to call it.
    pub(super) fn shown(&self) -> String {
        shown(&self.file)
    }

    pub(super) fn open(&self) -> Result<Opened> {
        let (mut inner, size) = open(&self.file)?;
        let mut head = Vec::new();
        Read::by_ref(&mut inner)
            .take(4096)
            .read_to_end(&mut head)
            .with_context(|| format!("cannot read {}", self.shown()))?;
        let format = self.format_of(&head)?;
        Ok(Opened { source: Cursor::new(head).chain(inner), format, size })
    }

    fn format_of(&self, head: &[u8]) -> Result<Format> {
        let extension = self.file.extension().and_then(|extension| extension.to_str());
        Ok(match (self.format.as_deref(), Format::guess(extension, head)) {
            (Some("ndjson"), _) => Format::Ndjson,
            (Some("json"), _) => Format::JsonArray,
            (Some(_), Some(Format::Csv(guessed))) | (None, Some(Format::Csv(guessed))) => {
                self.csv(guessed)?
            }
            (Some(_), _) => self.csv(CsvOptions::default())?,
            (None, Some(format)) => format,
            // Nothing at all is no rows in any format. A first line that is JSON all by itself: `seq 10` is.
            (None, None) if head.trim_ascii().is_empty() || first_line_is_json(head) => Format::Ndjson,
            (None, None) => {
                bail!("cannot tell the format of {}: say --format csv, ndjson or json", self.shown())
            }
        })
    }

    fn csv(&self, guessed: CsvOptions) -> Result<Format> {
        let delimiter = self.delimiter.unwrap_or_else(|| guessed.delimiter().into());
        Ok(Format::Csv(CsvOptions::new(delimiter, self.quote)?))
    }
}

/// What to call a file.
pub(super) fn shown(file: &Path) -> String {
    if file.as_os_str() == "-" { "standard input".into() } else { file.display().to_string() }
}

/// Opens a file, or standard input; its size, where that is known.
pub(super) fn open(file: &Path) -> Result<(Box<dyn Read + Send>, Option<u64>)> {
    if file.as_os_str() == "-" {
        return Ok((Box::new(std::io::stdin()), None));
    }
    let opened = File::open(file).with_context(|| format!("cannot open {}", shown(file)))?;
    let size = opened.metadata().ok().map(|metadata| metadata.len());
    Ok((Box::new(opened), size))
}

fn first_line_is_json(head: &[u8]) -> bool {
    let line = head.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty());
    line.and_then(|line| std::str::from_utf8(line).ok()).is_some_and(|line| check(line.trim()).is_ok())
}

/// What a bar says is being done, and to what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Activity {
    verb: &'static str,
    noun: &'static str,
}

pub(super) const SUBMITTING: Activity = Activity { verb: "submitting", noun: "rows" };
pub(super) const ENQUEUING: Activity = Activity { verb: "enqueuing", noun: "tasks" };

/// Shows how far `work` is until it is done: a bar on stderr, and only on a terminal.
pub(super) async fn with_bar<T>(
    what: Activity,
    work: impl Future<Output = T>,
    meter: &Meter,
    size: Option<u64>,
) -> T {
    let bar = bar_for(what, size);
    let mut work = std::pin::pin!(work);
    let mut clock = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            done = &mut work => {
                bar.finish_and_clear();
                return done;
            }
            _ = clock.tick() => {
                bar.set_position(meter.bytes());
                bar.set_message(format!("{} {}", HumanCount(meter.rows()), what.noun));
            }
        }
    }
}

fn bar_for(what: Activity, size: Option<u64>) -> ProgressBar {
    let (bar, progress) = match size {
        Some(size) => (ProgressBar::new(size), "{wide_bar} {bytes}/{total_bytes}"),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes}"),
    };
    let template = format!("{} {progress} {{binary_bytes_per_sec}} {{msg}}", what.verb);
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
