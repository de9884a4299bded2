//! The figures: medians of the rounds, ratios within each round, and the targets beside them.

use super::{latency::Latencies, load::Measured, worker::Run};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;

/// What was measured in one turn, minutes apart at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub(crate) ledger: Measured,
    pub(crate) classic: Measured,
    pub(crate) musterd: Run,
}

pub(crate) struct Report {
    pub(crate) rows: i32,
    pub(crate) postgres: String,
    pub(crate) rounds: Vec<Round>,
    pub(crate) latencies: Latencies,
}

const MEGABYTE: f64 = 1_048_576.0;

impl Round {
    pub(crate) fn line(&self) -> String {
        let speed = |measured: Measured| measured.rows_per_second / 1000.0;
        let (ledger, classic, musterd) =
            (speed(self.ledger), speed(self.classic), speed(self.musterd.measured));
        format!("bare SQL {ledger:.1} k rows/s, queue table {classic:.1} k, musterd {musterd:.1} k")
    }
}

impl Report {
    fn median(&self, of: impl Fn(&Round) -> f64) -> f64 {
        let mut values: Vec<f64> = self.rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    /// Of ratios within a round: what else the machine did in that minute slowed both.
    fn ratio(&self, of: fn(&Round) -> Measured, to: fn(&Round) -> Measured) -> f64 {
        self.median(|round| of(round).rows_per_second / to(round).rows_per_second)
    }

    pub(crate) fn text(&self) -> String {
        let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        format!(
            "{} rows, {} rounds (medians), PostgreSQL {}, fsync on, {cores} cores\n{}\n{}\n{}",
            self.rows,
            self.rounds.len(),
            self.postgres,
            self.speeds(),
            self.worker(),
            self.waits(),
        )
    }

    fn speeds(&self) -> Table {
        type Pick = fn(&Round) -> Measured;
        let ways: [(&str, Pick); 3] = [
            ("bare SQL of the path, 2 connections", |round| round.ledger),
            ("queue table, bare SQL, 2 connections", |round| round.classic),
            ("musterd, as shipped", |round| round.musterd.measured),
        ];
        let mut table = table(&[
            "",
            "rows/s",
            "of bare SQL",
            "of queue table",
            "WAL bytes/row",
            "transactions/1000",
            "server CPU, us/row",
        ]);
        for (name, pick) in ways {
            table.add_row([
                name.to_owned(),
                format!("{:.0}", self.median(|round| pick(round).rows_per_second)),
                format!("{:.2}", self.ratio(pick, |round| round.ledger)),
                format!("{:.2}", self.ratio(pick, |round| round.classic)),
                format!("{:.0}", self.median(|round| pick(round).wal_bytes_per_row)),
                format!("{:.1}", self.median(|round| pick(round).transactions_per_1000)),
                format!("{:.1}", self.median(|round| pick(round).server_time_per_row)),
            ]);
        }
        right(table)
    }

    fn worker(&self) -> Table {
        let mut table = table(&["musterd", "measured"]);
        let latency = |index: usize| 1000.0 * self.median(|round| round.musterd.update_latency[index]);
        let time = self.median(|round| round.musterd.time_per_row);
        table.add_row(["CPU of the worker, us/row".to_owned(), format!("{time:.1}")]);
        table.add_row(["peak memory, MB".to_owned(), format!("{:.1}", self.memory())]);
        table.add_row([
            "outcome to commit p50 / p95 / p99, ms".to_owned(),
            format!("{:.1} / {:.1} / {:.1}", latency(0), latency(1), latency(2)),
        ]);
        let flush = (self.median(|r| r.musterd.flush_size), self.median(|r| r.musterd.flushes_per_second));
        table.add_row(["outcomes per flush".to_owned(), format!("{:.0}", flush.0)]);
        table.add_row(["flushes per second".to_owned(), format!("{:.0}", flush.1)]);
        table.add_row([
            "flushes rolled back".to_owned(),
            format!("{:.0}", self.median(|r| r.musterd.rollbacks)),
        ]);
        right(table)
    }

    fn memory(&self) -> f64 {
        self.median(|round| round.musterd.peak_memory) / MEGABYTE
    }

    fn waits(&self) -> Table {
        let mut table = table(&["idle worker, ms", "p50", "p99"]);
        let waits = [
            ("submit to done, one row", &self.latencies.lone_row),
            ("last row to batch done", &self.latencies.last_row_to_done),
        ];
        for (name, sorted) in waits {
            let [p50, p99] = [0.5, 0.99].map(|q| format!("{:.1}", 1000.0 * at(sorted, q)));
            table.add_row([name.to_owned(), p50, p99]);
        }
        right(table)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let measured = |measured: Measured| {
            json!({ "rows_per_second": measured.rows_per_second, "wal_bytes_per_row": measured.wal_bytes_per_row,
                    "transactions_per_1000_rows": measured.transactions_per_1000,
                    "server_cpu_us_per_row": measured.server_time_per_row })
        };
        let rounds: Vec<_> = self.rounds.iter().map(|round| {
            let mut musterd = measured(round.musterd.measured);
            musterd["peak_memory_bytes"] = json!(round.musterd.peak_memory);
            musterd["cpu_us_per_row"] = json!(round.musterd.time_per_row);
            musterd["update_latency_seconds"] = json!({ "p50": round.musterd.update_latency[0],
                "p95": round.musterd.update_latency[1], "p99": round.musterd.update_latency[2] });
            musterd["outcomes_per_flush"] = json!(round.musterd.flush_size);
            musterd["flushes_per_second"] = json!(round.musterd.flushes_per_second);
            musterd["rollbacks"] = json!(round.musterd.rollbacks);
            json!({ "bare_sql": measured(round.ledger), "queue_table": measured(round.classic), "musterd": musterd })
        }).collect();
        let wait = |sorted: &[f64]| json!({ "p50": at(sorted, 0.5), "p99": at(sorted, 0.99), "samples": sorted.len() });
        json!({
            "rows": self.rows, "postgres": self.postgres, "rounds": rounds,
            "musterd_of_bare_sql": self.ratio(|round| round.musterd.measured, |round| round.ledger),
            "musterd_of_queue_table": self.ratio(|round| round.musterd.measured, |round| round.classic),
            "peak_memory_mb": self.memory(),
            "latency_seconds": { "lone_row": wait(&self.latencies.lone_row),
                                 "last_row_to_done": wait(&self.latencies.last_row_to_done) },
        })
    }
}

/// A quantile of what was really seen, nearest rank.
fn at(sorted: &[f64], quantile: f64) -> f64 {
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    table
}

fn right(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
