//! `make bench`: how fast the walk of a row is, beside the bare SQL it consists of and beside the usual queue table.
//!
//! Everything runs in one process tree on one private PostgreSQL, in turns, so that a busy machine slows all of them
//! alike: read the ratios first.

#[path = "ground.rs"]
mod ground;

mod throughput {
    pub(crate) mod classic;
    pub(crate) mod latency;
    pub(crate) mod ledger;
    pub(crate) mod load;
    pub(crate) mod report;
    pub(crate) mod scrape;
    pub(crate) mod worker;
}

use anyhow::Result;
use clap::Parser;
use ground::{Ground, bounded, say};
use std::{process::ExitCode, time::Duration};
use throughput::{
    classic, latency, ledger,
    report::{Report, Round},
    worker,
};

#[derive(Debug, Parser)]
#[command(name = "bench", about = "Muster beside the bare SQL of its path and beside a queue table")]
struct Options {
    /// Rows of each measurement.
    #[arg(long, default_value_t = 1_000_000)]
    rows: i32,
    /// How often everything is measured; the figures are medians.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Samples of each latency.
    #[arg(long, default_value_t = 100)]
    samples: usize,
    /// A setting of the daemon over the shipped ones, to see what it changes: `batcher.capacity=1000`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// One JSON object instead of tables.
    #[arg(long)]
    json: bool,
    /// `cargo bench` says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Longer than this and something is wrong; nobody should have to notice it by hand.
const LIMIT: Duration = Duration::from_secs(60 * 60);

#[tokio::main]
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the result, for a person or a program")]
async fn main() -> ExitCode {
    let options = Options::parse();
    match bounded(LIMIT, run(&options)).await {
        Ok(report) if options.json => println!("{}", report.json()),
        Ok(report) => println!("{}", report.text()),
        Err(error) => {
            eprintln!("bench: {error:#}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

async fn run(options: &Options) -> Result<Report> {
    anyhow::ensure!(options.rows > 0 && options.repeats > 0 && options.samples > 0, "nothing to measure");
    let ground = Ground::prepare().await?;
    let mut rounds = Vec::new();
    for repeat in 1..=options.repeats {
        say(&format!("round {repeat} of {}: the bare SQL of the path", options.repeats));
        let ledger = ledger::measure(&ground, options.rows).await?;
        say(&format!("round {repeat} of {}: a queue table", options.repeats));
        let classic = classic::measure(&ground, options.rows).await?;
        say(&format!("round {repeat} of {}: musterd", options.repeats));
        let musterd = worker::measure(&ground, options.rows, &options.set).await?;
        let round = Round { ledger, classic, musterd };
        say(&round.line());
        rounds.push(round);
    }
    say("latencies of an idle worker");
    let latencies = latency::measure(&ground, options.samples, &options.set).await?;
    let report = Report { rows: options.rows, postgres: ground.version().await?, rounds, latencies };
    ground.stop().await?;
    Ok(report)
}
