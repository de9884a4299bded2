//! Rows through a pipe: written ahead, answered in order, and judged one by one.

use super::{Blame, Exec, Lease, Loss, Outage, Trouble};
use crate::{
    handler::{BlockCall, Outcome, OutcomeSink, Report, protocol},
    store::pages::InputRow,
};
use futures::FutureExt;

/// A row to be piped.
struct Request {
    line: i32,
    text: String,
    key: String,
}

/// What became of rows that were piped through one process.
enum Piped<'a> {
    /// These are left, for the next process.
    Left(&'a [Request]),
    /// The process died before it had answered anything: with its first row, or of itself.
    DiedSilently(Loss, Blame),
}

impl Exec {
    /// Runs rows until all have an outcome, with as many processes as that takes, or until the program does not work.
    pub(super) async fn run(&self, call: &BlockCall<'_>, rows: &[InputRow<'_>], sink: &OutcomeSink) {
        let lines = match protocol::RowLines::new(call) {
            Ok(lines) => lines,
            Err(error) => {
                return sink.rows(
                    rows,
                    &Outcome::Failed(format!("the batch's context is not JSON: {error}").into()),
                );
            }
        };
        let request =
            |row: &InputRow<'_>| Request { line: row.line, text: lines.line(row), key: lines.key(row.line) };
        let requests: Vec<Request> = rows.iter().map(request).collect();
        let mut rest = requests.as_slice();
        // The row that a process died with before it had answered anything. It is charged when a later process has shown
        // that the program works.
        let mut aside: Option<(i32, String)> = None;
        while let [first, behind @ ..] = rest {
            let mut lease = match self.pool.lease().await {
                Ok(lease) => lease,
                Err(outage) => return self.is_out(outage, sink),
            };
            match self.pipe(&mut lease, call, rest, sink).await {
                Piped::Left(left) => rest = left,
                Piped::DiedSilently(loss, Blame::Request) => {
                    sink.row(first.line, Outcome::Retry { error: loss.ending.error().into(), after: None });
                    rest = behind;
                }
                Piped::DiedSilently(loss, Blame::Program) => {
                    if aside.is_some() || !loss.had_read || behind.is_empty() {
                        let outage = self.pool.outage(&loss.ending.reason, loss.ending.error());
                        return self.is_out(outage, sink);
                    }
                    aside = Some((first.line, loss.ending.error()));
                    rest = behind;
                    continue;
                }
            }
            if let Some((line, error)) = aside.take() {
                sink.row(line, Outcome::Retry { error: error.into(), after: None });
            }
        }
    }

    /// What has no outcome yet goes back.
    fn is_out(&self, outage: Outage, sink: &OutcomeSink) {
        sink.report(Report::Unavailable { error: outage.error, after: outage.after });
    }

    /// Pipes rows through one process, as many as it may still be given.
    async fn pipe<'a>(
        &self,
        lease: &mut Lease,
        call: &BlockCall<'_>,
        rows: &'a [Request],
        sink: &OutcomeSink,
    ) -> Piped<'a> {
        let given = &rows[..rows.len().min(lease.left())];
        let (answered, trouble) = self.converse(lease, call, given, sink).await;
        let (Some(trouble), Some(request)) = (trouble, given.get(answered)) else {
            lease.is_clean();
            return Piped::Left(&rows[given.len()..]);
        };
        let loss = lease.replace(trouble).await;
        let (batch, line, error) = (call.block.batch, request.line, loss.ending.error());
        self.tap.saw(|| (request.text.clone(), error.clone()));
        tracing::warn!(
            handler = self.name,
            batch,
            line,
            reason = loss.ending.reason,
            "a process was replaced"
        );
        self.quote(&loss);
        if loss.silent {
            let blame = self.pool.judge((batch, Some(line)), &loss);
            return Piped::DiedSilently(loss, blame);
        }
        sink.row(line, Outcome::Retry { error: error.into(), after: None });
        Piped::Left(&rows[answered + 1..])
    }

    /// Writes and reads at the same time: a program that answers before it has read everything must not block on us. How
    /// many rows were answered, and what came in the way of the next.
    async fn converse(
        &self,
        lease: &mut Lease,
        call: &BlockCall<'_>,
        rows: &[Request],
        sink: &OutcomeSink,
    ) -> (usize, Option<Trouble>) {
        let mut input = Vec::with_capacity(rows.iter().map(|row| row.text.len() + 1).sum());
        for row in rows {
            input.extend_from_slice(row.text.as_bytes());
            input.push(b'\n');
        }
        let (mut writer, mut reader) = lease.ends(rows.len());
        let mut writing = std::pin::pin!(writer.write(&input).fuse());
        for (at, row) in rows.iter().enumerate() {
            reader.begins(call.block.batch, Some(row.line));
            let reply = async {
                let mut reading = std::pin::pin!(reader.line());
                loop {
                    tokio::select! {
                        biased;
                        reply = &mut reading => return reply,
                        // A program that does not read any more will end or be late; its replies are what counts.
                        () = &mut writing => {}
                    }
                }
            };
            let bytes = match tokio::time::timeout(call.timeout, reply).await {
                Ok(Ok(bytes)) => bytes,
                Ok(Err(trouble)) => return (at, Some(trouble)),
                Err(_) => return (at, Some(Trouble::Late(call.timeout))),
            };
            match heard(row, &bytes) {
                Ok((outcome, is_named)) if reader.accepts(is_named) => sink.row(row.line, outcome),
                other => {
                    // The reply to another row, or to none.
                    if protocol::has_outcome(&bytes) {
                        self.pool.wrote_too_much(call.block.batch);
                    }
                    let noise = || Trouble::Noise(protocol::quote(&bytes));
                    return (at, Some(other.err().unwrap_or_else(noise)));
                }
            }
            self.tap.saw(|| (row.text.clone(), String::from_utf8_lossy(&bytes).into_owned()));
        }
        (rows.len(), None)
    }
}

/// The outcome in a reply to a row, and whether it names the row by its key. A reply to anything else means that program and
/// we have lost each other.
fn heard(row: &Request, bytes: &[u8]) -> Result<(Outcome, bool), Trouble> {
    let noise = |error: protocol::BadReply| Trouble::Noise(error.to_string());
    let (answered, outcome) = protocol::read_row(bytes).map_err(noise)?;
    if answered != row.line {
        return Err(Trouble::Noise(format!(
            "it answered line {answered} when it was asked for {}",
            row.line
        )));
    }
    let is_named = protocol::names_request(bytes, &row.key, None).map_err(noise)?;
    Ok((outcome, is_named))
}
