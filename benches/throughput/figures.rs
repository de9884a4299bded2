//! Every figure of a run by its name: its value in each round, and the target where there is one.

use super::{batches, report::Round};
use serde::Serialize;

/// What version 0.1.0 needed on disk for an input, in bytes: `{"n": 1}`, and a customer of the submitted files.
/// Sizes depend on PostgreSQL's version a little, and on the machine not at all.
const SMALL_INPUT_OF_0_1_0: f64 = 99.9;
const CUSTOMER_OF_0_1_0: f64 = 179.7;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    #[serde(skip)]
    pub(crate) name: &'static str,
    #[serde(skip)]
    pub(crate) digits: usize,
    pub(crate) median: f64,
    pub(crate) rounds: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<Target>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    AtLeast(f64),
    /// At least `least`; `aim` is what we would like.
    Floor {
        least: f64,
        aim: f64,
    },
    AtMost(f64),
}

use Target::{AtLeast, AtMost, Floor};

impl Target {
    pub(crate) fn is_met(self, value: f64) -> bool {
        match self {
            AtLeast(least) | Floor { least, .. } => value >= least,
            AtMost(most) => value <= most,
        }
    }

    pub(crate) fn text(self, digits: usize) -> String {
        match self {
            AtLeast(least) => format!("at least {least:.digits$}"),
            Floor { least, aim } => format!("at least {least:.digits$}, aim {aim:.digits$}"),
            AtMost(most) => format!("at most {most:.digits$}"),
        }
    }
}

/// The middle one; of an even number the upper of the two.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Figures by key, in the order of the report. Those of parts that did not run are left out.
pub(crate) struct Figures<'a> {
    rounds: &'a [Round],
    pub(crate) all: Vec<(&'static str, Figure)>,
}

impl<'a> Figures<'a> {
    pub(crate) fn of(rounds: &'a [Round]) -> Self {
        let mut figures = Self { rounds, all: Vec::new() };
        figures.walk();
        figures.storage();
        figures.worker();
        figures.submit();
        figures.batches();
        figures.failing();
        figures.single();
        figures.latency();
        figures.of_tasks();
        figures
    }

    pub(super) fn add(
        &mut self,
        key: &'static str,
        name: &'static str,
        digits: usize,
        target: Option<Target>,
        value: impl Fn(&Round) -> Option<f64>,
    ) {
        let rounds: Vec<f64> = self.rounds.iter().filter_map(value).collect();
        if !rounds.is_empty() {
            let median = median(rounds.clone());
            self.all.push((key, Figure { name, digits, median, rounds, target }));
        }
    }

    /// Ratios are taken within a round: what else the machine did in that minute slowed both sides.
    fn walk(&mut self) {
        self.add(
            "walk.of_queue_table",
            "walk: ratio to queue table",
            2,
            Some(Floor { least: 5.0, aim: 8.0 }),
            |r| Some(r.musterd?.run.measured.rows_per_second / r.queue_table?.rows_per_second),
        );
        self.add("walk.of_bare_sql", "walk: ratio to bare SQL", 2, Some(AtLeast(0.40)), |r| {
            Some(r.musterd?.run.measured.rows_per_second / r.bare_sql?.rows_per_second)
        });
        self.add("walk.rows_per_second", "walk: rows/s", 0, None, |r| {
            Some(r.musterd?.run.measured.rows_per_second)
        });
    }

    fn storage(&mut self) {
        self.add("walk.finish_wal_bytes", "walk: WAL bytes/row, finish", 1, Some(AtMost(40.0)), |r| {
            Some(r.musterd?.run.measured.wal_bytes_per_row)
        });
        self.add("walk.submit_wal_bytes", "walk: WAL bytes/row, submit", 1, None, |r| {
            Some(r.musterd?.submit.measured.wal_bytes_per_row)
        });
        let quarter = Some(AtMost(SMALL_INPUT_OF_0_1_0 / 4.0));
        self.add("walk.input_disk_bytes", "walk: disk bytes/row, inputs", 1, quarter, |r| {
            Some(r.musterd?.submit.disk_bytes_per_row)
        });
        self.add("walk.outcome_disk_bytes", "walk: disk bytes/row, outcomes", 1, None, |r| {
            Some(r.musterd?.outcome_disk_bytes_per_row)
        });
    }

    fn worker(&mut self) {
        self.add("walk.peak_memory_mb", "walk: peak memory, MB", 1, Some(AtMost(60.0)), |r| {
            Some(r.musterd?.run.peak_memory_bytes / 1_048_576.0)
        });
        self.add("walk.transactions_per_1000", "walk: transactions/1000 rows", 1, Some(AtMost(15.0)), |r| {
            Some(r.musterd?.run.measured.transactions_per_1000_rows)
        });
        self.add("walk.worker_cpu_us", "walk: CPU of the worker, us/row", 1, None, |r| {
            Some(r.musterd?.run.cpu_us_per_row)
        });
        self.add("walk.commit_p50_ms", "walk: outcome to commit p50, ms", 1, None, |r| {
            Some(1000.0 * r.musterd?.run.update_latency_seconds.p50)
        });
        self.add("walk.commit_p95_ms", "walk: outcome to commit p95, ms", 1, None, |r| {
            Some(1000.0 * r.musterd?.run.update_latency_seconds.p95)
        });
        self.add("walk.commit_p99_ms", "walk: outcome to commit p99, ms", 1, None, |r| {
            Some(1000.0 * r.musterd?.run.update_latency_seconds.p99)
        });
        self.add("walk.outcomes_per_flush", "walk: outcomes per flush", 0, None, |r| {
            Some(r.musterd?.run.outcomes_per_flush)
        });
        self.add("walk.flushes_per_second", "walk: flushes per second", 0, None, |r| {
            Some(r.musterd?.run.flushes_per_second)
        });
        self.add("walk.rollbacks", "walk: flushes rolled back", 0, None, |r| Some(r.musterd?.run.rollbacks));
    }

    fn submit(&mut self) {
        let twice = Some(AtLeast(2.0));
        self.add("submit.ndjson_of_copy", "submit: NDJSON, ratio to raw COPY", 2, twice, |r| {
            let submit = r.submit?;
            Some(submit.ndjson.measured.rows_per_second / submit.raw_copy.measured.rows_per_second)
        });
        self.add("submit.csv_of_copy", "submit: CSV, ratio to raw COPY", 2, twice, |r| {
            let submit = r.submit?;
            Some(submit.csv.measured.rows_per_second / submit.raw_copy.measured.rows_per_second)
        });
        self.add("submit.ndjson_rows_per_second", "submit: NDJSON, rows/s", 0, None, |r| {
            Some(r.submit?.ndjson.measured.rows_per_second)
        });
        self.add("submit.csv_rows_per_second", "submit: CSV, rows/s", 0, None, |r| {
            Some(r.submit?.csv.measured.rows_per_second)
        });
        self.add("submit.copy_rows_per_second", "submit: raw COPY, rows/s", 0, None, |r| {
            Some(r.submit?.raw_copy.measured.rows_per_second)
        });
        self.add("submit.wal_bytes", "submit: WAL bytes/row", 1, None, |r| {
            Some(r.submit?.ndjson.measured.wal_bytes_per_row)
        });
        self.add("submit.copy_wal_bytes", "submit: WAL bytes/row, raw COPY", 1, None, |r| {
            Some(r.submit?.raw_copy.measured.wal_bytes_per_row)
        });
        let quarter = Some(AtMost(CUSTOMER_OF_0_1_0 / 4.0));
        self.add("submit.disk_bytes", "submit: disk bytes/row", 1, quarter, |r| {
            Some(r.submit?.ndjson.disk_bytes_per_row)
        });
        self.add("submit.server_cpu_us", "submit: server CPU, us/row", 2, None, |r| {
            Some(r.submit?.ndjson.measured.server_cpu_us_per_row)
        });
        self.add("submit.copy_server_cpu_us", "submit: server CPU, us/row, raw COPY", 2, None, |r| {
            Some(r.submit?.raw_copy.measured.server_cpu_us_per_row)
        });
        self.add("submit.client_cpu_us", "submit: NDJSON, client CPU, us/row", 2, None, |r| {
            Some(r.submit?.ndjson.client_cpu_us_per_row)
        });
        self.add("submit.csv_client_cpu_us", "submit: CSV, client CPU, us/row", 2, None, |r| {
            Some(r.submit?.csv.client_cpu_us_per_row)
        });
    }

    fn batches(&mut self) {
        let rows = f64::from(batches::ROWS);
        self.add("batches.batches_per_second", "batches: batches/s", 0, Some(AtLeast(820.0)), |r| {
            Some(r.batches?.batches_per_second)
        });
        self.add("batches.wal_bytes", "batches: WAL bytes/batch", 0, None, |r| {
            Some(rows * r.batches?.measured.wal_bytes_per_row)
        });
        self.add("batches.server_cpu_us", "batches: server CPU, us/batch", 0, None, |r| {
            Some(rows * r.batches?.session_cpu_us_per_row)
        });
        self.add("batches.worker_cpu_us", "batches: CPU of the worker, us/batch", 0, None, |r| {
            Some(rows * r.batches?.cpu_us_per_row)
        });
        self.add("batches.transactions", "batches: transactions/batch", 1, None, |r| {
            Some(rows * r.batches?.measured.transactions_per_1000_rows / 1000.0)
        });
    }

    fn failing(&mut self) {
        self.add("failing.rows_per_second", "failing: rows/s", 0, None, |r| {
            Some(r.failing?.measured.rows_per_second)
        });
        self.add("failing.wal_bytes", "failing: WAL bytes/row", 1, None, |r| {
            Some(r.failing?.measured.wal_bytes_per_row)
        });
        self.add("failing.server_cpu_us", "failing: server CPU, us/row", 1, None, |r| {
            Some(r.failing?.session_cpu_us_per_row)
        });
    }

    fn single(&mut self) {
        self.add("single.rows_per_second", "single: rows/s", 0, None, |r| {
            Some(r.single?.measured.rows_per_second)
        });
        self.add("single.server_cpu_us", "single: server CPU, us/row", 0, None, |r| {
            Some(r.single?.session_cpu_us_per_row)
        });
        self.add("single.wal_bytes", "single: WAL bytes/row", 0, None, |r| {
            Some(r.single?.measured.wal_bytes_per_row)
        });
        self.add("single.outcomes_per_flush", "single: outcomes per flush", 2, None, |r| {
            Some(r.single?.outcomes_per_flush)
        });
    }

    fn latency(&mut self) {
        self.add("latency.lone_row_p50_ms", "latency: lone row p50, ms", 1, None, |r| {
            Some(1000.0 * r.latency?.lone_row_seconds.p50)
        });
        self.add("latency.lone_row_p99_ms", "latency: lone row p99, ms", 1, Some(AtMost(100.0)), |r| {
            Some(1000.0 * r.latency?.lone_row_seconds.p99)
        });
        self.add("latency.lone_task_p50_ms", "latency: lone task p50, ms", 1, None, |r| {
            Some(1000.0 * r.latency?.lone_task_seconds.p50)
        });
        self.add("latency.lone_task_p99_ms", "latency: lone task p99, ms", 1, None, |r| {
            Some(1000.0 * r.latency?.lone_task_seconds.p99)
        });
        self.add("latency.last_row_to_done_p50_ms", "latency: last row to done p50, ms", 1, None, |r| {
            Some(1000.0 * r.latency?.last_row_to_done_seconds.p50)
        });
        self.add(
            "latency.last_row_to_done_p99_ms",
            "latency: last row to done p99, ms",
            1,
            Some(AtMost(300.0)),
            |r| Some(1000.0 * r.latency?.last_row_to_done_seconds.p99),
        );
    }
}
