//! A worker of your own, with a handler in Rust: no protocol, no process, the crate's trait.
//!
//! `cargo run --example rust_handler -- musterd.toml` works like `musterd run`, with one command more: `greet`.

use futures::{FutureExt, future::BoxFuture};
use musterd::{
    config::{Given, load},
    daemon::Daemon,
    handler::{Config, Done, Handler, Outcome, RowCall},
    json::Json,
    signal, telemetry,
};
use std::sync::Arc;

/// Greets the person a row names.
struct Greet;

#[derive(serde::Deserialize)]
struct Row {
    name: String,
}

impl Handler for Greet {
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        async move {
            let row: Row = match serde_json::from_str(call.input) {
                Ok(row) => row,
                // The row is wrong, and will be wrong tomorrow.
                Err(error) => return Outcome::Failed(error.to_string().into()),
            };
            let greeting = serde_json::json!({ "greeting": format!("Hello, {}!", row.name) });
            match Json::of(&greeting) {
                Ok(result) => Outcome::Succeeded(Done { result: Some(result), ..Done::default() }),
                Err(error) => Outcome::Retry { error: error.to_string().into(), after: None },
            }
        }
        .boxed()
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // rustls has no provider of its own choice.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let file = std::env::args_os().nth(1).map(Into::into);
    let config = load(&Given { file, ..Given::default() })?.config;
    telemetry::init(&config.log);
    let handlers = config.registry()?.with("greet", Arc::new(Greet), Config::default());
    let stop = signal::Stop::default();
    let listener = signal::Listener::new()?;
    tokio::select! {
        ended = Daemon::prepare(config, handlers).await?.run(stop.clone()) => drop(ended?),
        () = listener.listen(stop.clone()) => {}
    }
    Ok(())
}
