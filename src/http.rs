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
use std::{net::SocketAddr, time::Duration};
use tokio::net::TcpListener;
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
pub async fn bind(config: &Config) -> Result<TcpListener, HttpError> {
    let address = config.listen;
    TcpListener::bind(address).await.map_err(|source| HttpError::Bind { address, source })
}

/// Answers until `stop`.
pub async fn serve(
    listener: TcpListener,
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
    axum::serve(listener, app)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .map_err(|source| HttpError::Serve { source })
}

#[derive(Clone, Debug)]
struct Shared {
    health: Health,
    metrics: Metrics,
}

async fn scrape(State(Shared { metrics, .. }): State<Shared>) -> axum::response::Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn livez() -> &'static str {
    "ok\n"
}

/// Ready to take work: started, not draining, nothing essential down. Says what is missing otherwise.
async fn readyz(State(Shared { health, .. }): State<Shared>) -> (StatusCode, Json<serde_json::Value>) {
    let reasons = health.not_ready_because();
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(serde_json::json!({ "ready": reasons.is_empty(), "reasons": reasons })))
}
