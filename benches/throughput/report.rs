//! What was measured, for a person and for a program: medians of the rounds, with the targets beside them.

use super::{
    drain::Speed,
    figures::{Figures, median},
    idle::Idle,
    latency::Latencies,
    load::Measured,
    pickup::Pickups,
    run::Run,
    snapshot::Snapshots,
    sql_tasks::SqlTasks,
    submit::Submits,
    sustained::Sustained,
    tasks::Tasks,
    walk::Walk,
};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// What was measured in one turn, minutes apart at most. Parts that were not asked for are `None`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Round {
    pub(crate) bare_sql: Option<Measured>,
    pub(crate) queue_table: Option<Measured>,
    pub(crate) musterd: Option<Walk>,
    pub(crate) submit: Option<Submits>,
    pub(crate) batches: Option<Run>,
    pub(crate) failing: Option<Run>,
    pub(crate) single: Option<Run>,
    pub(crate) latency: Option<Latencies>,
    pub(crate) tasks: Option<Tasks>,
    pub(crate) sustained: Option<Sustained>,
    pub(crate) sql_tasks: Option<SqlTasks>,
    pub(crate) snapshot: Option<Snapshots>,
    pub(crate) pickup: Option<Pickups>,
    pub(crate) idle: Option<Idle>,
    /// Of the last minute, when the round ended: what else the machine did is in it, and so are we.
    pub(crate) load_average: f64,
}

/// How much was measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Sizes {
    pub(crate) rows: i32,
    pub(crate) batches: i32,
    pub(crate) failing_rows: i32,
    pub(crate) single_rows: i32,
    pub(crate) tasks: i32,
    pub(crate) sql_tasks: i32,
    pub(crate) sustained_seconds: u64,
    pub(crate) idle_seconds: u64,
}

pub(crate) struct Report {
    pub(crate) sizes: Sizes,
    pub(crate) postgres: String,
    /// Before the first round.
    pub(crate) load_average: f64,
    pub(crate) rounds: Vec<Round>,
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let Sizes { rows, batches, failing_rows, single_rows, tasks, sql_tasks, .. } = self.sizes;
        let loads: Vec<String> = std::iter::once(self.load_average)
            .chain(self.rounds.iter().map(|round| round.load_average))
            .map(|load| format!("{load:.1}"))
            .collect();
        let speeds: String = [self.speeds(), self.task_speeds()]
            .into_iter()
            .flatten()
            .map(|table| format!("{table}\n\n"))
            .collect();
        format!(
            "{rows} rows, {batches} batches, {failing_rows} failing and {single_rows} single rows, {tasks} tasks, {sql_tasks} \
             sql tasks; {} rounds, PostgreSQL {}, fsync on, {} cores\nload average before the first round and after each: {}\n\n{speeds}{}",
            self.rounds.len(),
            self.postgres,
            std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            loads.join(", "),
            self.figures(),
        )
    }

    /// The ways through the same rows, side by side; `None` when none of them was measured.
    fn speeds(&self) -> Option<Table> {
        type Pick = fn(&Round) -> Option<Measured>;
        let ways: [(&str, Pick); 3] = [
            ("bare SQL of the path, 2 connections", |round| round.bare_sql),
            ("queue table, bare SQL, 2 connections", |round| round.queue_table),
            ("musterd, as shipped", |round| Some(round.musterd?.run.measured)),
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
        for (name, pick) in ways.iter().filter(|(_, pick)| self.rounds.iter().any(|r| pick(r).is_some())) {
            let ratio =
                |round: &Round, to: Pick| Some(pick(round)?.rows_per_second / to(round)?.rows_per_second);
            table.add_row([
                (*name).to_owned(),
                self.middle(0, |round| Some(pick(round)?.rows_per_second)),
                self.middle(2, |round| ratio(round, |round| round.bare_sql)),
                self.middle(2, |round| ratio(round, |round| round.queue_table)),
                self.middle(0, |round| Some(pick(round)?.wal_bytes_per_row)),
                self.middle(1, |round| Some(pick(round)?.transactions_per_1000_rows)),
                self.middle(1, |round| Some(pick(round)?.server_cpu_us_per_row)),
            ]);
        }
        (!table.is_empty()).then(|| right(table))
    }

    /// The ways through the same number of tasks, side by side; `None` when they were not measured.
    fn task_speeds(&self) -> Option<Table> {
        type Pick = fn(&Tasks) -> Speed;
        let ways: [(&str, Pick); 4] = [
            ("classic SQL, 2 connections", |tasks| tasks.classic),
            ("musterd, as shipped", |tasks| tasks.shipped),
            ("musterd, 64 fibers", |tasks| tasks.fibers_64),
            ("musterd, as shipped, enqueued one by one", |tasks| tasks.one_by_one),
        ];
        let header =
            ["", "tasks/s", "of classic", "WAL bytes/task", "transactions/1000", "server CPU, us/task"];
        let mut table = table(&header);
        for (name, pick) in ways {
            let middle = |digits, value: fn(&Tasks, Speed) -> f64| {
                self.middle(digits, |round| round.tasks.as_ref().map(|tasks| value(tasks, pick(tasks))))
            };
            table.add_row([
                name.to_owned(),
                middle(0, |_, speed| speed.tasks_per_second),
                middle(2, |tasks, speed| speed.tasks_per_second / tasks.classic.tasks_per_second),
                middle(0, |_, speed| speed.wal_bytes_per_task),
                middle(1, |_, speed| speed.transactions_per_1000_tasks),
                middle(1, |_, speed| speed.server_cpu_us_per_task),
            ]);
        }
        self.rounds.iter().any(|round| round.tasks.is_some()).then(|| right(table))
    }

    fn middle(&self, digits: usize, value: impl Fn(&Round) -> Option<f64>) -> String {
        let values: Vec<f64> = self.rounds.iter().filter_map(value).collect();
        if values.is_empty() { "-".to_owned() } else { format!("{:.digits$}", median(values)) }
    }

    fn figures(&self) -> Table {
        let mut table = table(&["", "median", "lowest", "highest", "target", "met"]);
        for (_, figure) in Figures::of(&self.rounds).all {
            let digits = figure.digits;
            let number = |value: f64| format!("{value:.digits$}");
            let (target, met) = match figure.target {
                Some(target) if target.is_met(figure.median) => (target.text(digits), "yes"),
                Some(target) => (target.text(digits), "no"),
                None => (String::new(), ""),
            };
            table.add_row([
                figure.name.to_owned(),
                number(figure.median),
                number(figure.rounds.iter().copied().fold(f64::INFINITY, f64::min)),
                number(figure.rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
                target,
                met.to_owned(),
            ]);
        }
        right(table)
    }

    pub(crate) fn json(&self) -> Value {
        let figures: Map<String, Value> = Figures::of(&self.rounds)
            .all
            .into_iter()
            .map(|(key, figure)| (key.to_owned(), json!(figure)))
            .collect();
        json!({
            "sizes": self.sizes, "postgres": self.postgres, "load_average": self.load_average,
            "figures": figures, "rounds": self.rounds,
        })
    }
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
