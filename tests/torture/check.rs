//! The checker: when all is well again, what the database, the ledger, the book and the files say must agree.
//!
//! Whatever it finds is put under one of five words; a run is green when all are empty.

pub(crate) mod files;
pub(crate) mod leaks;
pub(crate) mod rows;
pub(crate) mod runs;
pub(crate) mod tasks;
pub(crate) mod times;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use tokio::time::Instant;

use super::faults::Fault;
use super::ledger::Run;
use super::load::Book;
use super::postgres::{Cluster, Session};
use super::world::World;

/// What was promised and is not so.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Findings {
    /// Accepted, and not accounted for; or ended without having run.
    pub(crate) lost: Vec<String>,
    /// Run again without a fault that says why, or after its end.
    pub(crate) unexplained: Vec<String>,
    /// Ended, recorded or done twice.
    pub(crate) double: Vec<String>,
    /// Does not end.
    pub(crate) stuck: Vec<String>,
    /// Ended otherwise than it must; or left behind.
    pub(crate) wrong: Vec<String>,
}

impl Findings {
    pub(crate) fn is_clean(&self) -> bool {
        self.all().iter().all(|(_, found)| found.is_empty())
    }

    pub(crate) fn all(&self) -> [(&'static str, &Vec<String>); 5] {
        [
            ("lost", &self.lost),
            ("unexplained", &self.unexplained),
            ("double", &self.double),
            ("stuck", &self.stuck),
            ("wrong", &self.wrong),
        ]
    }
}

/// Figures, in the order in which they are shown.
pub(crate) type Figures = BTreeMap<String, serde_json::Value>;

pub(crate) struct Evidence<'a> {
    pub(crate) world: &'a World,
    pub(crate) session: &'a Session,
    pub(crate) book: &'a Book,
    pub(crate) faults: &'a [Fault],
    pub(crate) runs: &'a [Run],
    /// Whose failure or result an operator undid: tasks that were retried.
    pub(crate) retried: std::collections::BTreeSet<i64>,
}

/// Nothing changes for as long: stuck. Longer than any timer here, backoff, sweep or rest; the sweep gives a task without a ticket
/// a minute.
const STUCK_AFTER: Duration = Duration::from_secs(90);

/// What is still open, as a text that changes as long as there is progress; empty when all has ended.
async fn what_is_open(session: &Session) -> Result<String> {
    // A batch that was stopped by its budget waits for an operator.
    session
        .batch_execute(
            "SELECT musterd.release(b.id) FROM musterd.batches b WHERE NOT b.open AND NOT b.aborting AND b.summarized_at IS NULL;
             SELECT musterd.resume_queue(q.name) FROM musterd.queues q WHERE q.paused",
        )
        .await?;
    let sql = "SELECT (SELECT count(*) FROM musterd.batches WHERE summarized_at IS NULL),
                      (SELECT count(*) FROM musterd.task_records WHERE NOT musterd.is_final(state)),
                      (SELECT count(*) FROM musterd.blocks),
                      (SELECT count(*) FROM musterd.task_claims),
                      (SELECT COALESCE(sum(succeeded + failed), 0)::bigint FROM musterd.outcomes)";
    let row = session.query_one(sql, &[]).await?;
    let counts: Vec<i64> = (0..5).map(|place| row.get(place)).collect();
    let over = counts[..4].iter().all(|count| *count == 0);
    Ok(if over { String::new() } else { format!("{counts:?}") })
}

/// Waits until everything has ended, or nothing moves any more. How long that took.
pub(crate) async fn drain(world: &World, findings: &mut Findings) -> Result<f64> {
    let began = Instant::now();
    let (mut last, mut since) = (String::new(), Instant::now());
    loop {
        let session = world.admin().await?;
        let open = what_is_open(&session).await?;
        if open.is_empty() {
            return Ok(began.elapsed().as_secs_f64());
        }
        if open != last {
            (last, since) = (open, Instant::now());
        }
        if since.elapsed() > STUCK_AFTER {
            name_what_is_stuck(&session, findings).await?;
            return Ok(began.elapsed().as_secs_f64());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn name_what_is_stuck(session: &Session, findings: &mut Findings) -> Result<()> {
    let questions = [
        "SELECT format('batch %s (%s): open %s, aborting %s, %s of %s lines carved, audit %s', b.id, b.command, b.open, b.aborting,
                       b.next_line - 1, b.rows, (SELECT a FROM musterd.audit(b.id) a))
           FROM musterd.batches b WHERE b.summarized_at IS NULL LIMIT 20",
        "SELECT format('block of batch %s (%s): %s lines, worker %s, attempt %s, crashes %s, due %s', b.batch_id, b.command, b.rows,
                       b.worker, b.attempt, b.crashes, b.available_at) FROM musterd.blocks b LIMIT 20",
        "SELECT format('task %s (%s): %s, attempt %s, due %s, parent %s, ticket %s, tickets %s, claims %s, %s', t.id, t.command, t.state,
                       t.attempt, t.run_at, t.parent_id, t.ticket,
                       (SELECT count(*) FROM musterd.task_tickets k WHERE k.tasks @> t.id AND k.number = t.ticket),
                       (SELECT count(*) FROM musterd.task_claims k WHERE k.tasks @> t.id AND k.number = t.ticket), t.error)
           FROM musterd.task_records t WHERE NOT musterd.is_final(t.state)
            AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id) LIMIT 20",
        "SELECT format('claim of %s tasks (%s) by %s', k.open, k.command, k.worker) FROM musterd.task_claims k LIMIT 20",
    ];
    for question in questions {
        let rows = session.query(question, &[]).await?;
        findings.stuck.extend(rows.iter().map(|row| row.get::<_, String>(0)));
    }
    Ok(())
}

/// Everything that can be checked while the replicas still run.
pub(crate) async fn everything(evidence: &Evidence<'_>, findings: &mut Findings) -> Result<Figures> {
    let mut figures = Figures::new();
    rows::check(evidence, findings, &mut figures).await?;
    tasks::check(evidence, findings, &mut figures).await?;
    runs::check(evidence, findings, &mut figures);
    files::check(evidence, findings, &mut figures).await?;
    times::measure(evidence, &mut figures).await?;
    ends(evidence, findings).await?;
    let deadlocks = server_log("deadlock detected");
    figures.insert("deadlocks".into(), deadlocks.into());
    if deadlocks > 0 {
        findings.wrong.push(format!("{deadlocks} deadlocks: see the log of PostgreSQL"));
    }
    let refused = server_log("guard:") + server_log("no_line_");
    figures.insert("refused by the guard".into(), refused.into());
    if refused > 0 {
        findings
            .double
            .push(format!("{refused} writes were refused by the guard: see the log of PostgreSQL"));
    }
    Ok(figures)
}

/// What the audit triggers saw. A failed task that an operator retried, and a batch that was redriven, begin once more.
async fn ends(evidence: &Evidence<'_>, findings: &mut Findings) -> Result<()> {
    for row in evidence.session.query("SELECT what FROM public.violations", &[]).await? {
        let what: String = row.get(0);
        let id = what.split_once(": (").and_then(|(_, rest)| rest.split(',').next()?.parse::<i64>().ok());
        if !id.is_some_and(|id| what.contains("task_records") && evidence.retried.contains(&id)) {
            findings
                .double
                .push(format!("changed after its end: {}", what.chars().take(200).collect::<String>()));
        }
    }
    Ok(())
}

/// How many lines of the servers' logs have these words.
fn server_log(words: &str) -> u64 {
    let mut count = 0;
    for entry in std::fs::read_dir(Cluster::logs()).into_iter().flatten().flatten() {
        let log = std::fs::read(entry.path()).unwrap_or_default();
        count += String::from_utf8_lossy(&log).lines().filter(|line| line.contains(words)).count() as u64;
    }
    count
}
