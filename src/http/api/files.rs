//! What a batch gives out: its output files, and its rows as a file.

use super::{
    Api,
    batches::{find, group},
    fields::{Place, Query, one_of},
    guard::Client,
    problem::Problem,
    slots::Slot,
};
use crate::{
    error_text::describe,
    flow::{
        export::{Cells, ExportError, Format, Taker, export},
        outputs::Manifest,
    },
    json::Json,
    objects::Key,
    store::{batches::Progress, export::Rows},
};
use axum::{
    Json as Answer,
    body::Body,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use serde::Serialize;
use std::io;
use tokio::sync::mpsc;
use tokio_util::io::ReaderStream;

#[derive(Debug, Serialize)]
pub(super) struct Outputs {
    batch: i64,
    /// As the batch shows them; none before it has ended, or when there are no files.
    outputs: Option<Json>,
}

pub(super) async fn outputs(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Answer<Outputs>, Problem> {
    query.done()?;
    let batch = find(&api, place.id()?).await?;
    match batch.outputs_gone {
        true => Err(gone(&batch)),
        false => Ok(Answer(Outputs { batch: batch.id, outputs: batch.outputs })),
    }
}

pub(super) async fn download(
    State(api): State<Api>,
    caller: Client,
    place: Place,
    query: Query,
) -> Result<Response, Problem> {
    query.done()?;
    let (id, name) = (place.id()?, place.word("file")?);
    let absent = || Problem::not_found(&format!("output file of this name in batch {id}"));
    let slot = api.download_slot(&caller)?;
    let batch = find(&api, id).await?;
    if batch.outputs_gone {
        return Err(gone(&batch));
    }
    let outputs = batch.outputs.ok_or_else(absent)?;
    let manifest = manifest(&api, &outputs).await?;
    let file = manifest.files.into_iter().find(|file| file.name == name).ok_or_else(absent)?;
    let reader = api.objects.get_stream(&Key::new(&*file.key)?).await?;
    let bytes = ReaderStream::with_capacity(reader, 64 << 10).map(move |bytes| {
        // Kept for as long as bytes flow.
        let _ = &slot;
        bytes
    });
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, file.bytes.to_string()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename*=UTF-8''{}", percent(name))),
        (header::ETAG, format!("\"{}\"", file.sha256)),
    ];
    Ok((headers, Body::from_stream(bytes)).into_response())
}

fn gone(batch: &Progress) -> Problem {
    let detail = format!("the output files of batch {} went with its data", batch.id);
    Problem::new(StatusCode::GONE, "data_gone", detail)
}

async fn manifest(api: &Api, outputs: &Json) -> Result<Manifest, Problem> {
    let outputs: serde_json::Value =
        serde_json::from_str(outputs.text()).map_err(|error| Problem::internal(&error))?;
    let key = Key::new(outputs["manifest"].as_str().unwrap_or_default())?;
    let text = api.objects.read(&key).await?;
    serde_json::from_slice(&text).map_err(|error| Problem::internal(&error))
}

/// A file's name in a header: what is not plain is written as bytes.
fn percent(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    name.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

pub(super) async fn rows(
    State(api): State<Api>,
    caller: Client,
    place: Place,
    mut query: Query,
) -> Result<Response, Problem> {
    let id = place.id()?;
    let rows = query.one("rows", one_of(&["failed", "all"]));
    let format = query.one("format", one_of(&["csv", "ndjson", "spreadsheet"]));
    let group = query.one("error", group);
    if group.is_some() && rows.is_some() {
        query.refuse("error", "does not go with \"rows\"");
    }
    query.done()?;
    const CSV: &str = "text/csv; charset=utf-8";
    let rows = match (rows, group) {
        (_, Some(group)) => Rows::InGroup(group),
        (Some("failed"), None) => Rows::Failed,
        _ => Rows::All,
    };
    let (format, media_type) = match format {
        Some("ndjson") => (Format::Ndjson, "application/x-ndjson"),
        Some("spreadsheet") => (Format::Csv(Cells::ForSpreadsheets), CSV),
        _ => (Format::Csv(Cells::AsTheyAre), CSV),
    };
    let slot = api.download_slot(&caller)?;
    find(&api, id).await?;
    let mut stream = Box::pin(exported(api, id, rows, format, slot));
    // The first piece before the head: what goes wrong at the beginning is answered as a problem.
    let first = match stream.next().await {
        Some(Err(error)) => return Err(error.into()),
        first => first.into_iter(),
    };
    let body = Body::from_stream(stream::iter(first).chain(stream));
    Ok(([(header::CONTENT_TYPE, media_type)], body).into_response())
}

/// The pieces of an export as they are written. Nothing is written ahead of the client by more than a few of them.
fn exported(
    api: Api,
    id: i64,
    rows: Rows,
    format: Format,
    slot: Slot,
) -> impl stream::Stream<Item = Result<Bytes, Failed>> + Send {
    let (pieces, received) = mpsc::channel(2);
    let writing = async move {
        let _slot = slot;
        let mut client = api.export_client().await.map_err(Failed::Before)?;
        let mut out = Out(pieces);
        export(&mut client, id, rows, format, &mut out).await.map_err(Failed::Export)
    };
    let taken = stream::unfold(received, async |mut received| Some((Ok(received.recv().await?), received)));
    // The writer and the reader are one stream: when the client hangs up, both end.
    let ended = writing.into_stream().filter_map(async |written| written.err().map(Err));
    stream::select(taken, ended).filter_map(async |piece| match piece {
        Ok(bytes) if Bytes::is_empty(&bytes) => None,
        piece => Some(piece),
    })
}

/// Why an export broke off.
#[derive(Debug)]
enum Failed {
    Before(Problem),
    Export(ExportError),
}

impl From<Failed> for Problem {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Before(problem) => problem,
            Failed::Export(error) => error.into(),
        }
    }
}

impl From<Failed> for axum::BoxError {
    fn from(failed: Failed) -> Self {
        if let Failed::Export(error) = &failed
            && !error.is_gone()
        {
            tracing::warn!(error = describe(error), "an export broke off");
        }
        "the export broke off".into()
    }
}

struct Out(mpsc::Sender<Bytes>);

impl Taker for Out {
    async fn take(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.0.send(bytes.into()).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn a_file_name_cannot_break_out_of_its_header() {
        assert_eq!(percent("out.csv"), "out.csv");
        assert_eq!(percent("a\"b\r\nü"), "a%22b%0D%0A%C3%BC");
    }
}
