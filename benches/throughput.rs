//! `make bench`: how fast the walk of a row is, beside the bare SQL it consists of and beside the usual queue table, how fast
//! tasks are, beside the same queue table, and what both cost in WAL, disk and memory.
//!
//! Everything runs in one process tree on one private PostgreSQL, in turns, so that a busy machine slows all of them
//! alike: read the ratios first. Except for the bare SQL, every part uses Muster from outside.

#[path = "ground.rs"]
mod ground;

mod throughput {
    pub(crate) mod batches;
    pub(crate) mod binary;
    pub(crate) mod classic;
    pub(crate) mod drain;
    pub(crate) mod failing;
    pub(crate) mod figures;
    pub(crate) mod files;
    pub(crate) mod idle;
    pub(crate) mod latency;
    pub(crate) mod ledger;
    pub(crate) mod listener;
    pub(crate) mod load;
    pub(crate) mod part;
    pub(crate) mod pickup;
    pub(crate) mod report;
    pub(crate) mod run;
    pub(crate) mod scrape;
    pub(crate) mod server;
    pub(crate) mod single;
    pub(crate) mod snapshot;
    pub(crate) mod sql_tasks;
    pub(crate) mod submit;
    pub(crate) mod sustained;
    pub(crate) mod task_figures;
    pub(crate) mod tasks;
    pub(crate) mod walk;
    pub(crate) mod worker;
}

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use ground::{Ground, bounded, say};
use std::{path::PathBuf, process::ExitCode, time::Duration};
use throughput::{
    batches,
    binary::Binary,
    classic, failing,
    idle::{self, Counted, Idle},
    latency, ledger,
    part::Part,
    pickup,
    report::{Report, Round, Sizes},
    single, snapshot, sql_tasks, submit, sustained, tasks, walk,
};

#[derive(Debug, Parser)]
#[command(name = "bench", about = "Muster beside the bare SQL of its path and beside a queue table")]
struct Options {
    /// Only these parts, separated by commas; all of them when left out.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<Part>,
    /// Rows of the large batch, of its comparisons and of the submitted files.
    #[arg(long, default_value_t = 1_000_000)]
    rows: i32,
    /// Small batches.
    #[arg(long, default_value_t = 10_000)]
    batches: i32,
    /// Rows of the batch in which every row fails.
    #[arg(long, default_value_t = 200_000)]
    failing_rows: i32,
    /// Rows that are flushed one by one.
    #[arg(long, default_value_t = 5_000)]
    single_rows: i32,
    /// Tasks of the full queue and of the queue table beside it.
    #[arg(long, default_value_t = 200_000)]
    tasks: i32,
    /// Tasks of the `sql` handler, and bare CALLs beside them.
    #[arg(long, default_value_t = 20_000)]
    sql_tasks: i32,
    /// How long producers enqueue while a worker drains.
    #[arg(long, default_value_t = 30)]
    sustained_seconds: u64,
    /// How long the statements of an idle worker are counted.
    #[arg(long, default_value_t = 60)]
    idle_seconds: u64,
    /// How often everything is measured; the figures are medians.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Samples of each latency and round.
    #[arg(long, default_value_t = 100)]
    samples: usize,
    /// A setting of the daemon over the shipped ones, to see what it changes: `batcher.capacity=1000`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Measure this binary of Muster, of any version, on the schema it migrates to. Leaves the bare SQL out.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// One JSON object instead of tables.
    #[arg(long)]
    json: bool,
    /// The same JSON object into a file, after each round: what was measured survives an interruption.
    #[arg(long, value_name = "FILE")]
    json_file: Option<PathBuf>,
    /// `cargo bench` says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A benchmark that takes longer than this has gone wrong and ends by itself.
const LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

#[tokio::main]
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the result, for a person or a program")]
async fn main() -> ExitCode {
    let options = Options::parse();
    match bounded(LIMIT, Box::pin(run(&options))).await {
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
    let sizes = options.sizes()?;
    let parts = options.parts()?;
    let musterd = Binary::new(options.binary.clone(), options.set.clone());
    let ground = prepare(&musterd, options, &[]).await?;
    let mut report = Report {
        sizes,
        postgres: ground.version().await?,
        load_average: load_average()?,
        rounds: Vec::new(),
    };
    for repeat in 1..=options.repeats {
        let mut round = Round::default();
        for part in &parts {
            say(&format!("round {repeat} of {}: {}", options.repeats, part.name()));
            measure(*part, &ground, &musterd, options, &mut round).await?;
        }
        round.load_average = load_average()?;
        report.rounds.push(round);
        if let Some(file) = &options.json_file {
            std::fs::write(file, format!("{}\n", report.json()))?;
        }
    }
    ground.stop().await?;
    Ok(report)
}

/// A server with the schema of the binary that is measured.
async fn prepare(musterd: &Binary, options: &Options, settings: &[(&str, &str)]) -> Result<Ground> {
    match options.binary {
        Some(_) => Ground::prepare_by(settings, async |url| musterd.migrate(url).await).await,
        None => Ground::prepare(settings).await,
    }
}

async fn measure(
    part: Part,
    ground: &Ground,
    musterd: &Binary,
    options: &Options,
    round: &mut Round,
) -> Result<()> {
    let (rows, samples) = (options.rows, options.samples);
    match part {
        Part::Sql => round.bare_sql = Some(ledger::measure(ground, rows).await?),
        Part::QueueTable => round.queue_table = Some(classic::measure(ground, rows).await?),
        Part::Musterd => round.musterd = Some(walk::measure(ground, musterd, rows).await?),
        Part::Submit => round.submit = Some(submit::measure(ground, musterd, rows).await?),
        Part::Batches => round.batches = Some(batches::measure(ground, musterd, options.batches).await?),
        Part::Failing => round.failing = Some(failing::measure(ground, musterd, options.failing_rows).await?),
        Part::Single => round.single = Some(single::measure(ground, musterd, options.single_rows).await?),
        Part::Latency => round.latency = Some(latency::measure(ground, musterd, samples).await?),
        Part::Tasks => round.tasks = Some(tasks::measure(ground, musterd, options.tasks).await?),
        Part::Sustained => {
            round.sustained = Some(sustained::measure(ground, musterd, options.sustained_seconds).await?);
        }
        Part::SqlTasks => {
            round.sql_tasks = Some(sql_tasks::measure(ground, musterd, options.sql_tasks).await?)
        }
        Part::Snapshot => {
            round.snapshot = Some(snapshot::measure(ground, musterd, rows, options.tasks).await?)
        }
        Part::Pickup => round.pickup = Some(pickup::measure(ground, musterd, samples).await?),
        Part::Idle => round.idle = Some(measure_idle(musterd, options).await?),
    }
    Ok(())
}

/// Counts on a server of its own, so that counting costs no other part anything.
async fn measure_idle(musterd: &Binary, options: &Options) -> Result<Idle> {
    let (ground, counted) = match prepare(musterd, options, &idle::COUNTING).await {
        Ok(ground) => (ground, Counted::Statements),
        Err(error) => {
            say(&format!("counts transactions, not statements, without pg_stat_statements: {error:#}"));
            (prepare(musterd, options, &[]).await?, Counted::Transactions)
        }
    };
    let idle = idle::measure(&ground, musterd, counted, options.idle_seconds).await?;
    ground.stop().await?;
    Ok(idle)
}

impl Options {
    fn sizes(&self) -> Result<Sizes> {
        let Self { rows, batches, failing_rows, single_rows, tasks, sql_tasks, .. } = *self;
        let Self { sustained_seconds, idle_seconds, .. } = *self;
        let counts = [rows, batches, failing_rows, single_rows, tasks, sql_tasks];
        ensure!(counts.into_iter().all(|count| count > 0), "nothing to measure");
        ensure!(self.repeats > 0 && self.samples > 0, "nothing to measure");
        ensure!(sustained_seconds > 0 && idle_seconds > 0, "no time to measure in");
        Ok(Sizes {
            rows,
            batches,
            failing_rows,
            single_rows,
            tasks,
            sql_tasks,
            sustained_seconds,
            idle_seconds,
        })
    }

    /// In the order in which they are measured.
    fn parts(&self) -> Result<Vec<Part>> {
        let asked = |part: &Part| self.only.is_empty() || self.only.contains(part);
        let mut parts: Vec<Part> = Part::value_variants().iter().copied().filter(asked).collect();
        if self.binary.is_some() {
            ensure!(
                !self.only.contains(&Part::Sql),
                "the bare SQL is that of this version: leave out --binary or `sql`"
            );
            parts.retain(|part| *part != Part::Sql);
        }
        Ok(parts)
    }
}

/// Processes that ran or wanted to run, averaged over the last minute.
fn load_average() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or("").parse()?)
}
