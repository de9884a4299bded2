//! `musterd batch export`: rows with what became of them, as a file that can be corrected and submitted again.

use super::open;
use crate::cli::{Exit, Global, screen};
use anyhow::{Context, Result};
use clap::Args;
use indicatif::HumanCount;
use musterd::{
    config::Config,
    error_group::ErrorGroup,
    flow::export::{Cells, Format, Taker, export},
    store::export::Rows,
};
use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch export 17 --failed -o failed.csv
  musterd batch export 17 --error 6f1c8a3e -o timeouts.csv     one group of errors
  musterd submit failed.csv --exported --command charge        after it was corrected
  musterd batch export 17 --all --format ndjson | jq ._result

CSV: the input's fields are columns; then come _line, _state, _attempt, _error, _result, _started_at and _run_seconds. Values that are no strings
are written as JSON. NDJSON: one object a line, with the input in _input, exactly as it was submitted.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("which").required(true))]
pub(in crate::cli) struct Export {
    /// The batch's id.
    id: i64,
    /// Rows that failed.
    #[arg(long, group = "which")]
    failed: bool,
    /// Rows that failed with an error of this group, as "batch errors" shows them.
    #[arg(long, value_name = "GROUP", group = "which")]
    error: Option<ErrorGroup>,
    /// Every row, whatever its state.
    #[arg(long, group = "which")]
    all: bool,
    /// By the name of FILE when left out, else csv; spreadsheet is csv without formulas.
    #[arg(long, value_name = "FORMAT", value_parser = ["csv", "ndjson", "spreadsheet"])]
    format: Option<String>,
    /// Where to write; standard output when left out.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Export {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (mut client, _) = open(global, config, self.id).await?;
        let written = match &self.output {
            Some(path) => self.to_file(&mut client, path).await?,
            None => self.write(&mut client, std::io::stdout()).await?,
        };
        client.close().await;
        let Some(path) = &self.output else { return Ok(Exit::Done) };
        match global.json {
            true => screen::json(&serde_json::json!({ "batch": self.id, "rows": written, "file": path }))?,
            false => screen::line(&format!("{}: {} rows", path.display(), HumanCount(written)))?,
        }
        Ok(Exit::Done)
    }

    /// Whole or not at all: a half of it looks like all of it.
    async fn to_file(&self, client: &mut tokio_postgres::Client, path: &Path) -> Result<u64> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let failed = || format!("cannot write {}", path.display());
        let file = File::create(&part).with_context(failed)?;
        let written = self.write(client, file).await;
        if written.is_ok() {
            std::fs::rename(&part, path).with_context(failed)?;
        } else {
            let _ = std::fs::remove_file(&part);
        }
        written
    }

    async fn write(&self, client: &mut tokio_postgres::Client, out: impl Write + Send) -> Result<u64> {
        let rows = match self.error {
            _ if self.all => Rows::All,
            Some(group) => Rows::InGroup(group),
            None => Rows::Failed,
        };
        let format = self.format();
        let mut out = Out(out);
        match export(client, self.id, rows, format, &mut out).await {
            Ok(written) => Ok(written),
            Err(error) if error.is_gone() => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    fn format(&self) -> Format {
        let extension = || self.output.as_deref()?.extension()?.to_str();
        match self.format.as_deref().or_else(extension) {
            Some("ndjson" | "jsonl") => Format::Ndjson,
            Some("spreadsheet") => Format::Csv(Cells::ForSpreadsheets),
            _ => Format::Csv(Cells::AsTheyAre),
        }
    }
}

/// A file, or standard output.
struct Out<W: Write>(W);

impl<W: Write + Send> Taker for Out<W> {
    async fn take(&mut self, bytes: Vec<u8>) -> std::io::Result<()> {
        self.0.write_all(&bytes)?;
        self.0.flush()
    }
}
