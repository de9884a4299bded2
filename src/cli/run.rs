//! `musterd run`: one worker, until SIGTERM.

use super::{Exit, Global};
use anyhow::Result;
use clap::Args;
use musterd::{config::load, daemon, signal, telemetry};

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
        let loaded = load(&global.given())?;
        telemetry::init(&loaded.config.log);
        for warning in &loaded.warnings {
            tracing::warn!(key = warning.key, "{}", warning.message);
        }
        let stop = signal::Stop::default();
        let listener = signal::Listener::new()?;
        let ended = tokio::select! {
            ended = daemon::run(loaded.config, stop.clone()) => ended?,
            () = listener.listen(stop.clone()) => return Ok(Exit::Failed),
        };
        Ok(if ended.is_clean() { Exit::Done } else { Exit::Failed })
    }
}
