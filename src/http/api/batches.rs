//! Batches as people see and steer them.

use super::{
    Api,
    fields::{Object, Place, Query, id, name, number, one_of},
    guard::Client,
    problem::Problem,
    upload::json_body,
};
use crate::store::{
    batches::{self, Progress},
    errors::{self, Group},
    listing::{self, Filter, RowPage, Which},
    retention,
    steering::{self, Detail, Redrive, Steer},
};
use crate::{error_group::ErrorGroup, lines::Lines};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct List {
    batches: Vec<Progress>,
    next_before: Option<i64>,
}

/// A batch or task after it was steered.
#[derive(Debug, Serialize)]
pub(super) struct Steered {
    pub(super) id: i64,
    pub(super) state: String,
}

const STATES: &[&str] = &["held", "queued", "running", "succeeded", "failed", "aborted"];

pub(super) async fn list(State(api): State<Api>, mut query: Query) -> Result<Json<List>, Problem> {
    let states = query.many("state", one_of(STATES));
    let filter = Filter {
        states: (!states.is_empty()).then(|| states.into_iter().map(str::to_owned).collect()),
        command: query.one("command", name),
        queue: query.one("queue", name),
        before: query.one("before", id),
        limit: query.one("limit", number(1, 1_000)).unwrap_or(20),
    };
    query.done()?;
    let batches = listing::batches(&*api.client().await?, &filter).await?;
    let is_full = batches.len() as i64 == filter.limit;
    let next_before = batches.last().filter(|_| is_full).map(|last| last.id);
    Ok(Json(List { batches, next_before }))
}

pub(super) async fn show(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<Detail>, Problem> {
    query.done()?;
    let progress = find(&api, place.id()?).await?;
    Ok(Json(steering::detail(&**api.client().await?, progress).await?))
}

/// The batch, or that there is none.
pub(super) async fn find(api: &Api, id: i64) -> Result<Progress, Problem> {
    let found = batches::progress(&**api.client().await?, id).await?;
    found.ok_or_else(|| Problem::not_found(&format!("batch {id}")))
}

#[derive(Debug, Serialize)]
pub(super) struct Errors {
    batch: i64,
    generation: i32,
    errors: Vec<Group>,
}

/// What its rows failed with, in groups.
pub(super) async fn errors(
    State(api): State<Api>,
    place: Place,
    mut query: Query,
) -> Result<Json<Errors>, Problem> {
    let id = place.id()?;
    let generation = query.one("generation", number(1, i32::MAX));
    let limit = query.one("limit", number(1, 1_000)).unwrap_or(20);
    query.done()?;
    let batch = find(&api, id).await?;
    let errors = errors::of_batch(&**api.client().await?, id, generation, limit).await?;
    Ok(Json(Errors { batch: id, generation: generation.unwrap_or(batch.generation), errors }))
}

pub(super) async fn rows(
    State(api): State<Api>,
    place: Place,
    mut query: Query,
) -> Result<Json<RowPage>, Problem> {
    let id = place.id()?;
    let state = query.one("state", which);
    let group = query.one("error", group).map(Which::InGroup);
    let generation = query.one("generation", number(1, i32::MAX)).map(Which::FailedIn);
    let asked: Vec<Which> = [state, group, generation].into_iter().flatten().collect();
    if asked.len() > 1 {
        query
            .refuse("state", "goes with neither \"error\" nor \"generation\", and those not with each other");
    }
    let which = asked.first().copied().unwrap_or(Which::All);
    let from = query.one("from", number(1, i32::MAX)).unwrap_or(1);
    let limit = query.one("limit", number(1, 1_000)).unwrap_or(50);
    query.done()?;
    find(&api, id).await?;
    let client = api.client().await?;
    let page = listing::rows(&client, id, which, from, limit, api.page_bytes).await?;
    retention::check_data(&**client, id).await?;
    Ok(Json(page))
}

/// A group of errors.
pub(super) fn group(text: &str) -> Result<ErrorGroup, String> {
    text.parse()
}

fn which(text: &str) -> Result<Which, String> {
    Ok(match one_of(&["queued", "running", "succeeded", "failed", "aborted"])(text)? {
        "queued" => Which::Queued,
        "running" => Which::Running,
        "succeeded" => Which::Succeeded,
        "failed" => Which::Failed,
        _ => Which::Aborted,
    })
}

pub(super) async fn hold(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Steered>, Problem> {
    steer(&api, place, query, client, Steer::Hold).await
}

pub(super) async fn release(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Steered>, Problem> {
    steer(&api, place, query, client, Steer::Release).await
}

/// Its failed rows run again; the answer does not wait for them.
pub(super) async fn redrive(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    query.done()?;
    let id = place.id()?;
    // Without a body: all that failed.
    let (what, dry_run) = match headers.contains_key(header::CONTENT_TYPE) {
        false => Default::default(),
        true => {
            let config = &api.config;
            let body = json_body(&headers, body, config.max_body_bytes, config.body_timeout).await?;
            redrive_of(&body)?
        }
    };
    find(&api, id).await?;
    let asks = api.client().await?;
    Ok(match dry_run {
        true => Json(steering::preview(&asks, id, &what).await?).into_response(),
        false => Json(steering::redrive(&asks, id, &what, client.name()).await?).into_response(),
    })
}

fn redrive_of(body: &[u8]) -> Result<(Redrive, bool), Problem> {
    const MOST_GROUPS: usize = 1_000;
    let mut object = Object::parse(body)?;
    let groups = |texts: Vec<String>| -> Result<Vec<ErrorGroup>, String> {
        match texts.len() <= MOST_GROUPS {
            true => texts.iter().map(|text| group(text)).collect(),
            false => Err(format!("must be at most {MOST_GROUPS} groups")),
        }
    };
    let what = Redrive {
        groups: object.one("errors", "an array of error groups", groups).unwrap_or_default(),
        lines: object.text("lines", Lines::parse),
        input: object.json("where"),
        generation: object.one("generation", "a whole number", |n: i64| number(1, i32::MAX)(&n.to_string())),
        context: object.json("context"),
        command: object.text("command", name),
    };
    let dry_run = object.one("dry_run", "true or false", Ok).unwrap_or_default();
    object.done()?;
    Ok((what, dry_run))
}

/// Its rows stay, whatever retention says.
pub(super) async fn hold_data(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Progress>, Problem> {
    keep_data(&api, place, query, client, Steer::HoldData).await
}

pub(super) async fn release_data(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Progress>, Problem> {
    keep_data(&api, place, query, client, Steer::ReleaseData).await
}

async fn keep_data(
    api: &Api,
    place: Place,
    query: Query,
    client: Client,
    what: Steer,
) -> Result<Json<Progress>, Problem> {
    query.done()?;
    let id = place.id()?;
    steering::steer(&*api.client().await?, id, what, client.name()).await?;
    find(api, id).await.map(Json)
}

/// Nothing more of it starts; it has ended when no worker holds a block of it. The answer does not wait for that.
pub(super) async fn abort(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Steered>, Problem> {
    steer(&api, place, query, client, Steer::Abort).await
}

async fn steer(
    api: &Api,
    place: Place,
    query: Query,
    client: Client,
    what: Steer,
) -> Result<Json<Steered>, Problem> {
    query.done()?;
    let id = place.id()?;
    steering::steer(&*api.client().await?, id, what, client.name()).await?;
    let batch = find(api, id).await?;
    let state = if batch.aborting { "aborting".to_owned() } else { batch.state.to_string() };
    Ok(Json(Steered { id, state }))
}
