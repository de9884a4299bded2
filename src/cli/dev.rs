//! `musterd dev`: a private PostgreSQL and a worker, in one command.

use super::{Exit, Global, demo, screen};
use anyhow::{Context, Result, bail};
use clap::Args;
use musterd::{
    config::{Given, Loaded, load},
    daemon::{Daemon, DaemonError},
    embedded::{self, EmbeddedPostgres, Options},
    http::HttpError,
    secret::Secret,
    signal,
    store::{connect::Target, migrate},
    telemetry,
};
use std::{
    fs::OpenOptions,
    io::{ErrorKind, IsTerminal, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

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
    /// How many rows the demonstration has.
    #[arg(long, value_name = "N", hide = true, default_value_t = 100_000, requires = "demo")]
    demo_rows: u32,
}

/// The file in the directory that holds the token of the HTTP API: every user of the machine can reach the port.
const TOKEN: &str = "api-token";

/// What the private PostgreSQL means for the configuration.
pub(super) fn settings(url: &str, dir: &Path) -> Vec<(String, String)> {
    vec![
        ("database.url".into(), url.into()),
        ("outputs.store".into(), "file".into()),
        ("outputs.dir".into(), embedded::outputs_dir(dir).display().to_string()),
        ("http.write_tokens_file".into(), dir.join(TOKEN).display().to_string()),
    ]
}

impl Dev {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let options = self.options();
        // A mistake in the configuration is reported before anything is started. The real URL is not known yet.
        let loaded = self.load(global, "postgres://127.0.0.1/musterd", &options.dir)?;
        telemetry::init(&telemetry::Config {
            // The rows of the demo do nothing, faster than any database: its batcher has nothing to warn of.
            level: if self.demo {
                "warn,musterd::flow::batcher=error".into()
            } else {
                loaded.config.log.level.clone()
            },
            ..loaded.config.log.clone()
        });
        // From the first step on: whatever has begun when a signal comes is ended in order.
        let stop = signal::Stop::default();
        let listener = signal::Listener::new()?;
        tokio::select! {
            exit = self.live(global, options, &stop) => exit,
            () = listener.listen(stop.clone()) => Ok(Exit::Failed),
        }
    }

    async fn live(&self, global: &Global, options: Options, stop: &signal::Stop) -> Result<Exit> {
        let mut server = tokio::task::spawn_blocking(|| EmbeddedPostgres::start(options)).await??;
        let outcome = self.work(global, &mut server, stop).await;
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

    fn load(&self, global: &Global, url: &str, dir: &Path) -> Result<Loaded> {
        let own = settings(url, dir).into_iter().map(|(key, value)| format!("{key}={value}"));
        let demo = if self.demo { demo::settings(self.ephemeral) } else { Vec::new() };
        let flags = own.chain(demo).chain(global.set.iter().cloned()).collect();
        Ok(load(&Given { file: global.config.clone(), flags, env: None, dev: Vec::new() })?)
    }

    async fn work(
        &self,
        global: &Global,
        server: &mut EmbeddedPostgres,
        stop: &signal::Stop,
    ) -> Result<Exit> {
        make_token(&server.dir().join(TOKEN))?;
        let loaded = self.load(global, server.url(), server.dir())?;
        let config = loaded.config.clone();
        Global::watch_over(&config);
        let preparing = Box::pin(async {
            let applied = bring_up_to_date(server.url()).await?;
            anyhow::Ok((applied, Box::pin(prepare(loaded)).await?))
        });
        let Some(prepared) = stop.drain.run_until_cancelled(preparing).await else {
            return Ok(Exit::Done);
        };
        let (applied, daemon) = prepared?;
        server.announce()?;
        self.greet(global, server, &applied, daemon.address())?;
        let demo = async {
            match self.demo {
                true => demo::run(global, &config, server.dir(), self.demo_rows).await,
                false => Ok(until(stop).await),
            }
        };
        tokio::select! {
            ended = Box::pin(side_by_side(daemon, demo, stop)) => ended,
            status = death_of(server) => {
                bail!("the private PostgreSQL ended by itself ({status}); see {}/postgres.log", server.dir().display())
            }
        }
    }

    fn greet(
        &self,
        global: &Global,
        server: &EmbeddedPostgres,
        applied: &[String],
        http: Option<std::net::SocketAddr>,
    ) -> Result<()> {
        let http = http.map(|address| format!("http://{address}"));
        // Logs of other programs keep what they are given: the password is for a person's eyes alone.
        let is_seen = std::io::stdout().is_terminal();
        let url = if is_seen { server.url().to_owned() } else { Secret::new(server.url()).masked_url() };
        let token = server.dir().join(TOKEN);
        if global.json {
            return screen::json(&serde_json::json!({
                "url": url, "dir": server.dir(), "pid": std::process::id(), "http": http, "token_file": token, "migrated": applied,
            }));
        }
        screen::line(&format!("PostgreSQL  {url}"))?;
        screen::line(&format!("data        {}", server.dir().display()))?;
        screen::line(&format!("health      {}/readyz", http.unwrap_or_default()))?;
        screen::line(&format!("API token   in {}", token.display()))?;
        if !self.demo {
            screen::line("")?;
            screen::line("Ready. In another terminal, try:")?;
            // As it was called: it may not be on the PATH.
            let musterd = std::env::args().next().unwrap_or_else(|| "musterd".into());
            screen::line(&format!("  seq 1000 | {musterd} submit - --command noop --wait"))?;
            if is_seen {
                screen::line(&format!("  psql '{url}'"))?;
            }
            screen::line("Ctrl-C drains the worker and stops everything.")?;
        }
        Ok(())
    }
}

/// A token for this user, unless there is one from before.
fn make_token(path: &Path) -> Result<()> {
    let mut options = OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(mut file) => {
            let token = hex::encode(rand::random::<[u8; 24]>());
            writeln!(file, "{token}").with_context(|| format!("cannot write {}", path.display()))
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot make {}", path.display())),
    }
}

/// A worker on the usual port; on another one when that is taken and the configuration does not name it.
async fn prepare(loaded: Loaded) -> Result<Daemon> {
    let asked = loaded.values.iter().any(|value| value.key == "http.listen" && value.source != "default");
    let mut config = loaded.config;
    let handlers = config.registry()?;
    match Daemon::prepare(config.clone(), handlers.clone()).await {
        Err(DaemonError::Http(HttpError::Bind { .. })) if !asked => {
            config.http.listen.set_port(0);
            Ok(Daemon::prepare(config, handlers).await?)
        }
        prepared => Ok(prepared?),
    }
}

async fn until(stop: &signal::Stop) -> Exit {
    stop.drain.cancelled().await;
    Exit::Done
}

/// Runs the worker beside `demo`; whichever ends first ends the other.
async fn side_by_side(
    daemon: Daemon,
    demo: impl Future<Output = Result<Exit>>,
    stop: &signal::Stop,
) -> Result<Exit> {
    let working = async {
        let ended = daemon.run(stop.clone()).await;
        stop.drain.cancel();
        ended
    };
    let showing = async {
        let shown = stop.drain.run_until_cancelled(demo).await;
        stop.drain.cancel();
        shown
    };
    let (ended, shown) = tokio::join!(working, showing);
    let clean = if ended?.is_clean() { Exit::Done } else { Exit::Failed };
    // Asked to stop before it was over: then how the worker ended is all there is to say.
    Ok(match shown.transpose()? {
        Some(Exit::Failed) => Exit::Failed,
        _ => clean,
    })
}

/// Waits for an end of the server that was not asked for.
async fn death_of(server: &EmbeddedPostgres) -> std::process::ExitStatus {
    let mut look = tokio::time::interval(Duration::from_millis(500));
    loop {
        look.tick().await;
        if let Some(status) = server.ended() {
            return status;
        }
    }
}

async fn bring_up_to_date(url: &str) -> Result<Vec<String>> {
    let mut client = Target::parse(url)?.open("musterd migrate").await?;
    let report = migrate::migrate(&mut client).await;
    client.close().await;
    Ok(report?.applied.into_iter().map(|step| step.name).collect())
}
