//! `make bench-batcher`: fifty writers whose updates all touch one parent row, with and without the update batcher.
//!
//! The parent is kept by a trigger, as in the system the batcher was asked for. Unbatched, every update is a
//! transaction and a run of the trigger, and all of them queue for the parent. Exit code 1 when a claim does not hold.

#[path = "ground.rs"]
mod ground;

mod batcher {
    pub(crate) mod parent;
    pub(crate) mod ways;
}

use anyhow::Result;
use batcher::{
    parent::{Outcome, Trigger},
    ways,
};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use ground::{Ground, bounded, say};
use std::{process::ExitCode, time::Duration};

#[derive(Debug, Parser)]
#[command(
    name = "bench-batcher",
    about = "Updates behind a trigger on one parent row, with and without the batcher"
)]
struct Options {
    /// Tasks that end, each once.
    #[arg(long, default_value_t = 20_000)]
    tasks: i64,
    /// Who ends them, side by side.
    #[arg(long, default_value_t = 50)]
    writers: i64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// `cargo bench` says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What the batcher must save, of transactions and of trigger runs.
const SAVED: f64 = 0.95;
const LIMIT: Duration = Duration::from_secs(15 * 60);

#[tokio::main]
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the result, for a person or a program")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let rows = match bounded(LIMIT, run(&options)).await {
        Ok(rows) => rows,
        Err(error) => {
            eprintln!("bench: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}", if options.json { json(&rows) } else { text(&options, &rows) });
    let broken = broken_claims(&rows, options.tasks);
    for claim in &broken {
        eprintln!("bench: does not hold: {claim}");
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What each way cost. The third shows what a trigger per row makes of the batcher: it saves the transactions only.
struct Rows {
    unbatched: Outcome,
    batched: Outcome,
    batched_row_trigger: Outcome,
    postgres: String,
}

async fn run(options: &Options) -> Result<Rows> {
    anyhow::ensure!(options.writers > 0 && options.tasks >= options.writers, "nothing to measure");
    let ground = Ground::prepare(&[]).await?;
    let (tasks, writers) = (options.tasks, options.writers);
    say("unbatched, a trigger per row");
    let unbatched = ways::unbatched(&ground, tasks, writers, Trigger::PerRow).await?;
    say("batched, a trigger per statement");
    let batched = ways::batched(&ground, tasks, writers, Trigger::PerStatement).await?;
    say("batched, a trigger per row");
    let batched_row_trigger = ways::batched(&ground, tasks, writers, Trigger::PerRow).await?;
    let postgres = ground.version().await?;
    ground.stop().await?;
    Ok(Rows { unbatched, batched, batched_row_trigger, postgres })
}

fn saved(before: i64, after: i64) -> f64 {
    1.0 - after as f64 / before as f64
}

fn broken_claims(rows: &Rows, tasks: i64) -> Vec<String> {
    let (before, after) = (&rows.unbatched, &rows.batched);
    let mut broken = Vec::new();
    let mut claim = |holds: bool, text: String| {
        if !holds {
            broken.push(text);
        }
    };
    let transactions = saved(before.transactions, after.transactions);
    claim(transactions >= SAVED, format!("95 % fewer transactions ({:.1} %)", transactions * 100.0));
    let triggers = saved(before.trigger_runs, after.trigger_runs);
    claim(triggers >= SAVED, format!("95 % fewer trigger executions ({:.1} %)", triggers * 100.0));
    claim(after.deadlocks == 0, format!("no deadlocks ({})", after.deadlocks));
    for outcome in [before, after, &rows.batched_row_trigger] {
        let right = outcome.right;
        claim(right == tasks, format!("every outcome counted ({right} of {tasks})"));
    }
    broken
}

fn text(options: &Options, rows: &Rows) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "",
        "transactions",
        "trigger runs",
        "rolled back",
        "deadlocks",
        "updates/s",
        "WAL bytes/update",
        "server CPU, us/update",
        "outcomes counted",
    ]);
    let ways = [
        ("unbatched, trigger per row", &rows.unbatched),
        ("batched, trigger per statement", &rows.batched),
        ("batched, trigger per row", &rows.batched_row_trigger),
    ];
    for (name, outcome) in ways {
        table.add_row([
            name.to_owned(),
            outcome.transactions.to_string(),
            outcome.trigger_runs.to_string(),
            outcome.rolled_back.to_string(),
            outcome.deadlocks.to_string(),
            format!("{:.0}", outcome.updates_per_second),
            format!("{:.0}", outcome.wal_bytes_per_update),
            format!("{:.0}", outcome.server_time_per_update),
            format!("{} of {}", outcome.right, options.tasks),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let (before, after) = (&rows.unbatched, &rows.batched);
    format!(
        "{} tasks, {} writers, one parent row, PostgreSQL {}, fsync on\n{table}\nsaved by the batcher: {:.1} % of the transactions, {:.1} % of \
         the trigger runs; {:.1} times as fast",
        options.tasks,
        options.writers,
        rows.postgres,
        100.0 * saved(before.transactions, after.transactions),
        100.0 * saved(before.trigger_runs, after.trigger_runs),
        after.updates_per_second / before.updates_per_second,
    )
}

fn json(rows: &Rows) -> String {
    let way = |outcome: &Outcome| {
        serde_json::json!({ "transactions": outcome.transactions, "trigger_runs": outcome.trigger_runs,
            "rolled_back": outcome.rolled_back, "deadlocks": outcome.deadlocks,
            "updates_per_second": outcome.updates_per_second,
            "wal_bytes_per_update": outcome.wal_bytes_per_update,
            "server_cpu_us_per_update": outcome.server_time_per_update, "outcomes_counted": outcome.right })
    };
    serde_json::json!({ "postgres": rows.postgres, "unbatched": way(&rows.unbatched), "batched": way(&rows.batched),
        "batched_row_trigger": way(&rows.batched_row_trigger) })
    .to_string()
}
