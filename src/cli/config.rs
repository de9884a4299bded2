//! `musterd config check | show`.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Subcommand;
use musterd::config::{ConfigError, load};

const CHECK_EXAMPLES: &str = "\
Examples:
  musterd config check --config musterd.toml
  MUSTERD__QUEUES__DEFAULT__FIBERS=16 musterd config check";

const SHOW_EXAMPLES: &str = "\
Examples:
  musterd config show
  musterd config show --config musterd.toml --json";

#[derive(Debug, Subcommand)]
#[command(after_help = SHOW_EXAMPLES)]
pub(super) enum ConfigCommand {
    /// Say everything that is wrong with the configuration; exit code 2 if anything is.
    #[command(after_help = CHECK_EXAMPLES)]
    Check,
    /// Show every value in force and where it came from. Secrets are not shown.
    #[command(after_help = SHOW_EXAMPLES)]
    Show,
}

impl ConfigCommand {
    pub(super) fn execute(self, global: &Global) -> Result<Exit> {
        match self {
            Self::Check => check(global),
            Self::Show => show(global),
        }
    }
}

fn check(global: &Global) -> Result<Exit> {
    let outcome = load(&global.given());
    if global.json {
        let problems: Vec<_> = match &outcome {
            Ok(loaded) => loaded.warnings.clone(),
            Err(ConfigError { problems }) => problems.iter().cloned().collect(),
        };
        screen::json(&serde_json::json!({ "ok": outcome.is_ok(), "problems": problems }))?;
        return Ok(if outcome.is_ok() { Exit::Done } else { Exit::Usage });
    }
    for warning in &outcome?.warnings {
        screen::line(&format!("warning: {warning}"))?;
    }
    screen::line("the configuration is good")?;
    Ok(Exit::Done)
}

fn show(global: &Global) -> Result<Exit> {
    let loaded = load(&global.given())?;
    if global.json {
        let sources: serde_json::Map<_, _> =
            loaded.values.iter().map(|value| (value.key.clone(), value.source.clone().into())).collect();
        screen::json(&serde_json::json!({
            "config": loaded.nested(),
            "sources": serde_json::Value::Object(sources),
        }))?;
        return Ok(Exit::Done);
    }
    let mut table = screen::table([screen::whole("key"), screen::prose("value"), screen::prose("from")]);
    for value in &loaded.values {
        table.add_row([value.key.clone(), screen::value(&value.value), value.source.clone()]);
    }
    table.print()?;
    Ok(Exit::Done)
}
