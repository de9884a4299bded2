//! `sql` over blocks: a set-returning function of the user's over many rows at once. Its effects and the outcomes commit in
//! one transaction that holds the block's token: exactly once.

use super::{
    Blame, CONFLICT_RETRIES, Loss, Sql, Watched, blame, bystander, code_of, in_its_words, is_conflict,
};
use crate::{
    backoff, error_group,
    handler::{BlockCall, Done, Failed, Outcome, OutcomeSink, Report, protocol},
    json::Json,
    lines::Lines,
    store::{
        flush::{self, BlockWrite, Outcomes},
        pages::InputRow,
        procedures::{self, Condition, End},
        tasks,
    },
};
use std::{
    collections::BTreeMap,
    fmt::Write,
    time::{Duration, Instant},
};
use tokio_postgres::{Error, Row};

/// How long the server's own limit has before ours cuts the connection.
const SERVER_FIRST: Duration = Duration::from_secs(2);

/// What a call of the function came to.
enum Called {
    /// Committed, with what is to be tried again.
    Committed { lines: Lines, succeeded: u64, failed: u64, again: Vec<(i32, Outcome)> },
    /// Rolled back: the block is not held, or some of these lines are not open any more, so that their effects must not be
    /// repeated.
    Refused,
    /// Rolled back on purpose.
    Rehearsed(Vec<(i32, Outcome)>),
}

/// Why a call failed.
enum Failure {
    /// The function's own fault, or that of a row.
    Function(Failed),
    /// Not of any single row: running halves would only fail more often.
    Systemic(Failed),
    /// The connection was lost in the middle. A commit may have been under way.
    Lost(String),
    /// A limit of the server was met: it may be short of something, or the function always asks for too much.
    Limit(String),
    /// The database is away.
    Away(String),
}

/// Connections that calls of one block may lose before the function is taken for what breaks them.
const LOSSES: u32 = 3;

/// Whether the effects are to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Work,
    Rehearsal,
}

impl Sql {
    /// Runs `rows`; a function that fails is run again on halves, down to the row.
    pub(super) async fn run_block(&self, call: &BlockCall<'_>, rows: &[InputRow<'_>], sink: &OutcomeSink) {
        let mut pieces = vec![rows.iter().collect::<Vec<_>>()];
        let (mut outages, mut losses, mut limits) = (0, 0, 0);
        while let Some(piece) = pieces.pop() {
            if piece.is_empty() {
                continue;
            }
            let called = self.attempt_block(call, &piece).await.map_err(|failure| match failure {
                Failure::Lost(error) => {
                    losses += 1;
                    if losses > LOSSES { Failure::Function(error.into()) } else { Failure::Away(error) }
                }
                Failure::Limit(error) => {
                    limits += 1;
                    if limits > blame::PATIENCE {
                        Failure::Function(error.into())
                    } else {
                        Failure::Away(error)
                    }
                }
                other => other,
            });
            match called {
                Ok(Called::Committed { lines, succeeded, failed, again }) => {
                    sink.report(Report::Committed { lines, succeeded, failed });
                    again.into_iter().for_each(|(line, outcome)| sink.row(line, outcome));
                }
                Ok(Called::Rehearsed(rows)) => {
                    rows.into_iter().for_each(|(line, outcome)| sink.row(line, outcome))
                }
                Ok(Called::Refused) => match self.still_open(call, piece, sink).await {
                    Some(open) => pieces.push(open),
                    None => return sink.report(Report::NotHeld),
                },
                Err(Failure::Function(_)) if piece.len() > 1 => {
                    let other = piece[piece.len() / 2..].to_vec();
                    let one = piece[..piece.len() / 2].to_vec();
                    pieces.extend([other, one]);
                }
                Err(Failure::Function(error) | Failure::Systemic(error)) => {
                    sink.rows(piece, &Outcome::Retry { error, after: None });
                }
                // No fault of a row: no try is charged, and what may have been committed is looked up first.
                Err(Failure::Away(error) | Failure::Lost(error) | Failure::Limit(error)) => {
                    outages += 1;
                    tracing::warn!(command = call.command, error, "the database is away; trying again");
                    tokio::time::sleep(backoff::of_database(outages)).await;
                    match self.still_open(call, piece, sink).await {
                        Some(open) => pieces.push(open),
                        None => return sink.report(Report::NotHeld),
                    }
                }
            }
        }
    }

    /// The rows of `piece` whose lines are still open in the block; the others were committed by a call whose reply was
    /// lost. `None`: the block is not held any more.
    async fn still_open<'r>(
        &self,
        call: &BlockCall<'_>,
        mut piece: Vec<&'r InputRow<'r>>,
        sink: &OutcomeSink,
    ) -> Option<Vec<&'r InputRow<'r>>> {
        let mut tries = 0;
        let open = loop {
            let found = match self.database.connection().await {
                Ok(client) => flush::open_lines(&client, call.block).await.map_err(|e| in_its_words(&e)),
                Err(error) => Err(error.to_string()),
            };
            match found {
                Ok(open) => break open?,
                Err(_) => {
                    tries += 1;
                    tokio::time::sleep(backoff::of_database(tries)).await;
                }
            }
        };
        let done: Lines = piece.iter().map(|row| row.line).filter(|line| !open.contains(*line)).collect();
        piece.retain(|row| open.contains(row.line));
        if !done.is_empty() {
            // Counted when it was written, by a call whose reply was lost; only the metrics of this worker miss it.
            sink.report(Report::Committed { lines: done, succeeded: 0, failed: 0 });
        }
        Some(piece)
    }

    async fn attempt_block(&self, call: &BlockCall<'_>, rows: &[&InputRow<'_>]) -> Result<Called, Failure> {
        let purpose = if self.rehearsal { Purpose::Rehearsal } else { Purpose::Work };
        for conflict in 1.. {
            let opened = self.database.session().await;
            let (session, bystander) = opened.map_err(|error| Failure::Away(error.to_string()))?;
            let transaction = self.transact_block(session.client(), call, rows, purpose);
            match tokio::time::timeout(call.timeout.saturating_add(SERVER_FIRST), transaction).await {
                Ok(Ok((called, condition))) => {
                    session.finish(condition);
                    return Ok(called);
                }
                Ok(Err(error)) if is_conflict(&error) && conflict <= CONFLICT_RETRIES => {
                    session.discard(&error);
                    let (base, max) = (Duration::from_millis(20), Duration::from_millis(200));
                    tokio::time::sleep(backoff::delay(base, max, conflict)).await;
                }
                Ok(Err(error)) => {
                    let ending = session.ending();
                    session.discard(&error);
                    return Err(match sort(&error) {
                        Failure::Lost(error)
                            if bystander::loss(&ending, bystander.as_deref()).await == Loss::Elsewhere =>
                        {
                            Failure::Away(error)
                        }
                        failure => failure,
                    });
                }
                Err(_) => {
                    let limit = humantime::format_duration(call.timeout);
                    return Err(Failure::Function(format!("ran longer than its timeout of {limit}").into()));
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    async fn transact_block(
        &self,
        client: &Watched,
        call: &BlockCall<'_>,
        rows: &[&InputRow<'_>],
        purpose: Purpose,
    ) -> Result<(Called, Condition), Error> {
        let began = Instant::now();
        let given = Json::from_text(given(rows, call.attempt));
        client.batch_execute(&self.begin(call.timeout)).await?;
        // Only described, never run.
        let all = client.prepare_cached(&self.select).await?;
        let select = client.prepare_cached(&procedures::outcomes_read(&self.select, all.columns())).await?;
        let answered = client.query(&select, &[&call.block.batch, call.context, &given]).await?;
        let (outcomes, left) = protocol::assign(rows.iter().map(|row| row.line), read(&answered));
        if !left.is_none() {
            tracing::warn!(
                command = call.command,
                batch = call.block.batch,
                ?left,
                "the function does not answer what was asked"
            );
        }
        if purpose == Purpose::Rehearsal {
            let condition = procedures::end(client, End::Rollback).await?;
            return Ok((Called::Rehearsed(outcomes), condition));
        }
        client.batch_execute(tasks::AS_OURSELVES).await?;
        let (mut outcomes, again) = part(outcomes);
        outcomes.ran(began, began.elapsed());
        let (succeeded, failed) = (outcomes.succeeded() as u64, outcomes.failed() as u64);
        let lines = outcomes.done();
        let write = BlockWrite { block: call.block, part: call.parts.next(), outcomes, close: None };
        if !flush::write_within(client, write).await? {
            // Our effects vanish.
            return Ok((Called::Refused, procedures::end(client, End::Rollback).await?));
        }
        crate::failpoint!("sql.block.before_commit", client);
        let condition = procedures::end(client, End::Commit).await?;
        crate::failpoint!("sql.block.committed", client);
        Ok((Called::Committed { lines, succeeded, failed, again }, condition))
    }
}

/// The rows as the function gets them: their inputs go in as they are.
fn given(rows: &[&InputRow<'_>], attempt: i32) -> String {
    let mut text = String::with_capacity(rows.iter().map(|row| row.input.len() + 50).sum());
    text.push('[');
    for (index, InputRow { line, input }) in rows.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // Writing into a string cannot fail.
        let _ = write!(text, "{comma}{{\"line\":{line},\"input\":{input},\"attempt\":{attempt}}}");
    }
    text.push(']');
    text
}

fn read(rows: &[Row]) -> protocol::RowsReply {
    let mut reply = protocol::RowsReply::default();
    for row in rows {
        let line: Option<i32> = row.get(0);
        let outcome =
            outcome(row).unwrap_or_else(|error| Outcome::Retry { error: error.into(), after: None });
        match line {
            Some(line) => reply.rows.push((line, outcome)),
            None => reply.unreadable += 1,
        }
    }
    reply
}

/// What the function says of one row; the error is what is wrong with that.
fn outcome(row: &Row) -> Result<Outcome, String> {
    let outputs = outputs(row.get(5))?;
    let code: Option<String> = row.get(4);
    code.as_deref().map_or(Ok(()), error_group::check_code)?;
    let failed = || Failed {
        error: row.get::<_, Option<String>>(3).unwrap_or_else(|| "the function gave no reason".to_owned()),
        code: code.clone(),
        result: row.get(2),
        outputs: outputs.clone(),
    };
    match row.get::<_, Option<&str>>(1) {
        Some("succeeded") => {
            Ok(Outcome::Succeeded(Done { result: row.get(2), outputs: outputs.clone(), ..Done::default() }))
        }
        Some("failed") => Ok(Outcome::Failed(failed())),
        Some("retry") => Ok(Outcome::Retry { error: failed(), after: None }),
        other => {
            Err(format!("the function returned {other:?} as outcome; it must be succeeded, failed or retry"))
        }
    }
}

fn outputs(given: Option<Json>) -> Result<Vec<(String, String)>, String> {
    let Some(given) = given.filter(|given| given.text() != "null") else { return Ok(Vec::new()) };
    let by_name: BTreeMap<String, String> = serde_json::from_str(given.text()).map_err(|_| {
        "the function returned outputs that are no JSON object of texts by file name".to_owned()
    })?;
    Ok(by_name.into_iter().collect())
}

/// What is written with the effects, and what is tried again.
fn part(outcomes: Vec<(i32, Outcome)>) -> (Outcomes, Vec<(i32, Outcome)>) {
    let (mut written, mut again) = (Outcomes::default(), Vec::new());
    for (line, outcome) in outcomes {
        match outcome {
            Outcome::Succeeded(done) => match done.stored() {
                Ok(stored) => written.succeed(line, stored.result, stored.outputs),
                Err(problem) => written.fail(line, problem),
            },
            Outcome::Failed(failed) => written.add_failure(failed.stored(line)),
            retry @ Outcome::Retry { .. } => again.push((line, retry)),
        }
    }
    (written, again)
}

/// Inside a user's function everything but a lost database is the function's own failure.
fn sort(error: &Error) -> Failure {
    let Some(state) = error.code().map(|state| state.code()) else {
        return Failure::Lost(in_its_words(error));
    };
    let failed = || Failed { code: code_of(error), ..in_its_words(error).into() };
    match (blame::of(state), state.get(..2).unwrap_or_default()) {
        // The session is gone, and the function may be what ended it.
        (Blame::Server, "08" | "57") => Failure::Lost(in_its_words(error)),
        (Blame::Server, _) => Failure::Away(in_its_words(error)),
        (Blame::Limit, _) => Failure::Limit(in_its_words(error)),
        // No such function, no right to it, a statement of it that is wrong whatever the rows are.
        (Blame::Procedure, "42" | "3F") => Failure::Systemic(failed()),
        (Blame::Procedure, _) => Failure::Function(failed()),
    }
}
