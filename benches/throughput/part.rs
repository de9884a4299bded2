//! The parts of the benchmark; `--only` chooses among them.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// The bare SQL of the path.
    Sql,
    /// The usual queue table.
    QueueTable,
    /// One large batch: speed, WAL, disk and memory.
    Musterd,
    /// `musterd submit FILE` beside a raw COPY.
    Submit,
    /// Many small batches.
    Batches,
    /// A batch in which every row fails.
    Failing,
    /// Flushes of single rows.
    Single,
    /// The waits for small batches and lone tasks of an idle worker.
    Latency,
    /// A full queue of tasks beside the queue table.
    Tasks,
    /// Enqueue and drain at once beside the queue table.
    Sustained,
    /// Tasks of a `sql` handler beside bare CALLs.
    SqlTasks,
    /// Rows, tasks and the queue table while another session holds a snapshot.
    Snapshot,
    /// The pick-up of a lone task beside a bare LISTEN client.
    Pickup,
    /// Statements of an idle worker.
    Idle,
}

impl Part {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sql => "the bare SQL of the path",
            Self::QueueTable => "a queue table",
            Self::Musterd => "musterd, one large batch",
            Self::Submit => "raw COPY, musterd submit of NDJSON and of CSV",
            Self::Batches => "many small batches",
            Self::Failing => "a batch in which every row fails",
            Self::Single => "flushes of single rows",
            Self::Latency => "latencies of an idle worker",
            Self::Tasks => "a full queue of tasks, and a queue table",
            Self::Sustained => "enqueue and drain at once",
            Self::SqlTasks => "bare CALLs and tasks of a sql handler",
            Self::Snapshot => "without and with a held snapshot",
            Self::Pickup => "pick-up of a lone task",
            Self::Idle => "an idle worker",
        }
    }
}
