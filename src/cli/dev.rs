//! `musterd dev`: a private PostgreSQL and a worker, in one command.

use super::{Exit, Global, screen};
use anyhow::{Context, Result};
use clap::Args;
use musterd::{
    config::{Given, load},
    daemon::Daemon,
    embedded::{self, EmbeddedPostgres, Options},
    handler::Registry,
    signal,
    store::{connect::Target, migrate},
    telemetry,
};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  musterd dev                          keeps its data; Ctrl-C ends it
  musterd dev --ephemeral              throws its data away at the end
  musterd dev --dir ./devdb            in a directory of your choice
  musterd dev --ephemeral --demo       runs a small demonstration and ends";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Dev {
    /// Where the private PostgreSQL and the output files live.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Throw the directory away at the end.
    #[arg(long)]
    ephemeral: bool,
    /// Run a demonstration, show its outcome, and end.
    #[arg(long)]
    demo: bool,
}

/// What the private PostgreSQL means for the configuration.
pub(super) fn settings(url: &str, dir: &Path) -> Vec<(String, String)> {
    vec![
        ("database.url".into(), url.into()),
        ("liveness.backend".into(), "postgres".into()),
        ("outputs.store".into(), "file".into()),
        ("outputs.dir".into(), dir.join("outputs").display().to_string()),
    ]
}

impl Dev {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let options = self.options();
        let mut server = tokio::task::spawn_blocking(|| EmbeddedPostgres::start(options)).await??;
        let outcome = self.work(global, &mut server).await;
        let stopped = tokio::task::spawn_blocking(|| server.stop()).await?;
        let exit = outcome?;
        stopped.context("the private PostgreSQL did not stop cleanly")?;
        Ok(exit)
    }

    fn options(&self) -> Options {
        match (&self.dir, self.ephemeral) {
            (Some(dir), true) => Options::ephemeral(dir),
            (Some(dir), false) => Options::kept(dir),
            (None, true) => Options::ephemeral(embedded::ephemeral_dir()),
            (None, false) => Options::kept(embedded::default_dir()),
        }
    }

    async fn work(&self, global: &Global, server: &mut EmbeddedPostgres) -> Result<Exit> {
        let mut flags: Vec<String> = settings(server.url(), server.dir())
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        flags.extend(global.set.iter().cloned());
        let loaded = load(&Given { file: global.config.clone(), flags, env: None, dev: Vec::new() })?;
        telemetry::init(&telemetry::Config {
            level: if self.demo { "warn".into() } else { loaded.config.log.level.clone() },
            ..loaded.config.log.clone()
        });

        // From here on a signal drains the worker; before, it ends the process and the server with it.
        let stop = signal::Stop::default();
        let listener = signal::Listener::new()?;
        let applied = bring_up_to_date(server.url()).await?;
        let daemon = Daemon::prepare(loaded.config.clone(), Registry::from_config(&loaded.config)?).await?;
        server.announce()?;
        self.greet(global, server, &applied, daemon.address())?;
        let ended = tokio::select! {
            ended = daemon.run(stop.clone()) => ended?,
            () = listener.listen(stop.clone()) => return Ok(Exit::Failed),
        };
        Ok(if ended.is_clean() { Exit::Done } else { Exit::Failed })
    }

    fn greet(
        &self,
        global: &Global,
        server: &EmbeddedPostgres,
        applied: &[String],
        http: Option<std::net::SocketAddr>,
    ) -> Result<()> {
        let http = http.map(|address| format!("http://{address}"));
        if global.json {
            return screen::json(&serde_json::json!({
                "url": server.url(), "dir": server.dir(), "pid": std::process::id(), "http": http, "migrated": applied,
            }));
        }
        screen::line(&format!("PostgreSQL  {}", server.url()))?;
        screen::line(&format!("data        {}", server.dir().display()))?;
        screen::line(&format!("health      {}/readyz", http.unwrap_or_default()))?;
        if !self.demo {
            screen::line("")?;
            screen::line("Ready. In another terminal, try:")?;
            screen::line("  seq 1000 | musterd submit - --command noop --wait")?;
            screen::line(&format!("  psql '{}'", server.url()))?;
            screen::line("Ctrl-C drains the worker and stops everything.")?;
        }
        Ok(())
    }
}

async fn bring_up_to_date(url: &str) -> Result<Vec<String>> {
    let mut client = Target::parse(url)?.open("musterd migrate").await?;
    let report = migrate::migrate(&mut client).await;
    client.close().await;
    Ok(report?.applied.into_iter().map(|step| step.name).collect())
}
