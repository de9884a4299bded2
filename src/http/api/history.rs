//! What was done, by whom: the events of the database, which every change leaves.

use super::{
    Api,
    fields::{Query, duration, id, name, number, one_of},
    problem::Problem,
};
use crate::store::{
    errors::{self, Common},
    events::{self, Event, Filter, KINDS},
};
use axum::{Json, extract::State};
use serde::Serialize;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(86_400);

#[derive(Debug, Serialize)]
pub(super) struct List {
    events: Vec<Event>,
    next_before: Option<i64>,
}

pub(super) async fn list(State(api): State<Api>, mut query: Query) -> Result<Json<List>, Problem> {
    let filter = Filter {
        batch: query.one("batch", id),
        task: query.one("task", id),
        kind: query.one("kind", one_of(&KINDS)).map(str::to_owned),
        before: query.one("before", id),
        limit: query.one("limit", number(1, 1_000)).unwrap_or(20),
    };
    query.done()?;
    let events = events::list(&**api.client().await?, &filter).await?;
    let is_full = events.len() as i64 == filter.limit;
    let next_before = events.last().filter(|_| is_full).map(|last| last.id);
    Ok(Json(List { events, next_before }))
}

#[derive(Debug, Serialize)]
pub(super) struct Errors {
    errors: Vec<Common>,
}

/// What rows of all batches failed with, in groups.
pub(super) async fn errors(State(api): State<Api>, mut query: Query) -> Result<Json<Errors>, Problem> {
    let since = query.one("since", duration).unwrap_or(DAY);
    let command = query.one("command", name);
    let limit = query.one("limit", number(1, 1_000)).unwrap_or(20);
    query.done()?;
    let client = api.client().await?;
    let errors = errors::since(&**client, since.as_secs_f64(), command.as_deref(), limit).await?;
    Ok(Json(Errors { errors }))
}
