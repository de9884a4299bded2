//! Tasks of one job, and a trigger that keeps the job's counts.

use crate::ground::{Database, Ground, Transactions, Wal, connect};
use anyhow::Result;
use std::time::{Duration, Instant};

/// When the counts of the job are brought up to date.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trigger {
    PerRow,
    PerStatement,
}

// In `public`, and always named with it: the role's own schema is Muster's, which has tasks of its own.
const TABLES: &str = "
    CREATE TABLE public.jobs (id int PRIMARY KEY, done int NOT NULL DEFAULT 0, failed int NOT NULL DEFAULT 0);
    CREATE TABLE public.tasks (id bigint PRIMARY KEY, job_id int NOT NULL, status text NOT NULL DEFAULT 'running', error text);
    -- A sequence counts rolled back runs too, and no session waits for it.
    CREATE SEQUENCE public.trigger_runs;
    CREATE FUNCTION public.count_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM nextval('public.trigger_runs');
        UPDATE public.jobs SET done = done + (NEW.status = 'done')::int, failed = failed + (NEW.status = 'failed')::int
         WHERE id = NEW.job_id;
        RETURN NULL;
    END $$;
    CREATE FUNCTION public.count_statement() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM nextval('public.trigger_runs');
        UPDATE public.jobs j SET done = j.done + c.done, failed = j.failed + c.failed
          FROM (SELECT job_id, count(*) FILTER (WHERE status = 'done') AS done,
                       count(*) FILTER (WHERE status = 'failed') AS failed
                  FROM changed GROUP BY job_id) c
         WHERE j.id = c.job_id;
        RETURN NULL;
    END $$;
    INSERT INTO public.jobs (id) VALUES (1)";

impl Trigger {
    fn sql(self) -> &'static str {
        match self {
            Self::PerRow => {
                "CREATE TRIGGER counts AFTER UPDATE ON public.tasks FOR EACH ROW EXECUTE FUNCTION public.count_row()"
            }
            Self::PerStatement => {
                "CREATE TRIGGER counts AFTER UPDATE ON public.tasks REFERENCING NEW TABLE AS changed
                 FOR EACH STATEMENT EXECUTE FUNCTION public.count_statement()"
            }
        }
    }
}

/// How a task is to end: one in ten fails.
pub(crate) fn status_of(task: i64) -> &'static str {
    if task % 10 == 0 { "failed" } else { "done" }
}

/// What one way of writing cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) transactions: i64,
    pub(crate) rolled_back: i64,
    pub(crate) deadlocks: i64,
    pub(crate) trigger_runs: i64,
    pub(crate) updates_per_second: f64,
    pub(crate) wal_bytes_per_update: f64,
    /// Processor time of PostgreSQL's sessions, in microseconds.
    pub(crate) server_time_per_update: f64,
    /// Tasks that have the status they should have; zero when the job's counts do not say the same.
    pub(crate) right: i64,
}

/// A database with the tasks of one job, and the clock.
pub(crate) struct Job<'a> {
    ground: &'a Ground,
    pub(crate) database: Database,
    before: Transactions,
    wal: Wal,
    processor_time: f64,
    began: Instant,
}

impl<'a> Job<'a> {
    pub(crate) async fn new(ground: &'a Ground, tasks: i64, trigger: Trigger) -> Result<Self> {
        let database = ground.database().await?;
        let client = connect(&database.url).await?;
        client.batch_execute(TABLES).await?;
        client.batch_execute(trigger.sql()).await?;
        client
            .execute(
                "INSERT INTO public.tasks (id, job_id) SELECT n, 1 FROM generate_series(1, $1::bigint) n",
                &[&tasks],
            )
            .await?;
        client.close().await;
        ground.settle().await?;
        let before = ground.transactions(&database).await?;
        let (wal, processor_time) = (ground.wal().await?, ground.processor_time()?);
        Ok(Self { ground, database, before, wal, processor_time, began: Instant::now() })
    }

    /// The clock starts here, when everybody is connected.
    pub(crate) fn begin(&mut self) {
        self.began = Instant::now();
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Counts, when all writers have disconnected.
    pub(crate) async fn end(self, tasks: i64, took: Duration) -> Result<Outcome> {
        let wal = self.ground.wal().await?;
        let after = self.ground.transactions(&self.database).await?;
        let processor_time = self.ground.processor_time()? - self.processor_time;
        let client = connect(&self.database.url).await?;
        let sql =
            "SELECT count(*) FILTER (WHERE t.status = CASE WHEN t.id % 10 = 0 THEN 'failed' ELSE 'done' END),
                          count(*) FILTER (WHERE t.status = 'done') = min(j.done)
                          AND count(*) FILTER (WHERE t.status = 'failed') = min(j.failed),
                          (SELECT last_value FROM public.trigger_runs)
                     FROM public.tasks t, public.jobs j";
        let row = client.query_one(sql, &[]).await?;
        client.close().await;
        self.ground.drop_database(self.database).await?;
        Ok(Outcome {
            transactions: after.committed - self.before.committed,
            rolled_back: after.rolled_back - self.before.rolled_back,
            deadlocks: after.deadlocks - self.before.deadlocks,
            trigger_runs: row.get(2),
            updates_per_second: tasks as f64 / took.as_secs_f64(),
            server_time_per_update: processor_time * 1e6 / tasks as f64,
            wal_bytes_per_update: wal.bytes_since(self.wal) / tasks as f64,
            right: if row.get(1) { row.get(0) } else { 0 },
        })
    }
}
