//! Logs: for people on a terminal, JSON for machines. Never a payload, never a secret.

use crate::problems::Problems;
use serde::{Deserialize, Serialize};
use std::io::IsTerminal;
use tracing_subscriber::{
    EnvFilter, filter::LevelFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

/// The `[log]` section.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// A level, or a filter such as `info,musterd::flow=debug`; `RUST_LOG` wins over it.
    pub level: String,
    pub format: Format,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Human on a terminal, else JSON.
    #[default]
    Auto,
    Human,
    Json,
}

impl Default for Config {
    fn default() -> Self {
        Self { level: "info".into(), format: Format::default() }
    }
}

impl Config {
    pub(crate) fn check(&self, problems: &mut Problems) {
        let directives = self.level.split(',').map(str::trim).filter(|directive| !directive.is_empty());
        for word in directives.filter(|directive| !directive.contains(['=', '['])) {
            // A filter takes any other word for a target, and then says nothing of all the others.
            problems.unless(
                word.parse::<LevelFilter>().is_ok(),
                "log.level",
                format!("{word:?} is no level: off, error, warn, info, debug or trace; of one part, musterd::flow=debug"),
            );
        }
        if let Err(error) = filter(&self.level) {
            problems.error("log.level", format!("is not a log filter: {error}"));
        }
    }
}

/// Sends every event of the process to stderr, which leaves stdout to what a command prints.
pub fn init(config: &Config) {
    let level = std::env::var("RUST_LOG").ok().filter(|value| !value.is_empty());
    let chosen = level.as_deref().unwrap_or(&config.level);
    let (filter, mistake) = match filter(chosen) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(&config.level), Some(error)),
    };
    let registry = tracing_subscriber::registry().with(filter);
    let started = if is_json(config.format) {
        // Fields at the top level: a log store indexes `batch`, not `fields.batch`.
        report_panics_as_events();
        registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).try_init()
    } else {
        let colours = std::io::stderr().is_terminal()
            && std::env::var_os("NO_COLOR").is_none_or(|wish| wish.is_empty());
        registry
            .with(fmt::layer().with_ansi(colours).with_target(false).with_writer(std::io::stderr))
            .try_init()
    };
    if let (Ok(()), Some(error)) = (started, mistake) {
        tracing::warn!(%error, "RUST_LOG is not a log filter; using log.level");
    }
    #[cfg(feature = "otel")]
    crate::spans::start();
}

/// A panic's own words on stderr would be lines that are not JSON. A command that logs nothing has no such lines.
fn report_panics_as_events() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !tracing::enabled!(tracing::Level::ERROR) {
            return usual(panic);
        }
        let place = panic.location().map(ToString::to_string);
        let reason = panic.payload_as_str().unwrap_or("no message");
        tracing::error!(place, reason, "a panic");
    }));
}

/// Whether logs in this format are JSON lines here.
pub fn is_json(format: Format) -> bool {
    match format {
        Format::Auto => !std::io::stderr().is_terminal(),
        Format::Human => false,
        Format::Json => true,
    }
}

/// The crates beneath us speak only of what needs a person, unless asked.
fn filter(level: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    // A pool's sessions that end are logged by the part that needed them; at the end of `dev` none does.
    const QUIET: &str =
        "tokio_postgres=warn,deadpool=error,fred=error,hyper=warn,refinery_core=warn,rustls=warn,s3=warn";
    if level.trim().is_empty() {
        return EnvFilter::builder().parse("info");
    }
    let quiet = if level.contains(',') || level.contains('=') { String::new() } else { format!("{QUIET},") };
    EnvFilter::builder().parse(format!("{quiet}{level}"))
}
