//! Batches: counted, finished, looked at.

use super::{
    moment,
    trip::{self, COMMIT},
};
use crate::{json::Json, lines::Lines, state::State};
use deadpool_postgres::Object;
use serde::{Deserialize, Serialize};
use tokio_postgres::{Client, Error, GenericClient, Row, types::ToSql};
use uuid::Uuid;

/// A batch in which nothing can change any more, and which its outcomes and failures account for line by line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    pub id: i64,
    /// Of this batch alone, for ever.
    pub uid: Uuid,
    pub generation: i32,
    pub rows: i32,
    pub succeeded: i32,
    pub failed: i32,
    /// The sum of all counts that were ever written: by it a later change is noticed.
    pub recorded: i64,
    /// Some rows added text to output files.
    pub outputs: bool,
    pub aborting: bool,
}

/// A batch that has nothing left to run and whose lines do not add up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unbalanced {
    pub id: i64,
    /// Lines of which nothing is recorded: the sweep lets them run again.
    pub missing: Lines,
    /// Lines that are recorded more than once, or that the batch does not have. Never, unless by hand.
    pub doubled: i64,
    pub outside: i64,
}

/// What one look at a scope found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Over, and not finished yet.
    Closed(Closed),
    Unbalanced(Unbalanced),
    /// A task with children: the completing transaction does its own counting.
    Parent(i64),
}

impl Look {
    pub fn id(&self) -> i64 {
        match self {
            Self::Closed(closed) => closed.id,
            Self::Unbalanced(found) => found.id,
            Self::Parent(id) => *id,
        }
    }
}

const LOOK: &str = "SELECT b.id, b.uid, b.generation, b.rows, b.aborting, a.succeeded, a.failed, a.doubled, a.outside, a.missing,
           a.recorded,
           EXISTS (SELECT FROM musterd.output_texts o WHERE o.batch_id = b.id) AS outputs, false AS parent
      FROM musterd.batches_over b CROSS JOIN LATERAL musterd.audit(b.id) a
     WHERE b.id = ANY ($1)
    UNION ALL
    SELECT t.id, NULL, 0, 0, false, 0, 0, 0, 0, '{}', 0, false, true
      FROM musterd.task_records t
     WHERE t.id = ANY ($1) AND (t.state = 'waiting' OR t.not_before IS NOT NULL)";

/// Which of these scopes are over, each batch audited line by line. One statement, one snapshot: a batch that is closed
/// in it stays closed, and its counts right, unless its generation or its number of rows changes.
///
/// For a caller that has set its own limit; [`look`] has none.
pub async fn look_within(client: &impl GenericClient, ids: &[i64]) -> Result<Vec<Look>, Error> {
    Ok(client.query(LOOK, &[&ids]).await?.iter().map(read_look).collect())
}

/// The same in a transaction of its own, however long the audit of a large batch takes.
pub async fn look(client: &Object, ids: &[i64]) -> Result<Vec<Look>, Error> {
    let statement = client.prepare_cached(LOOK).await?;
    Ok(query_patiently(client, &statement, &[&ids], Mode::ReadOnly).await?.iter().map(read_look).collect())
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    ReadOnly,
    ReadWrite,
}

/// A statement without a limit of time, in a transaction of its own and one round trip.
async fn query_patiently(
    client: &Object,
    statement: &tokio_postgres::Statement,
    params: &[&(dyn ToSql + Sync)],
    mode: Mode,
) -> Result<Vec<Row>, Error> {
    let begin = match mode {
        Mode::ReadOnly => "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL statement_timeout = 0",
        Mode::ReadWrite => "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0",
    };
    trip::run(client, begin, client.query(statement, params), client.batch_execute(COMMIT)).await
}

fn read_look(row: &Row) -> Look {
    if row.get("parent") {
        return Look::Parent(row.get("id"));
    }
    let (doubled, outside): (i64, i64) = (row.get("doubled"), row.get("outside"));
    let (aborting, missing): (bool, Lines) = (row.get("aborting"), row.get("missing"));
    if doubled > 0 || outside > 0 || (!aborting && !missing.is_empty()) {
        return Look::Unbalanced(Unbalanced { id: row.get("id"), missing, doubled, outside });
    }
    Look::Closed(Closed {
        id: row.get("id"),
        uid: row.get("uid"),
        generation: row.get("generation"),
        rows: row.get("rows"),
        succeeded: row.get("succeeded"),
        failed: row.get("failed"),
        recorded: row.get("recorded"),
        outputs: row.get("outputs"),
        aborting,
    })
}

/// The answer of the completing transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// This call finished the scope.
    Completed,
    /// Another transaction holds the scope's lock: it may be looking at an older state. Try again.
    Locked,
    /// The count was of another state of the batch. Count again.
    Stale,
    /// Not over.
    Open,
    /// Finished before.
    Ended,
    Missing,
    /// Over, but its files have to be uploaded first.
    NeedsUpload,
    /// Its lines do not add up; it stays open.
    Unbalanced,
}

/// A scope to be finished.
#[derive(Clone, Copy, Debug)]
pub struct ScopeEnd<'a> {
    pub id: i64,
    /// Of a batch: what was counted.
    pub closed: Option<&'a Closed>,
    pub outputs: Option<&'a Json>,
}

/// Whether to do without the advisory lock, which any session may hold for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advisory {
    Ask,
    Skip,
}

/// Finishes scopes, each exactly once, in one transaction. Those that are locked by other transactions are passed by.
pub async fn complete(
    client: &mut Object,
    ends: &[ScopeEnd<'_>],
    advisory: Advisory,
) -> Result<Vec<(i64, Completion)>, Error> {
    const SQL: &str = "SELECT c.scope_id, c.answer
          FROM musterd.complete_scopes((
                   SELECT pg_catalog.array_agg(u::musterd.scope_end ORDER BY u.id)
                     FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::int[]), pg_catalog.unnest($3::int[]),
                                     pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]), pg_catalog.unnest($6::bigint[]),
                                     pg_catalog.unnest($7::jsonb[]))
                          AS u (id, generation, rows, succeeded, failed, recorded, outputs)), $8, false) c";
    fn column<'a, T>(ends: &[ScopeEnd<'a>], of: impl Fn(&'a Closed) -> T) -> Vec<Option<T>> {
        ends.iter().map(|end| end.closed.map(&of)).collect()
    }
    let ids: Vec<i64> = ends.iter().map(|end| end.id).collect();
    let (generations, rows) = (column(ends, |c| c.generation), column(ends, |c| c.rows));
    let (succeeded, failed) = (column(ends, |c| c.succeeded), column(ends, |c| c.failed));
    let recorded = column(ends, |c| c.recorded);
    let outputs: Vec<Option<&Json>> = ends.iter().map(|end| end.outputs).collect();
    let statement = client.prepare_cached(SQL).await?;
    let transaction = client
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
        .start()
        .await?;
    let answered = transaction
        .query(
            &statement,
            &[
                &ids,
                &generations,
                &rows,
                &succeeded,
                &failed,
                &recorded,
                &outputs,
                &(advisory == Advisory::Skip),
            ],
        )
        .await?;
    let answers: Vec<(i64, Completion)> =
        answered.iter().map(|row| (row.get(0), completion(row.get(1)))).collect();
    // Open, too: a parent that is not over may have aborted its children.
    match answers.iter().any(|(_, answer)| matches!(answer, Completion::Completed | Completion::Open)) {
        true => transaction.commit().await?,
        // Nothing was changed: no empty transaction is committed.
        false => transaction.rollback().await?,
    }
    Ok(answers)
}

fn completion(answer: &str) -> Completion {
    match answer {
        "completed" => Completion::Completed,
        "locked" => Completion::Locked,
        "stale" => Completion::Stale,
        "open" => Completion::Open,
        "ended" => Completion::Ended,
        _ => Completion::Missing,
    }
}

/// Of these scopes, those that are over and not finished; and those that may have used up their budget of failures, or whose canary
/// has ended.
pub async fn worth_a_look(client: &Object, ids: &[i64]) -> Result<(Vec<Over>, Vec<i64>), Error> {
    const SQL: &str = "SELECT b.id, false AS budget,
               EXISTS (SELECT FROM musterd.output_texts o WHERE o.batch_id BETWEEN b.id AND b.id) AS outputs
          FROM musterd.batches_over b
         WHERE b.id = ANY ($1)
        UNION ALL
        SELECT p.id, false, false FROM musterd.uncles_ready p WHERE p.id = ANY ($1)
        UNION ALL
        SELECT p.id, false, false FROM musterd.task_records p
         WHERE p.id = ANY ($1) AND p.state = 'waiting'
           AND (p.aborting OR p.on_child_failure = 'abort_siblings'
                OR EXISTS (SELECT FROM musterd.parents_over o WHERE o.id = p.id))
        UNION ALL
        SELECT b.id, true, false FROM musterd.canaries_over b WHERE b.id = ANY ($1)
        UNION ALL
        SELECT b.id, true, false
          FROM musterd.batches b
         WHERE b.id = ANY ($1) AND b.open AND b.on_budget IS NOT NULL
           AND musterd.failed_now(b) > GREATEST(musterd.allowed_failures(b.rows, b.max_failed, b.max_failed_percent), b.forgiven)";
    let statement = client.prepare_cached(SQL).await?;
    let (mut over, mut spent) = (Vec::new(), Vec::new());
    for row in client.query(&statement, &[&ids]).await? {
        let id: i64 = row.get(0);
        if row.get(1) {
            spent.push(id);
        } else {
            over.push(Over { id, outputs: row.get(2) });
        }
    }
    Ok((over, spent))
}

/// A scope that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    pub id: i64,
    /// Its end needs an upload.
    pub outputs: bool,
}

/// Every scope that is over and was not finished: what the sweep is for.
pub async fn unfinished(client: &Object) -> Result<Vec<i64>, Error> {
    const SQL: &str =
        "SELECT b.id FROM musterd.batches_over b UNION ALL SELECT p.id FROM musterd.parents_over p
         UNION ALL SELECT c.id FROM musterd.canaries_over c UNION ALL SELECT p.id FROM musterd.parents_aborting p UNION ALL SELECT u.id FROM musterd.uncles_ready u";
    let rows = client.query(SQL, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Batches that have nothing left to run, seem to be over, and were not aborted.
pub async fn over(client: &Object) -> Result<Vec<i64>, Error> {
    let rows = client
        .query("SELECT b.id FROM musterd.batches_over b WHERE NOT b.aborting ORDER BY b.id", &[])
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Lets lines run again of which nothing is recorded, in a batch that has nothing left to run: how many. The audit comes first and
/// without a lock, for it takes its time.
pub async fn heal(client: &Object, id: i64) -> Result<i32, Error> {
    const BROKEN: &str = "SELECT FROM musterd.audit($1) a WHERE NOT pg_catalog.isempty(a.missing)";
    const HEAL: &str = "SELECT musterd.heal_batch($1)";
    let audit = client.prepare_cached(BROKEN).await?;
    if query_patiently(client, &audit, &[&id], Mode::ReadOnly).await?.is_empty() {
        return Ok(0);
    }
    let heal = client.prepare_cached(HEAL).await?;
    let healed = query_patiently(client, &heal, &[&id], Mode::ReadWrite).await?;
    Ok(healed.first().map_or(0, |row| row.get(0)))
}

/// A batch as people see it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Progress {
    pub id: i64,
    pub state: State,
    pub command: String,
    pub queue: String,
    pub priority: i32,
    pub rows: i32,
    pub queued: i32,
    pub running: i32,
    pub succeeded: i32,
    pub failed: i32,
    pub aborted: i32,
    /// Abort was asked for; it ends when no worker holds a block of it.
    pub aborting: bool,
    pub generation: i32,
    pub parent_id: Option<i64>,
    pub created_at: jiff::Timestamp,
    pub finished_at: Option<jiff::Timestamp>,
    pub outputs: Option<Json>,
    /// How long its rows were asked to stay; as the configuration says when not given.
    pub keep: Option<String>,
    /// Its rows stay until `release-data`.
    pub data_held: bool,
    /// From then on its rows could not be read any more.
    pub data_gone_at: Option<jiff::Timestamp>,
    /// With `data_gone_at`: until when this record stays; none: for ever.
    pub record_until: Option<jiff::Timestamp>,
    /// Its output files went with its rows.
    pub outputs_gone: bool,
    /// Where its rows with their results were written before they went.
    pub archive: Option<Json>,
}

impl Progress {
    pub(super) fn read(row: &Row) -> Self {
        let mut progress = Self {
            id: row.get("id"),
            state: row.get("state"),
            command: row.get("command"),
            queue: row.get("queue"),
            priority: row.get("priority"),
            rows: row.get("rows"),
            queued: row.get("queued"),
            running: row.get("running"),
            succeeded: row.get("succeeded"),
            failed: row.get("failed"),
            aborted: row.get("aborted"),
            aborting: row.get("aborting"),
            generation: row.get("generation"),
            parent_id: row.get("parent_id"),
            created_at: moment::of(row, "created_at"),
            finished_at: moment::maybe(row, "finished_at"),
            outputs: row.get("outputs"),
            keep: row.get("keep"),
            data_held: row.get("data_held"),
            data_gone_at: moment::maybe(row, "data_gone_at"),
            record_until: moment::maybe(row, "record_until"),
            outputs_gone: row.get("outputs_gone"),
            archive: row.get("archive"),
        };
        // The table remembers that it was asked for; a batch that has ended is on its way nowhere.
        progress.aborting &= !progress.is_over();
        progress
    }

    pub fn is_over(&self) -> bool {
        self.state.is_final()
    }

    pub fn done(&self) -> i32 {
        self.succeeded + self.failed + self.aborted
    }
}

/// State and counts, from outcomes while the batch runs: the cost does not depend on its rows.
pub async fn progress(client: &impl GenericClient, id: i64) -> Result<Option<Progress>, Error> {
    const SQL: &str =
        "SELECT id, state::text, command, queue, priority, rows, queued, running, succeeded, failed, aborted,
               aborting, generation, parent_id, created_at, finished_at, outputs, keep::text, data_held, data_gone_at, record_until,
               outputs_gone, archive
          FROM musterd.batch_progress WHERE id = $1";
    Ok(client.query_opt(SQL, &[&id]).await?.map(|row| Progress::read(&row)))
}

/// The parents of tasks that have one.
pub async fn parents_of(client: &Object, ids: &[i64]) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT DISTINCT t.parent_id FROM musterd.task_records t WHERE t.id = ANY ($1) AND t.parent_id IS NOT NULL";
    let statement = client.prepare_cached(SQL).await?;
    Ok(client.query(&statement, &[&ids]).await?.iter().map(|row| row.get(0)).collect())
}

/// Batches and tasks of `ids` that were aborted: for a worker that may have missed the notification.
pub async fn aborting(client: &Client, ids: &[i64]) -> Result<Vec<i64>, Error> {
    const SQL: &str = "SELECT b.id FROM musterd.batches b WHERE b.id = ANY ($1) AND b.aborting
        UNION ALL
        SELECT t.id FROM musterd.task_records t WHERE t.id = ANY ($1) AND (t.state = 'aborted' OR t.aborting)";
    Ok(client.query(SQL, &[&ids]).await?.iter().map(|row| row.get(0)).collect())
}
