//! What concerns one batch.

use super::beating;
use crate::state::State;
use crate::store::trip::{self, COMMIT};
use crate::{
    lines::Lines,
    store::{batches::Unbalanced, moment},
};
use jiff::Timestamp;
use tokio_postgres::{Error, GenericClient, Row, error::SqlState, types::ToSql};

#[derive(Clone, Debug)]
pub struct BatchFacts {
    pub state: State,
    pub queue: String,
    pub command: String,
    pub priority: i32,
    pub parent: Option<i64>,
    pub open: bool,
    pub aborting: bool,
    pub rows: i32,
    pub carved: i32,
    /// The rows of the canary, as long as nothing else may run; and whether they have ended.
    pub canary: Option<i32>,
    pub canary_over: bool,
    pub done: i64,
    pub failed: i64,
    pub allowed: i64,
    /// Rows that had failed when an operator released the batch from a spent budget.
    pub forgiven: i64,
    pub on_budget: Option<String>,
    pub blocks_owned: i64,
    /// Of the owned ones, those of workers that may not be alive; and one of these workers.
    pub blocks_silent: i64,
    pub silent_worker: Option<String>,
    /// Seconds since the oldest claim of an owned block.
    pub oldest_claim: Option<f64>,
    pub blocks_due: i64,
    /// Rows that must run with nothing beside them, and that no worker has.
    pub solo: i64,
    pub next_due: Option<Timestamp>,
    /// Rows that wait for another try, the try they wait for, and what one of them failed with.
    pub retrying: i64,
    pub next_attempt: Option<i32>,
    pub last_error: Option<String>,
    /// Rows that their handler could not take the last time, and why.
    pub postponed: i64,
    pub postponed_error: Option<String>,
    /// Rows of the last minute.
    pub recent: i64,
    /// Seconds since the latest outcome, or since it was due, whichever is less.
    pub quiet: f64,
    /// Nothing is left to run, and it has not ended.
    pub over: bool,
    /// Some rows added text to output files.
    pub outputs: bool,
    pub error: Option<String>,
    /// Open batches of the same queue with a better priority.
    pub ahead: i64,
}

impl BatchFacts {
    /// How many rows may fail before its budget is spent.
    pub fn may_fail(&self) -> i64 {
        self.allowed.max(self.forgiven)
    }

    fn read(row: &Row) -> Self {
        Self {
            state: row.get("state"),
            queue: row.get("queue"),
            command: row.get("command"),
            priority: row.get("priority"),
            parent: row.get("parent_id"),
            open: row.get("open"),
            aborting: row.get("aborting"),
            rows: row.get("rows"),
            carved: row.get("carved"),
            canary: row.get::<_, Option<i32>>("canary").filter(|_| row.get("canary_only")),
            canary_over: row.get("canary_over"),
            done: row.get("done"),
            failed: row.get("failed"),
            allowed: row.get("allowed"),
            forgiven: row.get("forgiven"),
            on_budget: row.get("on_budget"),
            blocks_owned: row.get("blocks_owned"),
            blocks_silent: row.get("blocks_silent"),
            silent_worker: row.get("silent_worker"),
            oldest_claim: row.get("oldest_claim"),
            blocks_due: row.get("blocks_due"),
            solo: row.get("solo"),
            next_due: moment::maybe(row, "next_due"),
            retrying: row.get("retrying"),
            next_attempt: row.get("next_attempt"),
            last_error: row.get("last_error"),
            postponed: row.get("postponed"),
            postponed_error: row.get("postponed_error"),
            recent: row.get("recent"),
            quiet: row.get("quiet"),
            over: row.get("over"),
            outputs: row.get("outputs"),
            error: row.get("error"),
            ahead: row.get("ahead"),
        }
    }
}

pub async fn batch(client: &impl GenericClient, id: i64) -> Result<Option<BatchFacts>, Error> {
    const SQL: &str = concat!(
        "SELECT p.state::text AS state, b.queue, b.command, b.priority, t.parent_id, b.open, b.aborting, b.rows,
               CASE WHEN b.canary_only THEN b.rows ELSE b.next_line - 1 END AS carved, b.canary_only, b.canary, b.canary_report IS NOT NULL AS canary_over, (p.succeeded + p.failed + p.aborted)::bigint AS done, p.failed::bigint AS failed,
               musterd.allowed_failures(b.rows, b.max_failed, b.max_failed_percent) AS allowed, b.forgiven::bigint AS forgiven,
               b.on_budget, t.error, k.*, y.recent,
               EXTRACT(EPOCH FROM pg_catalog.now() - GREATEST(y.latest, t.run_at))::float8 AS quiet,
               EXISTS (SELECT FROM musterd.batches_over o WHERE o.id = b.id) AS over,
               EXISTS (SELECT FROM musterd.output_texts o WHERE o.batch_id BETWEEN b.id AND b.id) AS outputs,
               (SELECT pg_catalog.count(*) FROM musterd.batches o
                 WHERE o.queue = b.queue AND o.open AND o.next_line <= o.rows AND NOT o.canary_only AND o.priority < b.priority) AS ahead
          FROM musterd.batches b
          JOIN musterd.task_records t ON t.id = b.id
          JOIN musterd.batch_progress p ON p.id = b.id
         CROSS JOIN LATERAL (
               SELECT pg_catalog.count(k.worker) AS blocks_owned,
                      pg_catalog.count(k.worker) FILTER (WHERE NOT k.beats) AS blocks_silent,
                      pg_catalog.min(k.worker) FILTER (WHERE NOT k.beats) AS silent_worker,
                      EXTRACT(EPOCH FROM pg_catalog.now() - pg_catalog.min(k.claimed_at) FILTER (WHERE k.worker IS NOT NULL))::float8
                          AS oldest_claim,
                      pg_catalog.count(*) FILTER (WHERE k.worker IS NULL AND k.available_at <= pg_catalog.now()) AS blocks_due,
                      pg_catalog.count(*) FILTER (WHERE k.worker IS NULL AND k.solo) AS solo,
                      pg_catalog.min(k.available_at) FILTER (WHERE k.worker IS NULL AND k.available_at > pg_catalog.now()) AS next_due,
                      COALESCE(pg_catalog.sum(k.rows) FILTER (WHERE k.worker IS NULL AND k.attempt > 1), 0)::bigint AS retrying,
                      pg_catalog.max(k.attempt) FILTER (WHERE k.worker IS NULL AND k.attempt > 1) AS next_attempt,
                      pg_catalog.max(k.error) FILTER (WHERE k.worker IS NULL AND k.attempt > 1) AS last_error,
                      -- One that is claimed again at this moment, too.
                      COALESCE(pg_catalog.sum(k.rows) FILTER (WHERE k.attempt = 1 AND k.error IS NOT NULL), 0)::bigint AS postponed,
                      pg_catalog.max(k.error) FILTER (WHERE k.attempt = 1) AS postponed_error
                 FROM (SELECT k.worker, k.claimed_at, k.available_at, k.rows, k.attempt, k.solo, k.error, k.worker IS NULL OR EXISTS (SELECT FROM musterd.workers w WHERE w.id = k.worker AND ",
        beating!(),
        ") AS beats FROM musterd.blocks k WHERE k.batch_id = b.id) k) k
         CROSS JOIN LATERAL (
               SELECT COALESCE(pg_catalog.sum(o.succeeded + o.failed)
                                   FILTER (WHERE o.finished_at > pg_catalog.now() - interval '1 minute'), 0)::bigint AS recent,
                      pg_catalog.max(o.finished_at) AS latest
                 FROM musterd.outcomes o
                -- BETWEEN, for the planner, as in batch_progress; and what has ended is not moving.
                WHERE o.batch_id BETWEEN b.id AND b.id AND b.summarized_at IS NULL) y
         WHERE b.id = $1"
    );
    let Some(row) = client.query_opt(SQL, &[&id]).await? else { return Ok(None) };
    let mut facts = BatchFacts::read(&row);
    if facts.failed > 0 && facts.error.is_none() {
        facts.error = sample_error(client, id).await?;
    }
    Ok(Some(facts))
}

/// The error of the failed row with the highest line.
async fn sample_error(client: &impl GenericClient, id: i64) -> Result<Option<String>, Error> {
    const SQL: &str =
        "SELECT f.error FROM musterd.failures f WHERE f.batch_id = $1 ORDER BY f.line DESC LIMIT 1";
    Ok(client.query_opt(SQL, &[&id]).await?.map(|row| row.get(0)))
}

/// What an audit of a batch that is over found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Audit {
    /// Every line is accounted for, or it is not over any more.
    Balanced,
    Unbalanced(Unbalanced),
    /// There was not enough time.
    TimedOut,
}

/// Audits a batch if it is over, for a few seconds at most.
pub async fn audit(client: &impl GenericClient, id: i64) -> Result<Audit, Error> {
    const SQL: &str = "SELECT a.missing, a.doubled, a.outside, b.aborting
          FROM musterd.batches_over b CROSS JOIN LATERAL musterd.audit(b.id) a WHERE b.id = $1";
    let statement = client.prepare(SQL).await?;
    let params: [&(dyn ToSql + Sync); 1] = [&id];
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL statement_timeout = '5s'";
    let session = client.client();
    let asking = session.query_opt(&statement, &params);
    let found = match trip::run(session, BEGIN, asking, session.batch_execute(COMMIT)).await {
        Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => return Ok(Audit::TimedOut),
        found => found?,
    };
    let Some(row) = found else { return Ok(Audit::Balanced) };
    let (missing, aborting): (Lines, bool) = (row.get(0), row.get(3));
    let missing = if aborting { Lines::new() } else { missing };
    let found = Unbalanced { id, missing, doubled: row.get(1), outside: row.get(2) };
    let is_balanced = found.missing.is_empty() && found.doubled == 0 && found.outside == 0;
    Ok(if is_balanced { Audit::Balanced } else { Audit::Unbalanced(found) })
}

/// Whether a session holds the lock for the upload of a batch.
pub async fn is_uploading(client: &impl GenericClient, id: i64) -> Result<bool, Error> {
    // Taken together with others and for the length of the statement: the list of all locks, which stops the whole server for a
    // moment, is not read.
    const SQL: &str = "SELECT NOT pg_catalog.pg_try_advisory_xact_lock_shared(
            pg_catalog.hashtextextended('musterd.upload:' || $1::bigint, 0))";
    Ok(client.query_one(SQL, &[&id]).await?.get(0))
}
