//! The figures of tasks by their names, beside those of rows in `figures.rs`.

use super::{
    figures::{
        Figures,
        Target::{AtLeast, AtMost, Floor},
    },
    idle::Counted,
    report::Round,
    snapshot::Speeds,
    tasks::Tasks,
};

impl Figures<'_> {
    pub(super) fn of_tasks(&mut self) {
        self.drained();
        self.drained_wal();
        self.sustained();
        self.sql_tasks();
        self.snapshot();
        self.pickup();
        self.idle();
    }

    fn drained(&mut self) {
        fn ratio(round: &Round, pick: fn(&Tasks) -> f64) -> Option<f64> {
            let tasks = round.tasks?;
            Some(pick(&tasks) / tasks.classic.tasks_per_second)
        }
        let floor = Some(Floor { least: 0.75, aim: 1.0 });
        self.add("tasks.of_classic", "tasks: ratio to classic SQL", 2, floor, |r| {
            ratio(r, |tasks| tasks.shipped.tasks_per_second)
        });
        self.add("tasks.fibers_64_of_classic", "tasks, 64 fibers: ratio to classic SQL", 2, None, |r| {
            ratio(r, |tasks| tasks.fibers_64.tasks_per_second)
        });
        self.add(
            "tasks.one_by_one_of_classic",
            "tasks, enqueued one by one: ratio to classic SQL",
            2,
            floor,
            |r| ratio(r, |tasks| tasks.one_by_one.tasks_per_second),
        );
    }

    fn drained_wal(&mut self) {
        let most = Some(AtMost(500.0));
        self.add("tasks.wal_bytes", "tasks: WAL bytes/task", 0, most, |r| {
            Some(r.tasks?.shipped.wal_bytes_per_task)
        });
        self.add("tasks.one_by_one_wal_bytes", "tasks, enqueued one by one: WAL bytes/task", 0, most, |r| {
            Some(r.tasks?.one_by_one.wal_bytes_per_task)
        });
    }

    fn sustained(&mut self) {
        self.add("sustained.of_classic", "sustained: done, ratio to classic SQL", 2, None, |r| {
            let sustained = r.sustained?;
            Some(sustained.musterd.done_per_second / sustained.classic.done_per_second)
        });
        self.add("sustained.done_per_second", "sustained: done/s", 0, None, |r| {
            Some(r.sustained?.musterd.done_per_second)
        });
        self.add("sustained.enqueued_per_second", "sustained: enqueued/s", 0, None, |r| {
            Some(r.sustained?.musterd.enqueued_per_second)
        });
        self.add("sustained.left", "sustained: tasks left at the end", 0, None, |r| {
            Some(r.sustained?.musterd.left)
        });
        self.add("sustained.classic_done_per_second", "sustained: classic SQL, done/s", 0, None, |r| {
            Some(r.sustained?.classic.done_per_second)
        });
        self.add(
            "sustained.classic_enqueued_per_second",
            "sustained: classic SQL, enqueued/s",
            0,
            None,
            |r| Some(r.sustained?.classic.enqueued_per_second),
        );
        self.add("sustained.classic_left", "sustained: classic SQL, tasks left at the end", 0, None, |r| {
            Some(r.sustained?.classic.left)
        });
    }

    fn sql_tasks(&mut self) {
        self.add("sql_tasks.of_bare_calls", "sql tasks: ratio to bare CALLs", 2, Some(AtLeast(0.6)), |r| {
            let sql_tasks = r.sql_tasks?;
            Some(sql_tasks.musterd.tasks_per_second / sql_tasks.bare_calls.tasks_per_second)
        });
        self.add("sql_tasks.tasks_per_second", "sql tasks: tasks/s", 0, None, |r| {
            Some(r.sql_tasks?.musterd.tasks_per_second)
        });
        self.add("sql_tasks.bare_calls_per_second", "sql tasks: bare CALLs/s", 0, None, |r| {
            Some(r.sql_tasks?.bare_calls.tasks_per_second)
        });
        self.add("sql_tasks.wal_bytes", "sql tasks: WAL bytes/task", 0, None, |r| {
            Some(r.sql_tasks?.musterd.wal_bytes_per_task)
        });
    }

    fn snapshot(&mut self) {
        fn kept(round: &Round, pick: fn(&Speeds) -> f64) -> Option<f64> {
            let snapshot = round.snapshot?;
            Some(pick(&snapshot.held) / pick(&snapshot.free))
        }
        self.add("snapshot.rows_kept", "held snapshot: speed of rows kept", 2, Some(AtLeast(0.90)), |r| {
            kept(r, |speeds| speeds.rows_per_second)
        });
        self.add("snapshot.tasks_kept", "held snapshot: speed of tasks kept", 2, Some(AtLeast(0.80)), |r| {
            kept(r, |speeds| speeds.tasks_per_second)
        });
        self.add("snapshot.classic_kept", "held snapshot: speed of classic SQL kept", 2, None, |r| {
            kept(r, |speeds| speeds.classic_per_second)
        });
        self.add("snapshot.rows_per_second", "held snapshot: rows/s", 0, None, |r| {
            Some(r.snapshot?.held.rows_per_second)
        });
        self.add("snapshot.tasks_per_second", "held snapshot: tasks/s", 0, None, |r| {
            Some(r.snapshot?.held.tasks_per_second)
        });
        self.add("snapshot.classic_per_second", "held snapshot: classic SQL, rows/s", 0, None, |r| {
            Some(r.snapshot?.held.classic_per_second)
        });
    }

    fn pickup(&mut self) {
        self.add("pickup.of_bare_client", "pick-up: p50, ratio to a bare LISTEN client", 2, None, |r| {
            let pickup = r.pickup?;
            Some(pickup.musterd.claimed_seconds.p50 / pickup.bare_client.claimed_seconds.p50)
        });
        self.add("pickup.p50_ms", "pick-up: p50, ms", 2, None, |r| {
            Some(1000.0 * r.pickup?.musterd.claimed_seconds.p50)
        });
        self.add("pickup.p99_ms", "pick-up: p99, ms", 2, None, |r| {
            Some(1000.0 * r.pickup?.musterd.claimed_seconds.p99)
        });
        self.add("pickup.bare_client_p50_ms", "pick-up: bare LISTEN client p50, ms", 2, None, |r| {
            Some(1000.0 * r.pickup?.bare_client.claimed_seconds.p50)
        });
        self.add("pickup.bare_client_p99_ms", "pick-up: bare LISTEN client p99, ms", 2, None, |r| {
            Some(1000.0 * r.pickup?.bare_client.claimed_seconds.p99)
        });
        self.add("pickup.done_p50_ms", "pick-up: enqueue to done p50, ms", 2, None, |r| {
            Some(1000.0 * r.pickup?.musterd.done_seconds.p50)
        });
        self.add(
            "pickup.bare_client_done_p50_ms",
            "pick-up: bare LISTEN client, insert to done p50, ms",
            2,
            None,
            |r| Some(1000.0 * r.pickup?.bare_client.done_seconds.p50),
        );
    }

    fn idle(&mut self) {
        fn per_minute(round: &Round, counted: Counted) -> Option<f64> {
            round.idle.filter(|idle| idle.counted == counted).map(|idle| idle.per_minute)
        }
        self.add("idle.statements_per_minute", "idle: statements/minute", 0, Some(AtMost(60.0)), |r| {
            per_minute(r, Counted::Statements)
        });
        self.add("idle.transactions_per_minute", "idle: transactions/minute", 0, None, |r| {
            per_minute(r, Counted::Transactions)
        });
    }
}
