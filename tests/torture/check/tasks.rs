//! Tasks: every accepted one has ended as its handler said; parents after their children, uncles after what they waited for.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::Value;

use super::super::work::MUST_FAIL;
use super::{Evidence, Figures, Findings};

struct Task {
    command: String,
    state: String,
    attempt: i32,
    error: Option<String>,
    result: Option<Value>,
}

pub(crate) async fn check(
    evidence: &Evidence<'_>,
    findings: &mut Findings,
    figures: &mut Figures,
) -> Result<()> {
    let sql =
        "SELECT t.id, t.command, t.state::text, t.attempt, t.error, t.result FROM musterd.task_records t
                WHERE NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)";
    let task = |row: &tokio_postgres::Row| Task {
        command: row.get(1),
        state: row.get(2),
        attempt: row.get(3),
        error: row.get(4),
        result: row.get(5),
    };
    let rows = evidence.session.query(sql, &[]).await?;
    let tasks: BTreeMap<i64, Task> = rows.iter().map(|row| (row.get(0), task(row))).collect();
    for (id, payload) in &evidence.book.tasks {
        match tasks.get(id) {
            None => findings.lost.push(format!("task {id} is not there: {payload}")),
            Some(task) => ended(*id, payload, task, findings),
        }
    }
    figures.insert("tasks".into(), tasks.len().into());
    figures
        .insert("tasks failed".into(), tasks.values().filter(|task| task.state == "failed").count().into());
    effects(evidence, findings).await?;
    families(evidence, findings, figures).await?;
    uncles(evidence, findings).await
}

fn ended(id: i64, payload: &Value, task: &Task, findings: &mut Findings) {
    let wish = payload["do"].as_str().unwrap_or("ok");
    if wish == "family" || !matches!(task.state.as_str(), "succeeded" | "failed" | "aborted") {
        return;
    }
    // A builtin does as it likes, whatever the payload says.
    let must_fail = task.command != "echo" && MUST_FAIL.contains(&wish);
    let what = || format!("task {id} ({}, {wish}) is {}: {:?}", task.command, task.state, task.error);
    match task.state.as_str() {
        "succeeded" if must_fail => findings.wrong.push(what()),
        "succeeded" => {
            let n = task.result.as_ref().map(|result| &result["n"]);
            if n != Some(&payload["n"]) {
                findings.wrong.push(format!("task {id}: the result {:?} for {payload}", task.result));
            }
        }
        "failed" if must_fail || task.attempt >= 30 => {}
        _ => findings.wrong.push(what()),
    }
}

/// What procedures wrote is there exactly for the tasks that succeeded.
async fn effects(evidence: &Evidence<'_>, findings: &mut Findings) -> Result<()> {
    let twice =
        "SELECT format('the effects of task %s are there %s times', task, count(*)) FROM app.task_effects
                  GROUP BY task HAVING count(*) > 1 LIMIT 20";
    findings
        .double
        .extend(evidence.session.query(twice, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    let differ = "SELECT format('task %s: succeeded %s, effects %s', COALESCE(t.id, e.task), t.id IS NOT NULL, e.task IS NOT NULL)
                    FROM (SELECT id FROM musterd.task_records WHERE command = 'effect' AND state = 'succeeded') t
                    FULL JOIN app.task_effects e ON e.task = t.id WHERE t.id IS NULL OR e.task IS NULL LIMIT 20";
    findings
        .lost
        .extend(evidence.session.query(differ, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    Ok(())
}

async fn families(evidence: &Evidence<'_>, findings: &mut Findings, figures: &mut Figures) -> Result<()> {
    let sql = "SELECT p.id, p.state::text, p.attempt, p.payload, count(c.id),
                      COALESCE(max(c.finished_at) <= p.finished_at, true), count(*) FILTER (WHERE c.state <> 'succeeded'),
                      (SELECT count(*) FROM musterd.task_records u WHERE u.payload ->> 'uncle_of' = p.id::text)
                 FROM musterd.task_records p LEFT JOIN musterd.task_records c ON c.parent_id = p.id
                WHERE p.payload ->> 'do' = 'family' AND musterd.is_final(p.state) GROUP BY p.id";
    let rows = evidence.session.query(sql, &[]).await?;
    figures.insert("families".into(), rows.len().into());
    for row in rows {
        let (id, state, attempt, payload): (i64, String, i32, Value) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        let (children, in_order, failed, uncles): (i64, bool, i64, i64) =
            (row.get(4), row.get(5), row.get(6), row.get(7));
        if children == 0 && attempt >= 30 {
            continue;
        }
        let sibling = payload["sibling"] == true && payload["failing"] != 1;
        let expected = payload["children"].as_i64().unwrap_or(0) + i64::from(sibling);
        if children != expected {
            let what = format!("task {id} has {children} children, {expected} were spawned");
            if children < expected { &mut findings.lost } else { &mut findings.double }.push(what);
        }
        if uncles != 1 {
            findings.double.push(format!("task {id} has {uncles} uncles"));
        }
        if !in_order {
            findings.wrong.push(format!("task {id} has ended before its children"));
        }
        if (state == "failed") != (failed > 0) {
            findings.wrong.push(format!("task {id} is {state}, {failed} of its children failed"));
        }
        let failing = i64::from(payload["failing"].is_number());
        if failed != failing {
            findings
                .wrong
                .push(format!("task {id}: {failed} of its children failed, and {failing} was asked to"));
        }
    }
    Ok(())
}

/// Started after the end of what it waited for. A batch that was redriven has ended more than once.
async fn uncles(evidence: &Evidence<'_>, findings: &mut Findings) -> Result<()> {
    let sql = "SELECT format('task %s started at %s, and %s ended at %s', u.id, u.claimed_at, s.id, s.finished_at)
                 FROM musterd.task_records u JOIN musterd.task_records s ON s.id = (u.payload ->> 'uncle_of')::bigint
                WHERE u.payload ? 'uncle_of' AND u.claimed_at < s.finished_at
                  AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = s.id AND b.generation > 1) LIMIT 20";
    findings.wrong.extend(evidence.session.query(sql, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    Ok(())
}
