//! The HTTP port: health for Kubernetes, metrics, and the API beside them.

mod api;
mod connections;

pub use api::Api;

use crate::{config::Problems, metrics::Metrics, supervisor::Health};
use axum::{
    Json, Router,
    extract::State,
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
    /// Tokens that may read: one a line, or a directory of files with one each. Read again when they change.
    pub read_tokens_file: Option<PathBuf>,
    /// Tokens that may do everything.
    pub write_tokens_file: Option<PathBuf>,
    /// Requests a second of one client to the API, with a burst of two seconds' worth; 0 for no limit.
    pub rate_limit: u32,
    /// The largest body of a request to the API that is no upload of rows.
    pub max_body_bytes: usize,
    /// A body that sends nothing for so long is given up.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// An upload of rows that takes longer is given up.
    #[serde(with = "humantime_serde")]
    pub upload_timeout: Duration,
    /// Connections of the API for short questions, beside `database.max_connections`; opened when it is asked.
    pub connections: NonZeroU32,
    /// Uploads, exports and downloads at a time; uploads and exports have a connection each, beside the others.
    pub max_streams: NonZeroU32,
    /// Clients that follow a batch at a time.
    pub max_followers: NonZeroU32,
}

/// A JSON body is in memory whole, and so is its parsed form.
const LARGEST_BODY: usize = 128 << 20;

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        problems.unless(
            (1..=LARGEST_BODY).contains(&self.max_body_bytes),
            "http.max_body_bytes",
            format!("must be between 1 and {LARGEST_BODY}"),
        );
        for (key, limit) in
            [("http.body_timeout", self.body_timeout), ("http.upload_timeout", self.upload_timeout)]
        {
            problems.unless(!limit.is_zero(), key, "must be above zero, or nothing can be sent");
        }
        for (key, many) in
            [("http.max_streams", self.max_streams), ("http.max_followers", self.max_followers)]
        {
            problems.unless(many.get() <= 100_000, key, "must be at most 100000");
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        let few = |count| NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN);
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9464)),
            read_tokens_file: None,
            write_tokens_file: None,
            rate_limit: 100,
            max_body_bytes: 1 << 20,
            body_timeout: Duration::from_secs(30),
            upload_timeout: Duration::from_secs(3600),
            connections: few(4),
            max_streams: few(4),
            max_followers: few(100),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot listen on {address}: {source}; set http.listen to another address")]
    Bind { address: SocketAddr, source: std::io::Error },
}

/// Takes the port before anything else starts, so that a port in use is found at once.
pub async fn bind(config: &Config) -> Result<Port, HttpError> {
    let address = config.listen;
    let bound = TcpListener::bind(address).await;
    bound.map(|listener| Port(Arc::new(listener))).map_err(|source| HttpError::Bind { address, source })
}

/// A port we have. It is served twice: while the daemon starts, and then for as long as it lives.
#[derive(Clone, Debug)]
pub struct Port(Arc<TcpListener>);

impl Port {
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.local_addr().ok()
    }

    async fn accept(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.0.accept().await {
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

/// After `stop`, how long requests that have begun may take to end.
const LINGER: Duration = Duration::from_secs(1);

/// Answers until `stop`. The API is not there yet while the daemon starts.
pub async fn serve(port: Port, health: Health, metrics: Metrics, api: Option<Api>, stop: CancellationToken) {
    let app = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .layer(tower_http::timeout::TimeoutLayer::with_status_code(
            StatusCode::REQUEST_TIMEOUT,
            Duration::from_secs(10),
        ))
        .layer(tower_http::limit::RequestBodyLimitLayer::new(64 * 1024))
        .with_state(Shared { health, metrics })
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
}

async fn scrape(State(Shared { metrics, .. }): State<Shared>) -> axum::response::Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match metrics.scrape().await {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Alive: every loop of the daemon turns. Whatever is wrong outside, a restart would not mend it.
async fn livez(State(Shared { health, .. }): State<Shared>) -> axum::response::Response {
    let stuck = health.stuck();
    if stuck.is_empty() {
        return "ok\n".into_response();
    }
    let body = Json(serde_json::json!({ "alive": false, "stuck": stuck }));
    (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
}

/// Ready to take work: started, not draining, nothing essential down. Says what is missing otherwise.
async fn readyz(State(Shared { health, .. }): State<Shared>) -> (StatusCode, Json<serde_json::Value>) {
    let reasons = health.not_ready_because();
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(serde_json::json!({ "ready": reasons.is_empty(), "reasons": reasons })))
}
