//! Rows coming in: the body streams into the same COPY that the command line uses, all of it or none of it.

use super::{
    Api,
    fields::{Place, Query, idempotency_key, json_text, max_attempts, name, priority, time_limit},
    guard::{Client, media_type, unsupported},
    problem::Problem,
    upload::{bridge, refuse_encodings},
};
use crate::{
    flow::{
        input::{CsvOptions, Format},
        submit::{self, Canary, Given, MaxFailed, Meter, OnBudget, Order},
    },
    json::Json,
    keep,
    store::batches,
    traceparent::Traceparent,
};
use axum::{
    Json as Answer,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};

pub(super) async fn submit(
    State(api): State<Api>,
    caller: Client,
    headers: HeaderMap,
    mut query: Query,
    body: Body,
) -> Result<Response, Problem> {
    let order = order(&mut query, &headers)?;
    let input = Input::read(&mut query, &headers)?;
    query.done()?;
    let _slot = api.upload_slot(&caller)?;
    let mut client = api.upload_client().await?;
    let (source, pump) = bridge(body, api.patience());
    let given = Given { source, format: input.format, limits: api.limits, exported: input.exported };
    let submitting = submit::submit(&mut client, &order, given, Meter::default());
    let submitted = pump.drive(submitting).await?;
    let status = if submitted.repeated { StatusCode::OK } else { StatusCode::CREATED };
    let location = format!("/v1/batches/{}", submitted.id);
    Ok((status, [(header::LOCATION, location)], Answer(submitted)).into_response())
}

pub(super) async fn append(
    State(api): State<Api>,
    caller: Client,
    headers: HeaderMap,
    place: Place,
    mut query: Query,
    body: Body,
) -> Result<Response, Problem> {
    let id = place.id()?;
    let key = idempotency_key(&headers)?;
    let input = Input::read(&mut query, &headers)?;
    query.done()?;
    let _slot = api.upload_slot(&caller)?;
    let mut client = api.upload_client().await?;
    if batches::progress(&**client, id).await?.is_none() {
        return Err(Problem::not_found(&format!("batch {id}")));
    }
    let (source, pump) = bridge(body, api.patience());
    let given = Given { source, format: input.format, limits: api.limits, exported: input.exported };
    let appending = submit::append(&mut client, id, key.as_deref(), given, Meter::default());
    let appended = pump.drive(appending).await?;
    Ok(Answer(appended).into_response())
}

/// What is wrong with one is said by the database, which knows how many rows there are.
fn canary(query: &mut Query) -> Option<Canary> {
    let word = |text: &str| match text.len() <= 100 && !text.chars().any(char::is_control) {
        true => Ok(text.to_owned()),
        false => Err("is too long, or has a control character in it".to_owned()),
    };
    let rows = query.one("canary", word);
    let (sample, auto_release) = (query.flag("sample"), query.one("auto_release", word));
    if rows.is_none() && (sample || auto_release.is_some()) {
        query.refuse("canary", "is required beside \"sample\" and \"auto_release\"");
    }
    rows.map(|rows| Canary { rows, sample, auto_release })
}

fn order(query: &mut Query, headers: &HeaderMap) -> Result<Order, Problem> {
    Ok(Order {
        command: query.required("command", name),
        queue: query.one("queue", name),
        context: query.one("context", json_text).unwrap_or_else(|| Json::from_text("{}")),
        priority: query.one("priority", priority),
        idempotency_key: idempotency_key(headers)?,
        hold: query.flag("hold"),
        max_attempts: query.one("max_attempts", max_attempts),
        row_timeout: query.one("row_timeout", time_limit),
        max_failed: query.one("max_failed", max_failed).unwrap_or(MaxFailed::Rows(0)),
        on_done: query.one("on_done", name),
        on_budget: query.one("on_budget", |text| text.parse::<OnBudget>()),
        canary: canary(query),
        keep: query.one("keep", keep::parse_time),
        traceparent: traceparent(headers),
    })
}

fn max_failed(text: &str) -> Result<MaxFailed, String> {
    text.parse().map_err(|_| "must be a number of rows (10) or a share (5%)".into())
}

/// One header that is a trace context; anything else is as good as none.
pub(super) fn traceparent(headers: &HeaderMap) -> Option<Traceparent> {
    let mut given = headers.get_all("traceparent").iter();
    let first = given.next()?;
    given.next().is_none().then(|| Traceparent::parse(first.to_str().ok()?))?
}

/// How the body is to be read.
struct Input {
    format: Format,
    exported: bool,
}

impl Input {
    fn read(query: &mut Query, headers: &HeaderMap) -> Result<Self, Problem> {
        refuse_encodings(headers)?;
        let delimiter = query.one("delimiter", CsvOptions::character);
        let quote = query.one("quote", CsvOptions::character).unwrap_or('"');
        let csv = |usual| {
            let options = CsvOptions::new(delimiter.unwrap_or(usual), quote);
            options.map(Format::Csv).map_err(|error| Problem::mistake("delimiter", error.to_string()))
        };
        let media_type = media_type(headers);
        let format = match media_type.as_deref() {
            Some("text/csv") => csv(',')?,
            Some("text/tab-separated-values") => csv('\t')?,
            other => other.and_then(json_type).ok_or_else(|| {
                unsupported(
                    "rows come as application/x-ndjson, text/csv, text/tab-separated-values or application/json (one array)",
                )
            })?,
        };
        refuse_charsets(headers)?;
        Ok(Self { format, exported: query.flag("exported") })
    }
}

fn json_type(media_type: &str) -> Option<Format> {
    match media_type {
        "application/x-ndjson" | "application/ndjson" | "application/jsonl" => Some(Format::Ndjson),
        "application/json" => Some(Format::JsonArray),
        _ => None,
    }
}

/// How a body of payloads is to be read.
pub(super) fn json_format(headers: &HeaderMap) -> Result<Format, Problem> {
    refuse_encodings(headers)?;
    let format = media_type(headers).as_deref().and_then(json_type);
    let format = format.ok_or_else(|| {
        unsupported("payloads come as application/x-ndjson or application/json (one array)")
    })?;
    refuse_charsets(headers)?;
    Ok(format)
}

fn refuse_charsets(headers: &HeaderMap) -> Result<(), Problem> {
    let charset = headers.get(header::CONTENT_TYPE).and_then(|value| charset(value.to_str().ok()?));
    match charset.is_some_and(|charset| !["utf-8", "utf8", "us-ascii"].contains(&charset.as_str())) {
        true => Err(unsupported("the body must be UTF-8")),
        false => Ok(()),
    }
}

fn charset(content_type: &str) -> Option<String> {
    let parameters = content_type.split(';').skip(1).filter_map(|parameter| parameter.split_once('='));
    let mut found = parameters.filter(|(name, _)| name.trim().eq_ignore_ascii_case("charset"));
    found.next().map(|(_, value)| value.trim().trim_matches('"').to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charset_is_found_however_it_is_written() {
        assert_eq!(charset("text/csv"), None);
        assert_eq!(charset("text/csv; header=present; Charset=\"UTF-8\"").as_deref(), Some("utf-8"));
        assert_eq!(charset("text/csv;charset=utf-16").as_deref(), Some("utf-16"));
    }
}
