//! The HTTP port: health for Kubernetes, metrics, and the API beside them.

pub(crate) mod api;
mod connections;
mod pace;
mod tls;

pub use api::Api;
use pace::Limits;

use crate::{health::Health, metrics::Metrics, problems::Problems};
use axum::{
    Json, Router,
    extract::{ConnectInfo, State},
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The `[http]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address and port; port 0 takes a free one and logs it.
    pub listen: SocketAddr,
    /// The certificate (PEM, with those between it and its root) and its key, for TLS on the port; both or none. Read again when they change.
    pub tls_cert_file: Option<PathBuf>,
    pub tls_key_file: Option<PathBuf>,
    /// Tokens that may read: one a line, or a directory of files with one each. Read again when they change.
    pub read_tokens_file: Option<PathBuf>,
    /// Tokens that may do everything.
    pub write_tokens_file: Option<PathBuf>,
    /// Requests a second of one client to the API, with a burst of two seconds' worth; 0 for no limit.
    pub rate_limit: u32,
    /// The largest body of a request to the API that is no upload of rows.
    pub max_body_bytes: usize,
    /// A client that sends nothing of a body, or takes nothing of an answer, for so long is cut off.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// An upload of rows that takes longer is given up.
    #[serde(with = "humantime_serde")]
    pub upload_timeout: Duration,
    /// An export, a download or a follower that takes longer is cut off.
    #[serde(with = "humantime_serde")]
    pub download_timeout: Duration,
    /// Connections of the API for short questions, beside `database.max_connections`; opened when it is asked.
    pub connections: NonZeroU32,
    /// Uploads at a time; each has a connection, beside the others.
    pub max_uploads: NonZeroU32,
    /// Exports and downloads at a time; each export has a connection, beside the others.
    pub max_downloads: NonZeroU32,
    /// Clients that follow a batch at a time.
    pub max_followers: NonZeroU32,
}

/// A JSON body is in memory whole, and so is its parsed form.
const LARGEST_BODY: usize = 128 << 20;
/// Of any limit of time.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            (1..=LARGEST_BODY).contains(&self.max_body_bytes),
            "http.max_body_bytes",
            format!("must be between 1 and {LARGEST_BODY}"),
        );
        problems.unless(
            self.tls_cert_file.is_some() == self.tls_key_file.is_some(),
            "http.tls_cert_file",
            "and http.tls_key_file go together: set both, or none",
        );
        for (key, limit) in [
            ("http.body_timeout", self.body_timeout),
            ("http.upload_timeout", self.upload_timeout),
            ("http.download_timeout", self.download_timeout),
        ] {
            problems.unless(!limit.is_zero(), key, "must be above zero, or nothing can be sent");
            problems.unless(limit <= LONGEST, key, "must be at most 365 days");
        }
        for (key, many) in [
            ("http.max_uploads", self.max_uploads),
            ("http.max_downloads", self.max_downloads),
            ("http.max_followers", self.max_followers),
        ] {
            problems.unless(many.get() <= 100_000, key, "must be at most 100000");
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        let few = |count| NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN);
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9464)),
            tls_cert_file: None,
            tls_key_file: None,
            read_tokens_file: None,
            write_tokens_file: None,
            rate_limit: 100,
            max_body_bytes: 1 << 20,
            body_timeout: Duration::from_secs(30),
            upload_timeout: Duration::from_secs(3600),
            download_timeout: Duration::from_secs(3600),
            connections: few(4),
            max_uploads: few(4),
            max_downloads: few(4),
            max_followers: few(100),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot listen on {address}: {source}; set http.listen to another address")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("TLS on the port: {path} cannot be used: {reason}; http.tls_cert_file and http.tls_key_file name a certificate and its key, in PEM", path = path.display())]
    Tls { path: PathBuf, reason: String },
}

/// Takes the port before anything else starts, so that a port in use is found at once.
pub async fn bind(config: &Config) -> Result<Port, HttpError> {
    let address = config.listen;
    let tls = tls::acceptor(config)?.map(Arc::new);
    let bound = TcpListener::bind(address).await;
    let limits = Limits { progress: config.body_timeout, whole: config.download_timeout };
    bound
        .map(|listener| Port { listener: Arc::new(listener), limits, tls })
        .map_err(|source| HttpError::Bind { address, source })
}

/// A port we have. It is served twice: while the daemon starts, and then for as long as it lives.
#[derive(Clone, Debug)]
pub struct Port {
    listener: Arc<TcpListener>,
    limits: Limits,
    tls: Option<Arc<tls::Acceptor>>,
}

impl Port {
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    async fn accept(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(connection) => return connection,
                // A caller that gave up, or no file descriptor left: both pass, the second not at once.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

/// Where a request comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(SocketAddr);

/// A request of the API that is being answered, to the last byte of the answer.
#[derive(Clone, Debug)]
struct RequestSlot(#[expect(dead_code, reason = "held, not read")] Arc<api::slots::Slot>);

/// After `stop`, how long requests that have begun may take to end.
const LINGER: Duration = Duration::from_secs(1);

/// Answers until `stop`. The API is not there yet while the daemon starts.
pub async fn serve(port: Port, health: Health, metrics: Metrics, api: Option<Api>, stop: CancellationToken) {
    let is_loopback = port.address().is_some_and(|address| address.ip().to_canonical().is_loopback());
    let app = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .layer(tower_http::timeout::TimeoutLayer::with_status_code(
            StatusCode::REQUEST_TIMEOUT,
            Duration::from_secs(10),
        ))
        .layer(tower_http::limit::RequestBodyLimitLayer::new(64 * 1024))
        .with_state(Shared { health, metrics, is_loopback })
        // After the layers: uploads are larger and take longer.
        .merge(api::router(api.clone()));
    let patience = async {
        stop.cancelled().await;
        api.iter().for_each(Api::stop);
        tokio::time::sleep(LINGER).await;
    };
    // A caller who sends half a request and waits must not decide when the daemon ends.
    tokio::select! {
        () = connections::serve(&port, app, stop.clone()) => {}
        () = patience => {}
    }
}

#[derive(Clone, Debug)]
struct Shared {
    health: Health,
    metrics: Metrics,
    /// Whether only this machine can reach us.
    is_loopback: bool,
}

async fn scrape(
    State(Shared { metrics, is_loopback, .. }): State<Shared>,
    request: axum::extract::Request,
) -> axum::response::Response {
    if is_loopback && !is_local(&request) {
        return foreign();
    }
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match metrics.scrape().await {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Whether the client itself calls this machine by its own name: no page of a name that leads here, and no proxy.
fn is_local(request: &axum::extract::Request) -> bool {
    let peer = request.extensions().get::<ConnectInfo<Peer>>();
    peer.is_some_and(|ConnectInfo(peer)| peer.0.ip().to_canonical().is_loopback())
        && api::is_addressed_here(request.headers(), request.uri())
        && !api::is_forwarded(request.headers())
}

fn foreign() -> axum::response::Response {
    let detail = "on loopback this is for this machine alone, by its own name (localhost, 127.0.0.1)\n";
    (StatusCode::FORBIDDEN, detail).into_response()
}

/// Alive: every loop of the daemon turns. Whatever is wrong outside, a restart would not fix it.
async fn livez(State(Shared { health, .. }): State<Shared>) -> axum::response::Response {
    let stuck = health.stuck();
    if stuck.is_empty() {
        return "ok\n".into_response();
    }
    let body = Json(serde_json::json!({ "alive": false, "stuck": stuck }));
    (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
}

/// Ready to take work: started, not draining, nothing essential down. Says what is missing otherwise: to this machine in full, to
/// others by the part's name alone, because the database's words may follow it.
async fn readyz(
    State(Shared { health, is_loopback, .. }): State<Shared>,
    request: axum::extract::Request,
) -> axum::response::Response {
    let is_local = is_local(&request);
    if is_loopback && !is_local {
        return foreign();
    }
    let reasons = if is_local { health.not_ready_because() } else { health.parts_not_ready() };
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(serde_json::json!({ "ready": reasons.is_empty(), "reasons": reasons }))).into_response()
}
