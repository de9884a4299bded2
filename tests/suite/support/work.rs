//! Batches as a test sees them: submitted, followed to their end, with every claim written down by the database itself.

use std::time::Duration;

use tokio_postgres::Client;

use super::audit;
use super::daemon::Daemon;
use super::database::TestDb;
use super::wait::{SOON, eventually};

/// Writes down every claim and every heartbeat.
const AUDIT: &str = "
CREATE TABLE public.claims (
    at timestamptz DEFAULT clock_timestamp(), batch bigint, lines int4multirange, worker text, crashes int, solo bool);
CREATE FUNCTION public.note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.worker IS NOT NULL AND (TG_OP = 'INSERT' OR OLD.token IS DISTINCT FROM NEW.token) THEN
        INSERT INTO public.claims (batch, lines, worker, crashes, solo)
        VALUES (NEW.batch_id, NEW.lines, NEW.worker, NEW.crashes, NEW.solo);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_claim AFTER INSERT OR UPDATE ON musterd.blocks FOR EACH ROW EXECUTE FUNCTION public.note_claim();
CREATE TABLE public.beats (at timestamptz DEFAULT clock_timestamp(), worker text, state text);
CREATE FUNCTION public.note_beat() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.beats (worker, state) VALUES (NEW.id, NEW.state);
    RETURN NULL;
END $$;
CREATE TRIGGER note_beat AFTER INSERT OR UPDATE OF seen_at ON musterd.workers
    FOR EACH ROW EXECUTE FUNCTION public.note_beat();
";

/// The ledger of one database.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) client: Client,
}

/// How a batch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) state: String,
    pub(crate) succeeded: i32,
    pub(crate) failed: i32,
}

impl End {
    pub(crate) fn succeeded(rows: i32) -> Self {
        Self { state: "succeeded".into(), succeeded: rows, failed: 0 }
    }
}

impl Ledger {
    pub(crate) async fn open(db: &TestDb) -> Self {
        Self::of(db.client().await).await
    }

    pub(crate) async fn of(client: Client) -> Self {
        audit::guard(&client).await;
        client.batch_execute(AUDIT).await.unwrap();
        Self { client }
    }

    pub(crate) async fn submit(&self, command: &str, rows: i32) -> i64 {
        let sql =
            "SELECT musterd.submit_batch($1, ARRAY (SELECT to_jsonb(g) FROM generate_series(1, $2::int) g))";
        self.client.query_one(sql, &[&command, &rows]).await.unwrap().get(0)
    }

    /// A batch whose lines are all in one free block.
    pub(crate) async fn submit_block(&self, command: &str, rows: i32) -> i64 {
        self.submit_block_with(command, rows, None).await
    }

    /// A batch of one row, which is to run alone.
    pub(crate) async fn submit_solo(&self, command: &str) -> i64 {
        let alone = "UPDATE musterd.blocks SET crashes = 3, solo = true WHERE batch_id = $1";
        self.submit_block_with(command, 1, Some(alone)).await
    }

    /// `change` is made before any worker sees the block.
    async fn submit_block_with(&self, command: &str, rows: i32, change: Option<&str>) -> i64 {
        let batch = self.submit_held(command, rows).await;
        let carve = "WITH b AS (UPDATE musterd.batches SET next_line = rows + 1 WHERE id = $1 RETURNING *)
             INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority)
             SELECT id, int4multirange(int4range(1, rows + 1)), rows, queue, command, priority FROM b";
        self.client.execute(carve, &[&batch]).await.unwrap();
        if let Some(change) = change {
            self.client.execute(change, &[&batch]).await.unwrap();
        }
        self.client.execute("SELECT musterd.release($1)", &[&batch]).await.unwrap();
        batch
    }

    async fn submit_held(&self, command: &str, rows: i32) -> i64 {
        let sql = "SELECT musterd.submit_batch($1, ARRAY (SELECT to_jsonb(g) FROM generate_series(1, $2::int) g), hold => true)";
        self.client.query_one(sql, &[&command, &rows]).await.unwrap().get(0)
    }

    /// Waits for a batch's end.
    pub(crate) async fn end_of(&self, batch: i64, limit: Duration) -> End {
        eventually(limit, &format!("batch {batch} ends"), async || self.end(batch).await).await
    }

    /// `None` while the batch runs.
    pub(crate) async fn end(&self, batch: i64) -> Option<End> {
        let sql = "SELECT state::text, succeeded, failed FROM musterd.batch_progress WHERE id = $1";
        let row = self.client.query_one(sql, &[&batch]).await.unwrap();
        let end = End { state: row.get(0), succeeded: row.get(1), failed: row.get(2) };
        matches!(end.state.as_str(), "succeeded" | "failed" | "aborted").then_some(end)
    }

    /// Waits until so many results of a batch are there.
    pub(crate) async fn has_results(&self, batch: i64, count: i64, limit: Duration) {
        eventually(limit, &format!("{count} rows of batch {batch} are done"), async || {
            let sql = "SELECT count(*) FROM musterd.results WHERE batch_id = $1";
            let done: i64 = self.client.query_one(sql, &[&batch]).await.unwrap().get(0);
            (done >= count).then_some(())
        })
        .await;
    }

    /// Waits until a worker holds so many blocks. Gives the worker's id.
    pub(crate) async fn somebody_holds(&self, blocks: i64, limit: Duration) -> String {
        eventually(limit, &format!("somebody holds {blocks} blocks"), async || {
            let sql =
                "SELECT worker FROM musterd.blocks WHERE worker IS NOT NULL GROUP BY 1 HAVING count(*) >= $1";
            self.client.query_opt(sql, &[&blocks]).await.unwrap().map(|row| row.get(0))
        })
        .await
    }

    /// One number.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Lines that were claimed more than once.
    pub(crate) async fn claimed_again(&self) -> i64 {
        self.number(
            "SELECT count(*) FROM (
                 SELECT c.batch, l.line
                   FROM public.claims c, LATERAL musterd.lines_of(c.lines) l (line)
                  GROUP BY 1, 2 HAVING count(*) > 1) again",
        )
        .await
    }

    /// Workers that were declared dead.
    pub(crate) async fn dead(&self) -> i64 {
        self.number("SELECT count(*) FROM musterd.workers WHERE state = 'dead'").await
    }

    pub(crate) async fn owned(&self) -> i64 {
        self.number("SELECT count(*) FROM musterd.blocks WHERE worker IS NOT NULL").await
    }

    pub(crate) async fn deadlocks(&self) -> i64 {
        self.number("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").await
    }

    /// The id of the worker with this process id that is not dead.
    pub(crate) async fn worker_of(&self, daemon: &Daemon) -> String {
        let sql = "SELECT id FROM musterd.workers WHERE pid = $1 AND state IN ('alive', 'draining') ORDER BY started_at DESC";
        let pid = i32::try_from(daemon.pid()).unwrap();
        eventually(SOON, "the worker is in the list", async || {
            Some(self.client.query(sql, &[&pid]).await.unwrap().first()?.get(0))
        })
        .await
    }

    /// Waits until the worker is in this state.
    pub(crate) async fn worker_is(&self, id: &str, state: &str, limit: Duration) {
        eventually(limit, &format!("{id} is {state}"), async || {
            let sql = "SELECT state FROM musterd.workers WHERE id = $1";
            let row = self.client.query_opt(sql, &[&id]).await.unwrap()?;
            (row.get::<_, String>(0) == state).then_some(())
        })
        .await;
    }

    /// Seconds from `since` (a server time) to the first claim by somebody other than `worker`.
    pub(crate) async fn claimed_elsewhere(&self, worker: &str, since: &str, limit: Duration) -> f64 {
        eventually(limit, "somebody else claims", async || {
            let sql = "SELECT EXTRACT(EPOCH FROM min(at) - $2::text::timestamptz)::float8 FROM public.claims
                        WHERE worker <> $1 AND at > $2::text::timestamptz";
            self.client.query_one(sql, &[&worker, &since]).await.unwrap().get(0)
        })
        .await
    }

    /// The server's time.
    pub(crate) async fn now(&self) -> String {
        self.client.query_one("SELECT clock_timestamp()::text", &[]).await.unwrap().get(0)
    }
}

/// The value of a metric of a daemon.
pub(crate) async fn metric(daemon: &Daemon, name: &str) -> f64 {
    let (_, text) = daemon.get("/metrics").await.unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no metric {name} in {text}"))
}
