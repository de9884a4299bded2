//! The HTTP port: health for Kubernetes now, metrics and the API beside it.

use crate::{metrics::Metrics, supervisor::Health};
use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The `[http]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address and port; port 0 takes a free one and logs it.
    pub listen: SocketAddr,
}

impl Default for Config {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9464)) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot listen on {address}: {source}; set http.listen to another address")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("the HTTP server stopped")]
    Serve { source: std::io::Error },
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
}

impl axum::serve::Listener for Port {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match self.0.accept().await {
                Ok(connection) => return connection,
                // A caller that gave up, or no file descriptor left: both pass, the second not at once.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// After `stop`, how long requests that have begun may take to end.
const LINGER: Duration = Duration::from_secs(1);

/// Answers until `stop`.
pub async fn serve(
    port: Port,
    health: Health,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<(), HttpError> {
    let app = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .layer(tower_http::timeout::TimeoutLayer::with_status_code(
            StatusCode::REQUEST_TIMEOUT,
            Duration::from_secs(10),
        ))
        .layer(tower_http::limit::RequestBodyLimitLayer::new(64 * 1024))
        .with_state(Shared { health, metrics });
    let serving = axum::serve(port, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let patience = async {
        stop.cancelled().await;
        tokio::time::sleep(LINGER).await;
    };
    // A caller who sends half a request and waits must not decide when the daemon ends.
    tokio::select! {
        served = serving.into_future() => served.map_err(|source| HttpError::Serve { source }),
        () = patience => Ok(()),
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
