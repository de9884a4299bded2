//! The door of the API: who may come in, and what a browser is talked into may not.
//!
//! Without tokens the machine itself is the boundary: only loopback is answered, and only when it is called by its own
//! name, so that no web page gets here by a name of its own that leads to 127.0.0.1.

use super::{
    Api,
    fields::Place,
    problem::Problem,
    rate,
    tokens::{Holder, Scope},
};
use crate::{http::Peer, loopback::is_loopback};
use axum::{
    extract::{ConnectInfo, FromRequestParts, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{convert::Infallible, net::IpAddr, sync::Arc, time::Instant};

/// The holder of the token that a request came with; none where no token is needed.
#[derive(Clone, Debug, Default)]
pub(super) struct Client(Option<Holder>);

impl Client {
    pub(super) fn name(&self) -> Option<&str> {
        self.0.as_ref().map(|holder| &*holder.name)
    }

    pub(super) fn holder(&self) -> Option<Arc<str>> {
        self.0.as_ref().map(|holder| Arc::clone(&holder.name))
    }

    /// Whether no other token allows this.
    pub(super) fn is_alone(&self, wanted: Scope) -> bool {
        self.0.as_ref().is_some_and(|holder| !holder.has_others(wanted))
    }

    #[cfg(test)]
    pub(super) fn named(name: &str) -> Self {
        Self(Some(Holder { name: name.into(), scope: Scope::Write, others: Some(Scope::Write) }))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

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
    let (mut parts, body) = request.into_parts();
    let subject = subject(&mut parts).await;
    let admitted = admit(&api, peer.0.ip(), &mut parts).await;
    let client = parts.extensions.get::<Client>().cloned();
    // A request of which nothing is known is no news: any stranger can send a thousand of them.
    let is_change = wanted_by(&method) == Scope::Write && (client.is_some() || admitted.is_ok());
    let caller = client.clone().unwrap_or_default();
    let mut response = match admitted.and_then(|()| api.request_slot(&caller, wanted_by(&method))) {
        Ok(slot) => {
            let mut response = next.run(Request::from_parts(parts, body)).await;
            response.extensions_mut().insert(slot);
            response
        }
        Err(problem) => problem.into_response(),
    };
    if is_change {
        let made =
            || response.headers().get(header::LOCATION)?.to_str().ok()?.rsplit('/').next().map(str::to_owned);
        let subject = subject.or_else(made).unwrap_or_default();
        tracing::info!(client = caller.name().unwrap_or("none"), peer = %peer.0.ip(), action = %method, path, subject,
            status = response.status().as_u16(), "a client of the API asked for a change");
    }
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    // Neither the query nor the path itself: both can hold what a person typed.
    tracing::debug!(%method, path, status = response.status().as_u16(), ms = began.elapsed().as_millis() as u64,
        "answered");
    response
}

/// The id or the queue that the path names, if it can be one.
async fn subject(request: &mut Parts) -> Option<String> {
    let place = Place::from_request_parts(request, &()).await.ok()?;
    place.id().ok().map(|id| id.to_string()).or_else(|| place.name().ok())
}

/// Whether the request may come in. Whose token it has is kept with it.
async fn admit(api: &Api, peer: IpAddr, request: &mut Parts) -> Result<(), Problem> {
    let token = bearer(&request.headers).filter(|_| api.tokens.are_wanted());
    let holder = match token {
        Some(token) => api.tokens.holder_of(token).await,
        None => None,
    };
    // Callers that we know count by their token. Behind a proxy all others have one address: they share what it may ask.
    let caller = match (token, &holder) {
        (Some(token), Some(_)) => rate::Client::of_token(token),
        _ => rate::Client::of_address(peer),
    };
    let has_token = token.is_some();
    if let Some(holder) = &holder {
        request.extensions.insert(Client(Some(holder.clone())));
    }
    api.rates.take(caller).map_err(|wait| {
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
    match holder {
        None if !has_token => Err(unauthorized("Bearer", "a token is needed: Authorization: Bearer TOKEN")),
        None => Err(unauthorized("Bearer error=\"invalid_token\"", "the token is not one of this API")),
        Some(holder) if holder.scope < wanted_by(&request.method) => Err(Problem::new(
            StatusCode::FORBIDDEN,
            "insufficient_scope",
            "this token may read only (http.read_tokens_file); this needs one that may write",
        )
        .with(header::WWW_AUTHENTICATE, "Bearer error=\"insufficient_scope\", scope=\"write\"")),
        Some(_) => Ok(()),
    }
}

fn wanted_by(method: &Method) -> Scope {
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => Scope::Read,
        _ => Scope::Write,
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
    if is_forwarded(&request.headers) {
        let detail = "without tokens the API answers to this machine alone, and a proxy has passed this request on; set \
                      http.write_tokens_file";
        return Err(Problem::new(StatusCode::FORBIDDEN, "forwarded", detail));
    }
    if is_addressed_here(&request.headers, &request.uri) {
        return Ok(());
    }
    let detail = "without tokens the API answers to localhost and loopback addresses only; set \
                  http.write_tokens_file to use another name";
    Err(Problem::new(StatusCode::FORBIDDEN, "foreign_host", detail))
}

/// Whether a proxy says that it passes the request on for another machine.
pub(in crate::http) fn is_forwarded(headers: &HeaderMap) -> bool {
    let mut names = headers.keys().map(header::HeaderName::as_str);
    names.any(|name| name.starts_with("x-forwarded-") || ["forwarded", "x-real-ip", "via"].contains(&name))
}

/// Whether the request names this machine by a name of its own.
pub(in crate::http) fn is_addressed_here(headers: &HeaderMap, uri: &Uri) -> bool {
    let authority = match headers.get(header::HOST) {
        Some(host) => host.to_str().ok(),
        None => uri.authority().map(|authority| authority.as_str()),
    };
    authority.is_some_and(|authority| is_loopback(without_port(authority)))
}

fn without_port(authority: &str) -> &str {
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    }
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
    fn a_port_is_no_part_of_a_name() {
        for host in ["127.0.0.1:9464", "LOCALHOST:1", "[::1]:9464", "[::ffff:127.0.0.1]"] {
            assert!(is_loopback(without_port(host)), "{host}");
        }
        for host in ["localhost.example:9464", "127.0.0.1.example", "[2001:db8::1]:9464"] {
            assert!(!is_loopback(without_port(host)), "{host}");
        }
    }
}
