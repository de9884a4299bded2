//! `musterd run`: one worker, until SIGTERM.

use super::{Exit, Global};
use anyhow::Result;
use clap::Args;
use musterd::{config::load, daemon, error_text::describe, signal, telemetry};

const EXAMPLES: &str = "\
Examples:
  musterd run --config musterd.toml
  MUSTERD__DATABASE__URL=postgres://app@db/app musterd run
  musterd run --set queues.default.fibers=16";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Run {}

impl Run {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let mut loaded = load(&global.given())?;
        if global.json {
            loaded.config.log.format = telemetry::Format::Json;
        }
        telemetry::init(&loaded.config.log);
        for warning in &loaded.warnings {
            tracing::warn!(key = warning.key, "{}", warning.message);
        }
        Global::watch_over(&loaded.config);
        let stop = signal::Stop::default();
        let listener = signal::Listener::new()?;
        let format = loaded.config.log.format;
        let ended = tokio::select! {
            ended = Box::pin(daemon::run(loaded.config, stop.clone())) => ended,
            () = listener.listen(stop.clone()) => return Ok(Exit::Failed),
        };
        match ended {
            Ok(ended) if ended.is_clean() => Ok(Exit::Done),
            Ok(_) => Ok(Exit::Failed),
            // A log collector expects each line to be JSON, the last one too.
            Err(error) if telemetry::is_json(format) => {
                tracing::error!(error = describe(&error), "cannot run");
                Ok(Exit::Failed)
            }
            Err(error) => Err(error.into()),
        }
    }
}
