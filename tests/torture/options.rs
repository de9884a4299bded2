//! The command line, and the course of a run.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

use super::check::{self, Evidence, Findings};
use super::faults::now;
use super::load::{self, Book};
use super::report::Report;
use super::world::World;
use super::{PRIVATE_MOUNTS, nemesis, pipe, plan};

#[derive(Debug, Parser)]
#[command(name = "torture", about = "The whole system under random faults, with a checker")]
enum Options {
    /// Torture it.
    Run(Torture),
    /// Every named step, times what can happen there.
    Grid {
        /// Only steps whose names have this in them.
        #[arg(long, default_value = "")]
        only: String,
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// What the `exec` handler of a replica runs.
    #[command(name = "__exec", hide = true)]
    Exec { replica: i32, port: u16 },
}

#[derive(Clone, Debug, Parser)]
pub(crate) struct Torture {
    /// Repeats what is submitted and what goes wrong, and when.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    #[arg(long, default_value_t = 5.0)]
    pub(crate) minutes: f64,
    /// How much is submitted; 1 is about 400 rows and 40 tasks a second.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) load: f64,
    /// A musterd of another build of the same schema, for one of the replicas.
    #[arg(long)]
    pub(crate) other: Option<PathBuf>,
    /// Only faults whose names have one of these words in them.
    #[arg(long)]
    pub(crate) only: Vec<String>,
    /// No faults at all.
    #[arg(long)]
    pub(crate) calm: bool,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Where the logs go when the run is red.
    #[arg(long, default_value = "target/tmp/torture")]
    pub(crate) logs: PathBuf,
}

pub(crate) fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().collect();
    let options = match given.get(1).map(String::as_str) {
        Some("run" | "grid" | "__exec" | "--help" | "help") => Options::parse(),
        // `cargo test` starts every test program, with its filters or without. This one takes minutes, and is asked for by name.
        _ => {
            println!("torture: not asked for; `make torture` and `make test-grid` do");
            return ExitCode::SUCCESS;
        }
    };
    let done = match options {
        Options::Exec { replica, port } => pipe::serve(replica, port).map(|()| true),
        Options::Grid { only, json } => grid(&only, json),
        Options::Run(torture) => with_own_mounts().and_then(|()| run(torture)),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("torture: {error:#}");
            ExitCode::from(2)
        }
    }
}

#[tokio::main]
async fn grid(only: &str, json: bool) -> Result<bool> {
    super::grid::run(only, json).await
}

/// Starts this program again where what it mounts is its own, and goes with it. Where that cannot be, it does without.
fn with_own_mounts() -> Result<()> {
    let done = std::env::var_os(PRIVATE_MOUNTS).is_some();
    if done || !rustix::process::geteuid().is_root() || !can_mount() {
        return Ok(());
    }
    let mut command = Command::new("unshare");
    command.arg("--mount").arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    Err(command.env(PRIVATE_MOUNTS, "1").exec()).context("unshare")
}

fn can_mount() -> bool {
    let probe = ["--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"];
    Command::new("unshare").args(probe).output().is_ok_and(|output| output.status.success())
}

#[tokio::main]
async fn run(options: Torture) -> Result<bool> {
    // As main does: two libraries of ours bring rustls, and neither may choose for the other.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let seed = options.seed.unwrap_or_else(|| rand::random::<u32>().into());
    let length = Duration::from_secs_f64(options.minutes * 60.0);
    println!("torture: seed {seed}, {} minutes", options.minutes);
    let world = Arc::new(World::start(options.other.clone()).await?);
    let book = Arc::new(Mutex::new(Book::default()));
    let began = now();
    let load = {
        let (world, book) = (Arc::clone(&world), Arc::clone(&book));
        let plan = plan::plan(seed, length, options.load);
        #[expect(clippy::disallowed_methods, reason = "awaited below")]
        tokio::task::spawn(async move { load::run(&world, plan, &book).await })
    };
    let trouble = match options.calm {
        true => Vec::new(),
        false => nemesis::run(&world, seed, length, &options.only).await,
    };
    tokio::time::timeout(length + Duration::from_secs(300), load).await.context("the producers")??;
    let healed = now();
    let mut findings = Findings::default();
    let drained = check::drain(&world, &mut findings).await?;
    let book = book.lock().unwrap().clone();
    findings.wrong.extend(book.wrong.iter().cloned());
    let session = world.admin().await?;
    let retried = session
        .query("SELECT DISTINCT task FROM musterd.events WHERE kind = 'retry' AND task IS NOT NULL", &[])
        .await?;
    let (faults, runs) = (world.faults.all(), world.ledger.read().await?);
    let evidence = Evidence {
        world: &world,
        session: &session,
        book: &book,
        faults: &faults,
        runs: &runs,
        retried: retried.iter().map(|row| row.get(0)).collect(),
    };
    let mut figures = check::everything(&evidence, &mut findings).await?;
    check::leaks::check(&world, &mut findings, &mut figures).await?;
    figures.insert("seconds under faults".into(), ((healed - began).round() as u64).into());
    figures.insert("seconds from healed to drained".into(), ((drained * 10.0).round() / 10.0).into());
    let report = Report {
        seed,
        figures,
        findings,
        kinds: world.faults.by_kind(),
        trouble,
        world: &world,
        book: &book,
    };
    report.print(options.json);
    if !report.findings.is_clean() {
        report.keep_logs(&options.logs)?;
    }
    Ok(report.findings.is_clean())
}
