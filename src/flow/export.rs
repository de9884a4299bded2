//! Exporting: rows with what became of them, as a file that can be corrected and submitted again.

mod fields;

use super::submit::{ADDED, WHOLE};
use crate::{
    json::Json,
    store::export::{Pages, RowView, Rows},
};
use fields::{Fields, MOST_FIELDS};
use serde_json::value::RawValue;
use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio_postgres::Client;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The input's fields are columns, and what became of the row follows.
    Csv(Cells),
    /// One object a line, with the input in it exactly as it was submitted.
    Ndjson,
}

/// What becomes of texts that a spreadsheet would take for a formula: one of a stranger's row could read the sheet and send it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cells {
    /// They stay, so that the file can be submitted again.
    AsTheyAre,
    /// They begin with an apostrophe, which spreadsheets read as "this is text".
    ForSpreadsheets,
}

impl Cells {
    fn of<'t>(self, text: &'t str) -> Cow<'t, str> {
        match self == Self::ForSpreadsheets && text.starts_with(['=', '+', '-', '@', '\t', '\r']) {
            true => format!("'{text}").into(),
            false => text.into(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(
        "the inputs have a field {name:?}, which an export adds itself: use --format ndjson (of the API: format=ndjson)"
    )]
    FieldTaken { name: String },
    #[error(
        "the inputs have more than {MOST_FIELDS} different fields, too many for columns: use --format ndjson (of the API: \
         format=ndjson)"
    )]
    TooManyFields,
    #[error(
        "rows with fields that are not among the columns were added while the batch was exported: export it again, or use \
         --format ndjson (of the API: format=ndjson)"
    )]
    Changed,
    #[error("could not write the export")]
    Write(#[from] io::Error),
    #[error("could not read the rows")]
    Query(#[from] tokio_postgres::Error),
}

impl From<csv::Error> for ExportError {
    fn from(error: csv::Error) -> Self {
        match error.into_kind() {
            csv::ErrorKind::Io(error) => Self::Write(error),
            other => Self::Write(io::Error::other(format!("{other:?}"))),
        }
    }
}

impl ExportError {
    /// The reader has gone away (`| head`, a client that hung up): it has seen enough.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// Where an export goes, piece by piece; it is waited for.
pub trait Taker: Send {
    fn take(&mut self, bytes: Vec<u8>) -> impl Future<Output = io::Result<()>> + Send;
}

/// Handed on when it holds this much.
const PIECE: usize = 64 << 10;

/// Gives rows of a batch to `taker`, page by page; how many there were. No transaction is open while `taker` takes.
pub async fn export(
    client: &mut Client,
    batch: i64,
    rows: Rows,
    format: Format,
    taker: &mut impl Taker,
) -> Result<u64, ExportError> {
    let tray = Tray::default();
    let mut sheet = match format {
        // CSV has to name its columns before its rows: a pass over the inputs of its own.
        Format::Csv(cells) => {
            let fields = Fields::of(Pages::of_inputs(client, batch, rows)).await?;
            Sheet::Csv(Box::new(Csv::new(tray.clone(), fields, cells)?))
        }
        Format::Ndjson => Sheet::Ndjson(tray.clone()),
    };
    let mut pages = Pages::of_rows(client, batch, rows);
    let mut written = 0;
    while let Some(page) = pages.next().await? {
        for row in page {
            sheet.add(&row)?;
            written += 1;
            if tray.len() >= PIECE {
                taker.take(tray.empty()).await?;
            }
        }
    }
    sheet.end()?;
    taker.take(tray.empty()).await?;
    Ok(written)
}

/// What is written and not yet taken. Shared, because a CSV writer does not give its sink back.
#[derive(Clone, Default)]
struct Tray(Arc<Mutex<Vec<u8>>>);

impl Tray {
    fn held(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.held().len()
    }

    fn empty(&self) -> Vec<u8> {
        std::mem::take(&mut *self.held())
    }
}

impl Write for Tray {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.held().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum Sheet {
    Csv(Box<Csv>),
    Ndjson(Tray),
}

impl Sheet {
    fn add(&mut self, row: &RowView) -> Result<(), ExportError> {
        match self {
            Self::Csv(csv) => csv.add(row),
            Self::Ndjson(tray) => Ok(add_line(tray, row)?),
        }
    }

    fn end(&mut self) -> Result<(), ExportError> {
        match self {
            Self::Csv(csv) => Ok(csv.out.flush()?),
            Self::Ndjson(_) => Ok(()),
        }
    }
}

fn add_line(out: &mut Tray, row: &RowView) -> io::Result<()> {
    let line = serde_json::json!({
        "_line": row.line, "_state": row.state, "_attempt": row.attempt, "_error": row.error,
        "_started_at": row.started_at, "_run_seconds": row.run_seconds,
    });
    // The payloads are written as they are: through values a number could lose digits.
    let line = line.to_string();
    let result = row.result.as_ref().map_or("null", Json::text);
    let head = line.trim_end_matches('}');
    let line = format!("{head},\"_result\":{result},\"{WHOLE}\":{}}}\n", row.input.text());
    out.write_all(line.as_bytes())
}

struct Csv {
    out: csv::Writer<Tray>,
    fields: Fields,
    cells: Cells,
}

impl Csv {
    fn new(out: Tray, fields: Fields, cells: Cells) -> Result<Self, ExportError> {
        let taken = |name: &&String| ADDED.contains(&name.as_str()) || *name == WHOLE;
        if let Some(name) = fields.names.iter().find(taken) {
            return Err(ExportError::FieldTaken { name: name.clone() });
        }
        let mut out = csv::Writer::from_writer(out);
        for name in &fields.names {
            out.write_field(&*cells.of(name))?;
        }
        if fields.others {
            out.write_field(WHOLE)?;
        }
        out.write_record(ADDED)?;
        Ok(Self { out, fields, cells })
    }

    fn add(&mut self, row: &RowView) -> Result<(), ExportError> {
        let own: BTreeMap<String, &RawValue> = serde_json::from_str(row.input.text()).unwrap_or_default();
        // The columns were read before, in other transactions: no value is left out without a word.
        let is_new = if own.is_empty() { !self.fields.others } else { !self.fields.have_all(own.keys()) };
        if is_new {
            return Err(ExportError::Changed);
        }
        for name in &self.fields.names {
            match own.get(name).map(|value| plain(value.get())) {
                None => self.out.write_field("")?,
                // A number is no formula, whatever its sign.
                Some(Plain::Json(text)) => self.out.write_field(text)?,
                Some(Plain::Text(text)) => self.out.write_field(&*self.cells.of(&text))?,
            }
        }
        if self.fields.others {
            self.out.write_field(if own.is_empty() { row.input.text() } else { "" })?;
        }
        let attempt = row.attempt.map(|attempt| attempt.to_string()).unwrap_or_default();
        let result = row.result.as_ref().map_or("", Json::text);
        let error = self.cells.of(row.error.as_deref().unwrap_or_default());
        let started = row.started_at.map(|at| at.to_string()).unwrap_or_default();
        let seconds = row.run_seconds.map(|seconds| seconds.to_string()).unwrap_or_default();
        let added = [&*row.line.to_string(), row.state, &attempt, &error, result, &started, &seconds];
        Ok(self.out.write_record(added)?)
    }
}

enum Plain<'j> {
    Text(String),
    Json(&'j str),
}

/// A string as its text, null as nothing, anything else as JSON.
fn plain(json: &str) -> Plain<'_> {
    match json {
        "null" => Plain::Json(""),
        _ => serde_json::from_str(json).map_or(Plain::Json(json), Plain::Text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_no_formula_for_a_spreadsheet() {
        for text in ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1"] {
            assert_eq!(Cells::ForSpreadsheets.of(text), format!("'{text}"));
            assert_eq!(Cells::AsTheyAre.of(text), text);
        }
        assert_eq!(Cells::ForSpreadsheets.of("a=b"), "a=b");
        assert!(
            matches!(plain("-5"), Plain::Json("-5"))
                && matches!(plain("\"-5\""), Plain::Text(text) if text == "-5")
        );
    }
}
