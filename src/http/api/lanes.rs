//! Queues and workers, and why something is not moving.

use super::{
    Api,
    fields::{Place, Query},
    guard::Client,
    problem::Problem,
};
use crate::{
    store::{
        queues,
        workers::{self, Listed},
    },
    why::{self, Reason},
};
use axum::{Json, extract::State};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct Queues {
    queues: Vec<queues::Shown>,
}

#[derive(Debug, Serialize)]
pub(super) struct Workers {
    workers: Vec<Listed>,
}

/// A queue after it was paused or resumed.
#[derive(Debug, Serialize)]
pub(super) struct Steered {
    name: String,
    paused: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct Why {
    subject: String,
    reasons: Vec<Reason>,
}

pub(super) async fn queues(State(api): State<Api>, query: Query) -> Result<Json<Queues>, Problem> {
    query.done()?;
    Ok(Json(Queues { queues: queues::list(&**api.client().await?).await? }))
}

pub(super) async fn queue(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<queues::Shown>, Problem> {
    query.done()?;
    let name = place.name()?;
    let all = queues::list(&**api.client().await?).await?;
    let found = all.into_iter().find(|queue| queue.name == name);
    found.map(Json).ok_or_else(|| Problem::not_found(&format!("queue {name}")))
}

pub(super) async fn pause(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Steered>, Problem> {
    query.done()?;
    let name = place.name()?;
    queues::pause(&**api.client().await?, &name, client.name()).await?;
    Ok(Json(Steered { name, paused: true }))
}

pub(super) async fn resume(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Json<Steered>, Problem> {
    query.done()?;
    let name = place.name()?;
    queues::resume(&**api.client().await?, &name, client.name()).await?;
    Ok(Json(Steered { name, paused: false }))
}

pub(super) async fn workers(State(api): State<Api>, query: Query) -> Result<Json<Workers>, Problem> {
    query.done()?;
    Ok(Json(Workers { workers: workers::list(&*api.client().await?, None).await? }))
}

pub(super) async fn worker(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<Listed>, Problem> {
    query.done()?;
    let id = place.word("worker")?;
    let found = workers::list(&*api.client().await?, Some(id)).await?.pop();
    found.map(Json).ok_or_else(|| Problem::not_found("worker of this id"))
}

pub(super) async fn why_batch(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<Why>, Problem> {
    query.done()?;
    let id = place.id()?;
    answer(format!("batch {id}"), why::batch(&**api.client().await?, id).await?)
}

pub(super) async fn why_task(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<Why>, Problem> {
    query.done()?;
    let id = place.id()?;
    answer(format!("task {id}"), why::task(&**api.client().await?, id).await?)
}

pub(super) async fn why_queue(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Json<Why>, Problem> {
    query.done()?;
    let name = place.name()?;
    answer(format!("queue {name}"), why::queue(&**api.client().await?, &name).await?)
}

pub(super) async fn why_retention(State(api): State<Api>, query: Query) -> Result<Json<Why>, Problem> {
    query.done()?;
    answer("retention".into(), Some(why::retention(&**api.client().await?).await?))
}

fn answer(subject: String, reasons: Option<Vec<Reason>>) -> Result<Json<Why>, Problem> {
    match reasons {
        Some(reasons) => Ok(Json(Why { subject, reasons })),
        None => Err(Problem::not_found(&subject)),
    }
}
