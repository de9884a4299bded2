//! The command line: one file per subcommand.

mod batch;
mod completions;
mod config;
mod demo;
mod dev;
mod doctor;
mod enqueue;
mod errors;
mod events;
mod handler;
mod input;
mod man;
mod migrate;
mod prune;
mod queue;
mod run;
mod schema;
pub(crate) mod screen;
mod submit;
mod task;
mod top;
mod why;
mod worker;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use musterd::{
    config::{Given, Loaded, load},
    embedded,
    store::{Pooler, connect::OneShot},
};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  musterd dev                              a private PostgreSQL and a worker, for trying things out
  musterd migrate --config musterd.toml    create or update the tables
  musterd run --config musterd.toml        work until SIGTERM
  musterd submit people.csv --command noop make a batch of a file's rows
  musterd batch list                       see the batches; `batch --help` for the rest
  musterd top                              watch everything live
  musterd doctor                           check everything a worker needs";

/// Muster runs large batches of work on PostgreSQL: every row accounted for, every batch finished exactly once.
#[derive(Debug, Parser)]
#[command(name = "musterd", version, after_help = EXAMPLES, max_term_width = 110, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// The configuration file (TOML). Without one: the defaults. Without `database.url`: a running `musterd dev`.
    #[arg(long, global = true, value_name = "FILE", env = "MUSTERD_CONFIG")]
    config: Option<PathBuf>,
    /// Set one key, over file and environment, as in --set queues.default.fibers=4. May be repeated.
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print JSON, for machines.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Work: claim blocks and tasks, run their handlers, until SIGTERM.
    Run(run::Run),
    /// Everything in one: a private PostgreSQL and a worker, for development.
    Dev(dev::Dev),
    /// Create or update Muster's tables in the database.
    Migrate(migrate::Migrate),
    /// Make a batch of a file's rows.
    Submit(Box<submit::Submit>),
    /// See and steer batches.
    #[command(subcommand)]
    Batch(Box<batch::BatchCommand>),
    /// Enqueue a task, or one for each line of a file.
    Enqueue(Box<enqueue::Enqueue>),
    /// See and steer a task.
    #[command(subcommand)]
    Task(task::TaskCommand),
    /// See, pause and resume queues.
    #[command(subcommand)]
    Queue(queue::QueueCommand),
    /// Say why a batch, a task or a queue is not moving, and what to do.
    #[command(subcommand)]
    Why(why::Why),
    /// Watch queues, batches, workers and rates on a live screen.
    Top(top::Top),
    /// Show what rows of all batches failed with, in groups, the largest first.
    Errors(errors::Errors),
    /// List what operators did, and what Muster did unasked.
    Events(events::Events),
    /// Delete now what is older than [retention] says, or show what that would be.
    Prune(prune::Prune),
    /// See who works here.
    #[command(subcommand)]
    Worker(worker::WorkerCommand),
    /// Try a handler on sample rows, or list what the live workers handle.
    #[command(subcommand)]
    Handler(handler::HandlerCommand),
    /// Check or show the configuration.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Check everything a worker needs, and say what to do about what is missing.
    Doctor(doctor::Doctor),
    /// Print a script that completes musterd's commands and options in a shell.
    Completions(completions::Completions),
    /// Write the manual pages into a directory.
    Man(man::Man),
}

/// How a command ended, as its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    /// The work or the check failed.
    Failed,
    /// The arguments or the configuration are wrong, and that has been said.
    Usage,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
        })
    }
}

/// The hidden subcommand that clears up after a killed worker; it is no command of a person's, and needs no runtime.
pub(crate) fn watch() -> Option<std::process::ExitCode> {
    use musterd::handler::exec::watch;
    let asked = std::env::args_os().nth(1).is_some_and(|word| word == watch::SUBCOMMAND);
    asked.then(|| watch::run().map_or(std::process::ExitCode::FAILURE, |()| Exit::Done.into()))
}

impl Cli {
    pub(crate) async fn execute(self) -> anyhow::Result<Exit> {
        let Self { global, command } = self;
        match command.execute(&global).await {
            Err(error) => Err(schema::explain(&global, error).await),
            done => done,
        }
    }
}

impl Command {
    async fn execute(self, global: &Global) -> anyhow::Result<Exit> {
        match self {
            Self::Run(command) => command.execute(global).await,
            Self::Dev(command) => command.execute(global).await,
            Self::Migrate(command) => command.execute(global).await,
            Self::Submit(command) => command.execute(global).await,
            Self::Batch(command) => command.execute(global).await,
            Self::Enqueue(command) => command.execute(global).await,
            Self::Task(command) => command.execute(global).await,
            Self::Queue(command) => command.execute(global).await,
            Self::Why(command) => command.execute(global).await,
            Self::Errors(command) => command.execute(global).await,
            Self::Events(command) => command.execute(global).await,
            Self::Prune(command) => command.execute(global).await,
            Self::Worker(command) => command.execute(global).await,
            Self::Handler(command) => command.execute(global).await,
            Self::Config(command) => command.execute(global),
            Self::Top(command) => command.execute(global).await,
            Self::Doctor(command) => command.execute(global).await,
            Self::Completions(command) => command.execute(),
            Self::Man(command) => command.execute(global),
        }
    }
}

/// Whether a file says where PostgreSQL is. One that cannot be read might: that is said when it is loaded.
fn file_names_a_database(file: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(file) else { return true };
    let Ok(table) = text.parse::<toml::Table>() else { return true };
    table
        .get("database")
        .is_some_and(|database| ["url", "url_file"].iter().any(|key| database.get(key).is_some()))
}

impl Global {
    /// What the user gave, with a running `musterd dev` beneath it when that names no database.
    fn given(&self) -> Given {
        let dev = if self.names_a_database() { None } else { embedded::discover() };
        Given {
            file: self.config.clone(),
            flags: self.set.clone(),
            env: None,
            dev: dev.map(|dev| dev::settings(&dev.url, &dev.dir)).unwrap_or_default(),
        }
    }

    /// Whether file, environment or flags say where PostgreSQL is. Then nothing of a running dev is used: its outputs
    /// beside another database would be a mixture that was not asked for.
    fn names_a_database(&self) -> bool {
        let variable = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        self.config.as_deref().is_some_and(file_names_a_database)
            || ["MUSTERD__DATABASE__URL", "MUSTERD__DATABASE__URL_FILE"].into_iter().any(variable)
            || self.set.iter().any(|flag| flag.trim_start().starts_with("database.url"))
    }

    /// The configuration, for a command that prints its own answer and logs only what goes wrong.
    fn load(&self) -> anyhow::Result<Loaded> {
        let mut loaded = load(&self.given())?;
        let quiet = musterd::telemetry::Config { level: "warn".into(), ..loaded.config.log.clone() };
        musterd::telemetry::init(&quiet);
        // It is not configured whether there is a pooler: a command asks a few things and goes, so it need not find out.
        let database = &mut loaded.config.database;
        if database.pooler == Pooler::Auto && database.direct_url.is_none() {
            database.pooler = Pooler::Transaction;
        }
        Ok(loaded)
    }

    /// Before the first program of an `exec` handler is started: see to it that none outlives us, or reads what we know.
    fn watch_over(config: &musterd::config::Config) {
        if config.handlers.values().any(|handler| handler.kind == musterd::handler::Kind::Exec) {
            musterd::handler::exec::watch::start();
            musterd::handler::exec::reaper::start();
            musterd::handler::exec::hide_own_memory();
        }
    }

    /// One connection to the database, past a pooler if there is a way.
    async fn connect(&self, config: &musterd::store::Config) -> anyhow::Result<OneShot> {
        let target = config.direct_target().context("database.url")?;
        Ok(target.open("musterd").await?)
    }
}
