//! The life of the process: arguments, one command, an exit code.

mod cli;

use clap::Parser;
use musterd::config::ConfigError;
use std::{process::ExitCode, time::Duration};

/// The arguments or the configuration are wrong; clap uses the same.
const USAGE: u8 = 2;

/// How long calls that block may still take when everything else is over.
const LAST_CALLS: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    // rustls has no provider of its own choice: every TLS connection of the process uses ring.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        return complain(&anyhow::anyhow!("a TLS provider was installed before main"));
    }
    if let Some(ended) = cli::watch() {
        return ended;
    }
    let cli = cli::Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return complain(&anyhow::Error::new(error).context("cannot start the runtime")),
    };
    let ended = runtime.block_on(async {
        let ended = cli.execute().await;
        musterd::handler::sql::finish_cancels().await;
        ended
    });
    #[cfg(feature = "otel")]
    musterd::spans::stop();
    // A call that the system does not end (a file on a dead server, a name that is not answered) must not hold up the exit.
    runtime.shutdown_timeout(LAST_CALLS);
    match ended {
        Ok(exit) => exit.into(),
        Err(error) => complain(&error),
    }
}

/// Says what went wrong, on stderr, once.
#[expect(clippy::print_stderr, reason = "the last word of a command that failed, seen by a person")]
fn complain(error: &anyhow::Error) -> ExitCode {
    let described = musterd::error_text::describe(error.as_ref());
    eprintln!("musterd: {}", cli::screen::safe(&described));
    match error.downcast_ref::<ConfigError>() {
        Some(_) => ExitCode::from(USAGE),
        None => ExitCode::FAILURE,
    }
}
