//! Tasks: enqueued, seen and steered.

use super::{
    Api,
    batches::Steered,
    fields::{
        Object, Place, Query, duration, id, idempotency_key, key, max_attempts, name, number, one_of,
        priority, time_limit,
    },
    guard::Client,
    problem::Problem,
    submit::{json_format, traceparent},
    upload::{bridge, json_body},
};
use crate::{
    flow::{
        enqueue,
        submit::{Given, Meter},
    },
    json::Json,
    store::tasks::{self, Filter, NewTask, NewTasks, Shown, Steer},
};
use axum::{
    Json as Answer,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct List {
    tasks: Vec<Shown>,
    next_before: Option<i64>,
}

const STATES: &[&str] =
    &["held", "scheduled", "queued", "running", "waiting", "succeeded", "failed", "aborted"];

pub(super) async fn enqueue(
    State(api): State<Api>,
    headers: HeaderMap,
    query: Query,
    body: Body,
) -> Result<Response, Problem> {
    query.done()?;
    let key = idempotency_key(&headers)?;
    let body = json_body(&headers, body, api.config.max_body_bytes, api.config.body_timeout).await?;
    let task = NewTask {
        idempotency_key: key,
        traceparent: traceparent(&headers),
        ..new_task(&body, api.limits.max_row_bytes)?
    };
    let id = tasks::enqueue(&**api.client().await?, &task).await?;
    let location = format!("/v1/tasks/{id}");
    let answer = Answer(serde_json::json!({ "id": id }));
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], answer).into_response())
}

pub(super) async fn enqueue_many(
    State(api): State<Api>,
    caller: Client,
    headers: HeaderMap,
    mut query: Query,
    body: Body,
) -> Result<Response, Problem> {
    let task = new_tasks(&mut query, &headers);
    if headers.contains_key("idempotency-key") {
        query.refuse("idempotency-key", "is not taken here: a repeat enqueues the tasks again");
    }
    let format = json_format(&headers)?;
    query.done()?;
    let _slot = api.upload_slot(&caller)?;
    let mut client = api.upload_client().await?;
    let (source, pump) = bridge(body, api.patience());
    let given = Given { source, format, limits: api.limits, exported: false };
    let enqueuing = enqueue::enqueue_many(&mut client, &task, given, Meter::default());
    let enqueued = pump.drive(enqueuing).await?;
    Ok((StatusCode::CREATED, Answer(enqueued)).into_response())
}

fn new_tasks(query: &mut Query, headers: &HeaderMap) -> NewTasks {
    let task = NewTasks {
        command: query.required("command", name),
        queue: query.one("queue", name),
        priority: query.one("priority", priority),
        delay: query.one("delay", duration),
        run_at: query.one("run_at", moment),
        max_attempts: query.one("max_attempts", max_attempts),
        timeout: query.one("timeout", time_limit),
        on_child_failure: query.one("on_child_failure", one_of(FAILURES)).unwrap_or(FAILURES[0]).to_owned(),
        traceparent: traceparent(headers),
    };
    if task.delay.is_some() && task.run_at.is_some() {
        query.refuse("delay", BOTH_TIMES);
    }
    task
}

const FAILURES: &[&str] = &["wait", "abort_siblings"];
const BOTH_TIMES: &str = "stands beside run_at; give one of them";

fn moment(text: &str) -> Result<jiff::Timestamp, String> {
    text.parse().map_err(|_| "must be a moment such as 2026-12-24T18:00:00Z".to_owned())
}

fn new_task(body: &[u8], most: usize) -> Result<NewTask, Problem> {
    let mut object = Object::parse(body)?;
    object.required("command");
    let task = NewTask {
        command: object.text("command", name).unwrap_or_default(),
        payload: object.json("payload").unwrap_or_else(|| Json::from_text("{}")),
        queue: object.text("queue", name),
        priority: object.one("priority", "a whole number", |n: i64| priority(&n.to_string())),
        delay: object.text("delay", duration),
        run_at: object.text("run_at", moment),
        max_attempts: object.one("max_attempts", "a whole number", |n: i64| max_attempts(&n.to_string())),
        timeout: object.text("timeout", time_limit),
        dedup_key: object.text("dedup_key", key),
        dedup_replace: object.one("replace", "true or false", Ok).unwrap_or_default(),
        after: object.one("after", "an array of ids", after).unwrap_or_default(),
        on_child_failure: object.text("on_child_failure", one_of(FAILURES)).unwrap_or(FAILURES[0]).to_owned(),
        idempotency_key: None,
        traceparent: None,
    };
    if task.delay.is_some() && task.run_at.is_some() {
        object.refuse("delay", BOTH_TIMES);
    }
    if task.dedup_replace && task.dedup_key.is_none() {
        object.refuse("replace", "needs a dedup_key");
    }
    object.done()?;
    refuse_large(&task.payload, most)?;
    Ok(task)
}

/// A number such as 1e131071 is a few bytes here and 131072 wherever it is read.
fn refuse_large(payload: &Json, most: usize) -> Result<(), Problem> {
    let expansion = crate::json::check::check(payload.text()).unwrap_or(u64::MAX);
    if expansion.saturating_add(payload.len() as u64) > most as u64 {
        let detail =
            format!("the payload has more than {most} bytes (submit.max_row_bytes), exponents spelled out");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail));
    }
    Ok(())
}

fn after(ids: Vec<i64>) -> Result<Vec<i64>, String> {
    const MOST: usize = 1_000;
    match ids.iter().all(|id| *id > 0) && ids.len() <= MOST {
        true => Ok(ids),
        false => Err(format!("must be at most {MOST} ids of tasks or batches")),
    }
}

pub(super) async fn list(State(api): State<Api>, mut query: Query) -> Result<Answer<List>, Problem> {
    let filter = Filter {
        state: query.one("state", one_of(STATES)).map(str::to_owned),
        command: query.one("command", name),
        queue: query.one("queue", name),
        parent: query.one("parent", id),
        before: query.one("before", id),
        limit: query.one("limit", number(1, 1_000)).unwrap_or(20),
    };
    query.done()?;
    let page = tasks::list(&**api.client().await?, &filter, api.page_bytes).await?;
    let is_full = page.is_cut || page.items.len() as i64 == filter.limit;
    let next_before = page.items.last().filter(|_| is_full).map(|last| last.id);
    Ok(Answer(List { tasks: page.items, next_before }))
}

pub(super) async fn show(
    State(api): State<Api>,
    place: Place,
    query: Query,
) -> Result<Answer<Shown>, Problem> {
    query.done()?;
    let id = place.id()?;
    let found = tasks::show(&**api.client().await?, id).await?;
    found.map(Answer).ok_or_else(|| Problem::not_found(&format!("task {id}")))
}

pub(super) async fn abort(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Answer<Steered>, Problem> {
    steer(&api, place, query, client, Steer::Abort).await
}

pub(super) async fn retry(
    State(api): State<Api>,
    place: Place,
    query: Query,
    client: Client,
) -> Result<Answer<Steered>, Problem> {
    steer(&api, place, query, client, Steer::Retry).await
}

async fn steer(
    api: &Api,
    place: Place,
    query: Query,
    client: Client,
    what: Steer,
) -> Result<Answer<Steered>, Problem> {
    query.done()?;
    let id = place.id()?;
    let state = tasks::steer(&**api.client().await?, id, what, client.name()).await?;
    Ok(Answer(Steered { id, state }))
}
