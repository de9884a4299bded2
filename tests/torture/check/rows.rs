//! Batches and their rows: every accepted row has one outcome, the right one, and every count is that of a recount.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use futures::TryStreamExt;
use musterd::handler::builtin::place;

use super::super::load::Accepted;
use super::super::work::MUST_FAIL;
use super::{Evidence, Figures, Findings};

/// As the load submits them, and as the configuration of the replicas has it.
const MAX_ATTEMPTS: i32 = 30;
const RATE: f64 = 0.1;

struct Counted {
    rows: i64,
    recorded: i64,
    succeeded: i64,
    failed: i64,
    /// Rows that rows have appended, and rows that appended one.
    grown: i64,
    appenders: i64,
}

pub(crate) async fn check(
    evidence: &Evidence<'_>,
    findings: &mut Findings,
    figures: &mut Figures,
) -> Result<()> {
    let ends = ends(evidence).await?;
    let counted = rows(evidence, &ends, findings).await?;
    for (id, accepted) in &evidence.book.batches {
        match (ends.get(id), counted.get(id)) {
            (None, _) => findings.lost.push(format!("batch {id} ({}) is not there", accepted.command)),
            (Some(end), counted) => batch(*id, accepted, end, counted, findings),
        }
    }
    notified(evidence, &ends, findings).await?;
    effects(evidence, findings).await?;
    let rows: i64 = counted.values().map(|counted| counted.rows).sum();
    let failed: i64 = counted.values().map(|counted| counted.failed).sum();
    figures.insert("batches".into(), evidence.book.batches.len().into());
    figures.insert("rows".into(), rows.into());
    figures.insert("rows failed".into(), failed.into());
    let of = |state: &str| ends.values().filter(|end| end.state == state).count();
    figures.insert("batches aborted".into(), of("aborted").into());
    figures.insert("batches redriven".into(), ends.values().filter(|end| end.generation > 1).count().into());
    Ok(())
}

struct End {
    state: String,
    rows: i64,
    succeeded: i64,
    failed: i64,
    aborted: i64,
    generation: i32,
    on_done: bool,
}

async fn ends(evidence: &Evidence<'_>) -> Result<BTreeMap<i64, End>> {
    let sql = "SELECT b.id, t.state::text, b.rows::bigint, b.succeeded::bigint, b.failed::bigint, b.aborted::bigint, b.generation,
                      b.on_done IS NOT NULL
                 FROM musterd.batches b JOIN musterd.task_records t USING (id) WHERE b.summarized_at IS NOT NULL";
    let end = |row: &tokio_postgres::Row| End {
        state: row.get(1),
        rows: row.get(2),
        succeeded: row.get(3),
        failed: row.get(4),
        aborted: row.get(5),
        generation: row.get(6),
        on_done: row.get(7),
    };
    Ok(evidence.session.query(sql, &[]).await?.iter().map(|row| (row.get(0), end(row))).collect())
}

/// Looks at every row, and counts.
async fn rows(
    evidence: &Evidence<'_>,
    ends: &BTreeMap<i64, End>,
    findings: &mut Findings,
) -> Result<BTreeMap<i64, Counted>> {
    let sql = "SELECT r.batch_id, r.line, COALESCE(r.input ->> 'do', 'ok'), r.input ->> 'n', r.input ? 'from', s.state::text,
                      s.result ->> 'n', s.error, s.attempt
                 FROM musterd.rows r LEFT JOIN musterd.results s USING (batch_id, line)";
    let none: [&str; 0] = [];
    let stream = evidence.session.query_raw(sql, none).await?;
    tokio::pin!(stream);
    let mut all: BTreeMap<i64, Counted> = BTreeMap::new();
    while let Some(row) = stream.try_next().await? {
        let (batch, line): (i64, i32) = (row.get(0), row.get(1));
        let (wish, input): (String, Option<String>) = (row.get(2), row.get(3));
        let (state, result, error): (Option<String>, Option<String>, Option<String>) =
            (row.get(5), row.get(6), row.get(7));
        let counted = all.entry(batch).or_insert(Counted {
            rows: 0,
            recorded: 0,
            succeeded: 0,
            failed: 0,
            grown: 0,
            appenders: 0,
        });
        counted.rows += 1;
        counted.grown += i64::from(row.get::<_, bool>(4));
        let Some(accepted) = evidence.book.batches.get(&batch) else { continue };
        let where_ = format!("row {line} of batch {batch} ({}, {wish})", accepted.command);
        match state.as_deref() {
            None => {
                // In a batch that is stuck this is said already.
                if ends.get(&batch).is_some_and(|end| end.state != "aborted") {
                    findings.lost.push(format!("{where_} has no outcome"));
                }
                continue;
            }
            Some("succeeded") => {
                counted.succeeded += 1;
                counted.appenders += i64::from(wish == "append");
                if must_fail(accepted, batch, line, &wish) {
                    findings.wrong.push(format!("{where_} has succeeded"));
                }
                let has_result = !matches!(accepted.command, "panics" | "kills");
                if has_result && result != input {
                    findings
                        .wrong
                        .push(format!("{where_}: the result of {result:?} for the input {input:?}"));
                }
            }
            Some(_) => {
                counted.failed += 1;
                let error = error.unwrap_or_default();
                let used_up = row.get::<_, i32>(8) >= MAX_ATTEMPTS;
                // A row that would append to a batch which is being aborted fails and says so.
                let stopped = wish == "append" && (accepted.aborted || accepted.budget);
                if !must_fail(accepted, batch, line, &wish) && !used_up && !stopped {
                    findings.wrong.push(format!("{where_} has failed: {error}"));
                }
            }
        }
        counted.recorded += 1;
    }
    Ok(all)
}

fn must_fail(accepted: &Accepted, batch: i64, line: i32, wish: &str) -> bool {
    match accepted.command {
        "panics" | "kills" => place(batch, i64::from(line)) < RATE,
        "score" => matches!(wish, "fail" | "raise"),
        "echo" => false,
        _ => MUST_FAIL.contains(&wish),
    }
}

fn batch(id: i64, accepted: &Accepted, end: &End, counted: Option<&Counted>, findings: &mut Findings) {
    let none = Counted { rows: 0, recorded: 0, succeeded: 0, failed: 0, grown: 0, appenders: 0 };
    let counted = counted.unwrap_or(&none);
    let expected = accepted.rows + accepted.appended + counted.grown;
    if counted.rows != expected || end.rows != expected {
        let what = format!(
            "batch {id}: {expected} rows were accepted, {} are there, {} are counted",
            counted.rows, end.rows
        );
        if counted.rows < expected { &mut findings.lost } else { &mut findings.double }.push(what);
    }
    if counted.grown != counted.appenders {
        findings.double.push(format!(
            "batch {id}: {} rows appended one each, {} are there",
            counted.appenders, counted.grown
        ));
    }
    if (end.succeeded, end.failed, end.aborted)
        != (counted.succeeded, counted.failed, counted.rows - counted.succeeded - counted.failed)
    {
        findings.wrong.push(format!(
            "batch {id} says {} succeeded, {} failed, {} aborted; recounted: {} and {} of {}",
            end.succeeded, end.failed, end.aborted, counted.succeeded, counted.failed, counted.rows
        ));
    }
    if end.state != "aborted" && end.aborted > 0 {
        findings.lost.push(format!("batch {id} is {} with {} aborted rows", end.state, end.aborted));
    }
    if end.state == "aborted" && !accepted.aborted && !accepted.budget {
        findings.wrong.push(format!("batch {id} is aborted, and no operator asked for it"));
    }
}

/// One `on_done` task for each end.
async fn notified(evidence: &Evidence<'_>, ends: &BTreeMap<i64, End>, findings: &mut Findings) -> Result<()> {
    let sql = "SELECT b.id, count(*)
                 FROM musterd.task_records t JOIN musterd.task_records b ON b.id = (t.payload ->> 'batch_id')::bigint
                WHERE t.command = 'notify' GROUP BY 1";
    let notified: BTreeMap<i64, i64> =
        evidence.session.query(sql, &[]).await?.iter().map(|row| (row.get(0), row.get(1))).collect();
    for (id, end) in ends.iter().filter(|(_, end)| end.on_done) {
        let (count, expected) = (notified.get(id).copied().unwrap_or(0), i64::from(end.generation));
        if count != expected {
            let what =
                format!("batch {id} has ended {expected} times, and there are {count} tasks that say so");
            if count < expected { &mut findings.lost } else { &mut findings.double }.push(what);
        }
    }
    let unasked: BTreeSet<&i64> =
        notified.keys().filter(|id| !ends.get(id).is_some_and(|end| end.on_done)).collect();
    if !unasked.is_empty() {
        findings.double.push(format!("tasks for the end of batches that have not ended: {unasked:?}"));
    }
    Ok(())
}

/// What `sql` functions wrote is there exactly for the rows that succeeded.
async fn effects(evidence: &Evidence<'_>, findings: &mut Findings) -> Result<()> {
    let twice = "SELECT format('the effects of row %s of batch %s are there %s times', line, batch, count(*))
                   FROM app.row_effects GROUP BY batch, line HAVING count(*) > 1 LIMIT 20";
    findings
        .double
        .extend(evidence.session.query(twice, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    let differ = "SELECT format('row %s of batch %s: succeeded %s, effects %s', COALESCE(r.line, e.line), COALESCE(r.batch_id, e.batch),
                                r.line IS NOT NULL, e.line IS NOT NULL)
                    FROM (SELECT s.batch_id, s.line FROM musterd.results s JOIN musterd.batches b ON b.id = s.batch_id
                           WHERE b.command = 'score' AND s.state = 'succeeded') r
                    FULL JOIN app.row_effects e ON e.batch = r.batch_id AND e.line = r.line
                   WHERE r.line IS NULL OR e.line IS NULL LIMIT 20";
    findings
        .lost
        .extend(evidence.session.query(differ, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    Ok(())
}
