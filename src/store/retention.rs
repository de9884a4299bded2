//! What goes after the end: each call is one of the functions `musterd.prune_…`, in a transaction of its own.
//!
//! An advisory lock keeps two workers from doing the same work twice. It is a courtesy: the functions lock what they delete, and
//! decide after that.

use super::moment;
use crate::{json::Json, keep::Keep};
use serde::Serialize;
use std::time::Duration;
use tokio_postgres::{Client, Error, GenericClient, IsolationLevel, Row, Transaction, types::ToSql};
use uuid::Uuid;

/// What `[retention]` says, as the database has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    pub data: Keep,
    pub records: Keep,
    pub held: Keep,
    pub archive: bool,
    pub outputs: bool,
    pub rules: Vec<Rule>,
}

/// Other times for some work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rule {
    pub name: String,
    pub queue: Option<String>,
    pub command: Option<String>,
    pub state: Option<&'static str>,
    pub data: Option<Keep>,
    pub records: Option<Keep>,
}

/// Makes a policy the one that counts, for all workers.
pub async fn declare(client: &Client, policy: &Policy) -> Result<(), Error> {
    const SQL: &str = "SELECT musterd.declare_retention(
            pg_catalog.make_interval(secs => $1), pg_catalog.make_interval(secs => $2), pg_catalog.make_interval(secs => $3), $4, $5,
            ARRAY (SELECT ROW(r.name, r.queue, r.command, r.state::musterd.state, pg_catalog.make_interval(secs => r.data),
                              pg_catalog.make_interval(secs => r.records))::musterd.retention_rules
                     FROM ROWS FROM (pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), pg_catalog.unnest($8::text[]),
                                     pg_catalog.unnest($9::text[]), pg_catalog.unnest($10::float8[]), pg_catalog.unnest($11::float8[]))
                          AS r (name, queue, command, state, data, records)))";
    fn column<'p, T>(policy: &'p Policy, of: impl Fn(&'p Rule) -> T) -> Vec<T> {
        policy.rules.iter().map(of).collect()
    }
    let [data, records, held] = [policy.data, policy.records, policy.held].map(Keep::as_secs_f64);
    let (names, states) = (column(policy, |rule| &rule.name), column(policy, |rule| rule.state));
    let (queues, commands) = (column(policy, |rule| &rule.queue), column(policy, |rule| &rule.command));
    let datas = column(policy, |rule| rule.data.map(Keep::as_secs_f64));
    let record_times = column(policy, |rule| rule.records.map(Keep::as_secs_f64));
    let parameters: [&(dyn ToSql + Sync); 11] = [
        &data,
        &records,
        &held,
        &policy.archive,
        &policy.outputs,
        &names,
        &queues,
        &commands,
        &states,
        &datas,
        &record_times,
    ];
    client.query(SQL, &parameters).await.map(|_| ())
}

/// What the policy in force asks for beside deleting, and how far the walk through the tasks is.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub archive: bool,
    pub outputs: bool,
    pub walked_to: i64,
}

/// `None` before the first worker has declared one: nothing may go.
pub async fn wanted(client: &impl GenericClient) -> Result<Option<Wanted>, Error> {
    const SQL: &str = "SELECT g.archive, g.outputs, g.walked_to FROM musterd.retention g";
    let row = client.query_opt(SQL, &[]).await?;
    Ok(row.map(|row| Wanted { archive: row.get(0), outputs: row.get(1), walked_to: row.get(2) }))
}

/// True for the one worker that does the next pass.
pub async fn begin_pass(client: &impl GenericClient, every: Duration) -> Result<bool, Error> {
    const SQL: &str = "SELECT musterd.begin_prune_pass(pg_catalog.make_interval(secs => $1))";
    Ok(client.query_one(SQL, &[&every.as_secs_f64()]).await?.get(0))
}

/// The end of a pass: what went, and what kept data from going.
pub async fn end_pass(
    client: &impl GenericClient,
    gone: Option<&Json>,
    trouble: Option<&str>,
) -> Result<(), Error> {
    client.query("SELECT musterd.record_prune($1, $2)", &[&gone, &trouble]).await.map(|_| ())
}

/// Where the walk through the tasks goes on: at the first one again, when it has not been there for a day.
pub async fn next_walk(client: &impl GenericClient, again_after: Duration) -> Result<i64, Error> {
    const SQL: &str = "UPDATE musterd.retention g
           SET walked_to = CASE WHEN a.again THEN 0 ELSE g.walked_to END,
               round_at = CASE WHEN a.again THEN pg_catalog.now() ELSE g.round_at END
          FROM (SELECT o.round_at IS NULL OR o.round_at + pg_catalog.make_interval(secs => $1) <= pg_catalog.now() AS again
                  FROM musterd.retention o) a
        RETURNING g.walked_to";
    Ok(client.query_opt(SQL, &[&again_after.as_secs_f64()]).await?.map_or(0, |row| row.get(0)))
}

/// A batch whose rows may go, or are going.
#[derive(Clone, Debug)]
pub struct Due {
    pub id: i64,
    pub uid: Uuid,
    pub generation: i32,
    pub rows: i32,
    /// Its rows were given up in an earlier pass, and are not all deleted.
    pub is_going: bool,
}

/// Batches whose rows may go, in the order of their ids, behind `after`.
pub async fn due(client: &impl GenericClient, after: i64, limit: i32) -> Result<Vec<Due>, Error> {
    const SQL: &str = "SELECT d.id, d.uid, d.generation, d.rows, d.data_gone_at IS NOT NULL
          FROM musterd.due_batches($1, $2) d";
    let read = |row: &Row| Due {
        id: row.get(0),
        uid: row.get(1),
        generation: row.get(2),
        rows: row.get(3),
        is_going: row.get(4),
    };
    Ok(client.query(SQL, &[&after, &limit]).await?.iter().map(read).collect())
}

/// A step of a pass, or that another worker does one just now.
#[derive(Clone, Debug, PartialEq)]
pub enum Step<T> {
    Done(T),
    Busy,
}

async fn begin(client: &mut Client) -> Result<Option<Transaction<'_>>, Error> {
    const LOCK: &str =
        "SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('musterd.prune', 0))";
    let transaction =
        client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    match transaction.query_one(LOCK, &[]).await?.get(0) {
        true => Ok(Some(transaction)),
        false => transaction.rollback().await.map(|()| None),
    }
}

async fn step<T>(
    client: &mut Client,
    sql: &str,
    parameters: &[&(dyn ToSql + Sync)],
    read: impl FnOnce(&Row) -> T,
) -> Result<Step<T>, Error> {
    let Some(transaction) = begin(client).await? else { return Ok(Step::Busy) };
    let done = read(&transaction.query_one(sql, parameters).await?);
    transaction.commit().await?;
    Ok(Step::Done(done))
}

/// Gives the rows of a batch up: from now on they cannot be read or run again. False when they must stay after all.
pub async fn give_up(client: &mut Client, due: &Due, archive: Option<&Json>) -> Result<Step<bool>, Error> {
    let sql = "SELECT musterd.prune_batch($1, $2, $3)";
    step(client, sql, &[&due.id, &due.generation, &archive], |row| row.get(0)).await
}

/// What a bite of rows was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bite {
    /// Where the next one begins; none: nothing is left.
    pub next: Option<i32>,
    pub bytes: i64,
}

/// Deletes a bite of the rows of a batch that were given up.
pub async fn rows(client: &mut Client, batch: i64, from: i32) -> Result<Step<Bite>, Error> {
    let sql = "SELECT p.next, p.bytes FROM musterd.prune_rows($1, $2) p";
    step(client, sql, &[&batch, &from], |row| Bite { next: row.get(0), bytes: row.get(1) }).await
}

/// The output files of a batch went with its rows.
pub async fn outputs_gone(client: &impl GenericClient, batch: i64) -> Result<(), Error> {
    client.query("SELECT musterd.outputs_gone($1)", &[&batch]).await.map(|_| ())
}

/// A page of the walk through all tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Where the next one begins; none: nothing behind it is old enough.
    pub last: Option<i64>,
    pub bodies: i32,
    pub records: i32,
    /// Held for so long that they may have been abandoned.
    pub abandoned: Vec<i64>,
}

/// Empties bodies and deletes records of a page of tasks, and remembers how far the walk is.
pub async fn tasks(client: &mut Client, after: i64, limit: i32) -> Result<Step<Page>, Error> {
    const SQL: &str = "SELECT p.last, p.bodies, p.records, p.abandoned FROM musterd.prune_tasks($1, $2) p";
    const WALKED: &str = "UPDATE musterd.retention SET walked_to = $1";
    let Some(transaction) = begin(client).await? else { return Ok(Step::Busy) };
    let row = transaction.query_one(SQL, &[&after, &limit]).await?;
    let page = Page {
        last: row.get(0),
        bodies: row.get(1),
        records: row.get(2),
        abandoned: row.get::<_, Option<Vec<i64>>>(3).unwrap_or_default(),
    };
    if let Some(last) = page.last {
        transaction.execute(WALKED, &[&last]).await?;
    }
    transaction.commit().await?;
    Ok(Step::Done(page))
}

/// Aborts what is held and was not touched for as long as the policy says; false when it was.
pub async fn abort_abandoned(client: &impl GenericClient, id: i64) -> Result<bool, Error> {
    Ok(client.query_one("SELECT musterd.abort_abandoned($1)", &[&id]).await?.get(0))
}

/// Deletes a page of old events: where the next one begins, and how many they were.
pub async fn events(client: &mut Client, after: i64, limit: i32) -> Result<Step<(Option<i64>, i32)>, Error> {
    let sql = "SELECT p.last, p.events FROM musterd.prune_events($1, $2) p";
    step(client, sql, &[&after, &limit], |row| (row.get(0), row.get(1))).await
}

/// What would go now, of one kind; sizes and numbers are estimates, and no row is counted for them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// `rows`, `records` or `bodies`.
    pub what: String,
    /// Batches, or tasks.
    pub items: i64,
    /// Rows of those batches.
    pub lines: Option<i64>,
    pub bytes: i64,
    /// The end of the oldest.
    pub oldest: Option<jiff::Timestamp>,
}

/// What would go now; with times, as if the policy had these.
pub async fn plan(
    client: &impl GenericClient,
    times: Option<(Duration, Duration)>,
) -> Result<Vec<Planned>, Error> {
    const SQL: &str = "SELECT p.what, p.items, p.lines, p.bytes, p.oldest
          FROM musterd.prune_plan(pg_catalog.make_interval(secs => $1), pg_catalog.make_interval(secs => $2)) p";
    let (data, records) = (times.map(|(data, _)| data.as_secs_f64()), times.map(|(_, r)| r.as_secs_f64()));
    let read = |row: &Row| Planned {
        what: row.get("what"),
        items: row.get("items"),
        lines: row.get("lines"),
        bytes: row.get("bytes"),
        oldest: moment::maybe(row, "oldest"),
    };
    Ok(client.query(SQL, &[&data, &records]).await?.iter().map(read).collect())
}

/// What is known of retention, for `why`.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The rows of ended batches never go; the same of records.
    pub data_is_off: bool,
    pub records_are_off: bool,
    /// Seconds since the latest pass began.
    pub passed: Option<f64>,
    pub trouble: Option<String>,
}

pub async fn standing(client: &impl GenericClient) -> Result<Option<Standing>, Error> {
    const SQL: &str = "SELECT g.data >= interval '9000 years', g.records >= interval '9000 years',
               EXTRACT(EPOCH FROM pg_catalog.now() - g.passed_at)::float8, g.trouble FROM musterd.retention g";
    let row = client.query_opt(SQL, &[]).await?;
    Ok(row.map(|row| Standing {
        data_is_off: row.get(0),
        records_are_off: row.get(1),
        passed: row.get(2),
        trouble: row.get(3),
    }))
}

/// Fails with MU410 when the rows of the batch are gone: asked after they were read, so that a batch whose rows went meanwhile is not
/// taken for an empty one.
pub async fn check_data(client: &impl GenericClient, batch: i64) -> Result<(), Error> {
    client.query("SELECT musterd.data_is_gone($1)", &[&batch]).await.map(|_| ())
}

/// The SQLSTATE of what was there once and went with retention.
pub const GONE: &str = "MU410";
