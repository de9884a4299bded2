//! `musterd batch export`: rows with what became of them, as a file that can be corrected and submitted again.

use super::open;
use crate::cli::{Exit, Global, screen};
use anyhow::{Context, Result, bail};
use clap::Args;
use futures::{TryStreamExt, pin_mut};
use indicatif::HumanCount;
use musterd::{
    config::Config,
    flow::submit::{ADDED, WHOLE},
    json::Json,
    store::export::{Exported, Fields, Rows, Snapshot},
};
use serde_json::value::RawValue;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, ErrorKind, Write},
    path::{Path, PathBuf},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch export 17 --failed -o failed.csv
  musterd submit failed.csv --exported --command charge        after it was corrected
  musterd batch export 17 --all --format ndjson | jq ._result

CSV: the input's fields are columns; then come _line, _state, _attempt, _error and _result. Values that are no strings
are written as JSON. NDJSON: one object a line, with the input in _input, exactly as it was submitted.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Export {
    /// The batch's id.
    id: i64,
    /// Rows that failed.
    #[arg(long, required_unless_present = "all", conflicts_with = "all")]
    failed: bool,
    /// Every row, whatever its state.
    #[arg(long)]
    all: bool,
    /// csv or ndjson; by the name of FILE when left out, else csv.
    #[arg(long, value_name = "FORMAT", value_parser = ["csv", "ndjson"])]
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
            None => self.write(&mut client, std::io::stdout().lock()).await?,
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

    async fn write(&self, client: &mut tokio_postgres::Client, out: impl Write) -> Result<u64> {
        let rows = if self.all { Rows::All } else { Rows::Failed };
        let snapshot = Snapshot::begin(client).await?;
        let mut sheet: Box<dyn Sheet> = if self.is_csv() {
            Box::new(Csv::new(out, snapshot.fields(self.id, rows).await?)?)
        } else {
            Box::new(Ndjson(BufWriter::new(out)))
        };
        let found = snapshot.rows(self.id, rows).await?;
        pin_mut!(found);
        let mut written = 0;
        while let Some(row) = found.try_next().await? {
            match sheet.add(&row) {
                Ok(()) => written += 1,
                Err(error) if is_gone(&error) => return Ok(written),
                Err(error) => return Err(error),
            }
        }
        match sheet.end() {
            Err(error) if !is_gone(&error) => Err(error),
            _ => Ok(written),
        }
    }

    fn is_csv(&self) -> bool {
        let extension = || self.output.as_deref()?.extension()?.to_str();
        !matches!(self.format.as_deref().or_else(extension), Some("ndjson" | "jsonl"))
    }
}

/// A reader that has gone away (`| head`) has seen enough.
fn is_gone(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| match cause.downcast_ref::<csv::Error>().map(csv::Error::kind) {
        Some(csv::ErrorKind::Io(io)) => Some(io.kind()),
        _ => cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind),
    });
    io == Some(ErrorKind::BrokenPipe)
}

trait Sheet {
    fn add(&mut self, row: &Exported) -> Result<()>;
    fn end(&mut self) -> Result<()>;
}

struct Ndjson<W: Write>(BufWriter<W>);

impl<W: Write> Sheet for Ndjson<W> {
    fn add(&mut self, row: &Exported) -> Result<()> {
        let line = serde_json::json!({
            "_line": row.line, "_state": row.state, "_attempt": row.attempt, "_error": row.error,
        });
        // The payloads are written as they are: through values a number could lose digits.
        let line = line.to_string();
        let result = row.result.as_ref().map_or("null", Json::text);
        let head = line.trim_end_matches('}');
        Ok(writeln!(self.0, r#"{head},"_result":{result},"{WHOLE}":{}}}"#, row.input.text())?)
    }

    fn end(&mut self) -> Result<()> {
        Ok(self.0.flush()?)
    }
}

struct Csv<W: Write> {
    out: csv::Writer<W>,
    fields: Fields,
}

impl<W: Write> Csv<W> {
    fn new(out: W, fields: Fields) -> Result<Self> {
        let taken = |name: &&String| ADDED.contains(&name.as_str()) || *name == WHOLE;
        if let Some(name) = fields.names.iter().find(taken) {
            bail!("the inputs have a field {name:?}, which an export adds itself: use --format ndjson");
        }
        let mut out = csv::Writer::from_writer(out);
        for name in &fields.names {
            out.write_field(name)?;
        }
        if fields.others {
            out.write_field(WHOLE)?;
        }
        out.write_record(ADDED)?;
        Ok(Self { out, fields })
    }
}

impl<W: Write> Sheet for Csv<W> {
    fn add(&mut self, row: &Exported) -> Result<()> {
        let own: BTreeMap<String, &RawValue> = serde_json::from_str(row.input.text()).unwrap_or_default();
        for name in &self.fields.names {
            let value = own.get(name).map(|value| plain(value.get())).unwrap_or_default();
            self.out.write_field(value)?;
        }
        if self.fields.others {
            self.out.write_field(if own.is_empty() { row.input.text() } else { "" })?;
        }
        let attempt = row.attempt.map(|attempt| attempt.to_string()).unwrap_or_default();
        let result = row.result.as_ref().map_or("", Json::text);
        let error = row.error.as_deref().unwrap_or_default();
        Ok(self.out.write_record([&*row.line.to_string(), &row.state, &attempt, error, result])?)
    }

    fn end(&mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }
}

/// A string as its text, null as nothing, anything else as JSON.
fn plain(json: &str) -> String {
    match json {
        "null" => String::new(),
        _ => serde_json::from_str(json).unwrap_or_else(|_| json.to_owned()),
    }
}
