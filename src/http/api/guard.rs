//! The door of the API: who may come in, and what a browser is talked into may not.
//!
//! Without tokens the machine itself is the boundary: only loopback is answered, and only when it is called by its own
//! name, so that no web page gets here by a name of its own that leads to 127.0.0.1.

use super::{Api, problem::Problem, tokens::Scope};
use crate::http::Peer;
use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{net::IpAddr, time::Instant};

pub(super) async fn guard(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    let (began, method) = (Instant::now(), request.method().clone());
    let path = request
        .extensions()
        .get::<axum::extract::MatchedPath>()
        .map_or("unknown", |path| path.as_str())
        .to_owned();
    let (parts, body) = request.into_parts();
    let admitted = admit(&api, peer.0.ip(), &parts).await;
    let mut response = match admitted.and_then(|()| api.request_slot()) {
        Ok(_slot) => next.run(Request::from_parts(parts, body)).await,
        Err(problem) => problem.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    // Neither the query nor the path itself: both can hold what a person typed.
    tracing::debug!(%method, path, status = response.status().as_u16(), ms = began.elapsed().as_millis() as u64,
        "answered");
    response
}

async fn admit(api: &Api, peer: IpAddr, request: &Parts) -> Result<(), Problem> {
    api.rates.take(peer).map_err(|wait| {
        let detail = "too many requests of one client (http.rate_limit); slow down";
        Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", detail)
            .retry_after(wait.as_secs_f64().ceil() as u64)
    })?;
    refuse_other_sites(&request.headers)?;
    refuse_forms(request)?;
    // The description has nothing in it that the manual has not. By its whole path, which begins after /v1 here: an
    // output file may have the same name.
    if request.method == Method::GET && request.uri.path() == "/openapi.json" {
        return Ok(());
    }
    if !api.tokens.are_wanted() {
        return admit_local(api, request);
    }
    let wanted = match request.method {
        Method::GET | Method::HEAD | Method::OPTIONS => Scope::Read,
        _ => Scope::Write,
    };
    match bearer(&request.headers) {
        None => Err(unauthorized("Bearer", "a token is needed: Authorization: Bearer TOKEN")),
        Some(token) => match api.tokens.scope_of(token).await {
            None => Err(unauthorized("Bearer error=\"invalid_token\"", "the token is not one of this API")),
            Some(scope) if scope < wanted => Err(Problem::new(
                StatusCode::FORBIDDEN,
                "insufficient_scope",
                "this token may read only (http.read_tokens_file); this needs one that may write",
            )
            .with(header::WWW_AUTHENTICATE, "Bearer error=\"insufficient_scope\", scope=\"write\"")),
            Some(_) => Ok(()),
        },
    }
}

fn unauthorized(challenge: &'static str, detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail).with(header::WWW_AUTHENTICATE, challenge)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Without tokens: this machine alone, by its own name.
fn admit_local(api: &Api, request: &Parts) -> Result<(), Problem> {
    if !api.is_loopback {
        let detail = "the API needs tokens when it listens on more than loopback: set http.write_tokens_file (and \
                      http.read_tokens_file), or http.listen to 127.0.0.1";
        return Err(Problem::new(StatusCode::FORBIDDEN, "tokens_required", detail));
    }
    let host = host_of(request).unwrap_or_default();
    if is_of_this_machine(host) {
        return Ok(());
    }
    let detail = "without tokens the API answers to localhost and loopback addresses only; set \
                  http.write_tokens_file to use another name";
    Err(Problem::new(StatusCode::FORBIDDEN, "foreign_host", detail))
}

fn host_of(request: &Parts) -> Option<&str> {
    let authority = match request.headers.get(header::HOST) {
        Some(host) => host.to_str().ok()?,
        None => request.uri.authority()?.as_str(),
    };
    Some(without_port(authority))
}

fn without_port(authority: &str) -> &str {
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    }
}

fn is_of_this_machine(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Browsers say which site a request comes from. No other site than this one has any business here.
fn refuse_other_sites(headers: &HeaderMap) -> Result<(), Problem> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let is_foreign = text(header::HeaderName::from_static("sec-fetch-site"))
        .is_some_and(|site| !["same-origin", "none"].contains(&site));
    let host = text(header::HOST).unwrap_or_default();
    let is_other = text(header::ORIGIN).is_some_and(|origin| {
        let origin = origin.split_once("://").map_or(origin, |(_, authority)| authority);
        !origin.eq_ignore_ascii_case(host)
    });
    if is_foreign || is_other {
        let detail = "this request comes from a page of another site; the API is closed to those";
        return Err(Problem::new(StatusCode::FORBIDDEN, "cross_site", detail));
    }
    Ok(())
}

/// What any page can send without being asked first: forms and plain text.
fn refuse_forms(request: &Parts) -> Result<(), Problem> {
    let is_form = media_type(&request.headers).is_some_and(|media_type| {
        ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain"]
            .contains(&media_type.as_str())
    });
    if is_form && ![Method::GET, Method::HEAD].contains(&request.method) {
        return Err(unsupported("forms and plain text are not taken"));
    }
    Ok(())
}

/// The type of the body, without its parameters, in lower case.
pub(super) fn media_type(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(header::CONTENT_TYPE)?.to_str().unwrap_or("?");
    Some(text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

pub(super) fn unsupported(detail: &str) -> Problem {
    Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_its_own() {
        for host in
            ["127.0.0.1:9464", "127.9.9.9", "localhost", "LOCALHOST:1", "[::1]:9464", "[::ffff:127.0.0.1]"]
        {
            assert!(is_of_this_machine(without_port(host)), "{host}");
        }
        for host in
            ["", "rebind.example", "localhost.example:9464", "10.0.0.1", "127.0.0.1.example", "[2001:db8::1]"]
        {
            assert!(!is_of_this_machine(without_port(host)), "{host}");
        }
    }
}
