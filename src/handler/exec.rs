//! `exec` handlers: a pool of long-lived programs, one JSON object per line on stdin and stdout. At least once.
//!
//! The rows of a block are written ahead and answered in order. A row that crashes, outlasts its time or is answered with
//! noise is a failed try of that row alone: the process is replaced, and the rows behind it, which had not begun as far as
//! anybody can know, go to the next one with no try charged.

mod pool;
mod process;
mod stderr;
pub mod watch;

use super::{
    BlockCall, Config, Handler, Intake, Outcome, OutcomeSink, RowCall, TaskCall, TaskOutcome, protocol,
    tap::Tap,
};
use crate::{config::Problems, store::pages::InputRow};
use futures::{FutureExt, future::BoxFuture};
use pool::Pool;
use process::{Lease, Trouble};
use std::{num::NonZeroUsize, time::Duration};

/// Rows written ahead, unless the configuration says otherwise.
const BLOCK_SIZE: usize = 500;
/// What a program gets of our environment unless told otherwise: enough to be found and to speak its user's language.
const ENVIRONMENT: [&str; 6] = ["PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR"];
const MAX_REPLY_BYTES: usize = 16 << 20;

/// Runs one program.
#[derive(Debug)]
pub struct Exec {
    name: String,
    pool: Pool,
    block_size: NonZeroUsize,
    tap: Tap,
}

impl Exec {
    /// `fibers` of its queue: more processes than that could never be busy.
    pub(super) fn new(name: &str, config: &Config, fibers: u32, tap: Tap) -> Self {
        let most = config.processes.map_or(fibers, |given| given.get()) as usize;
        let program = process::Program::new(name, config);
        Self {
            name: name.to_owned(),
            pool: Pool::new(program, most),
            block_size: config.block_size.or(NonZeroUsize::new(BLOCK_SIZE)).unwrap_or(NonZeroUsize::MIN),
            tap,
        }
    }

    /// Runs rows until all have an outcome, with as many processes as that takes.
    async fn run(&self, call: &BlockCall<'_>, rows: &[InputRow<'_>], sink: &OutcomeSink) {
        let requests = match protocol::RowLines::new(call) {
            Ok(requests) => requests,
            Err(error) => {
                return sink
                    .rows(rows, &Outcome::Failed(format!("the batch's context is not JSON: {error}")));
            }
        };
        let lines: Vec<(i32, String)> = rows.iter().map(|row| (row.line, requests.line(row))).collect();
        let mut rest = lines.as_slice();
        while !rest.is_empty() {
            let mut lease = match self.pool.lease().await {
                Ok(lease) => lease,
                Err(error) => {
                    let outcome = Outcome::Retry { error, after: None };
                    return rest.iter().for_each(|(line, _)| sink.row(*line, outcome.clone()));
                }
            };
            rest = self.pipe(&mut lease, call, rest, sink).await;
        }
    }

    /// Pipes `rows` through one process; what it did not come to is returned.
    async fn pipe<'a>(
        &self,
        lease: &mut Lease,
        call: &BlockCall<'_>,
        rows: &'a [(i32, String)],
        sink: &OutcomeSink,
    ) -> &'a [(i32, String)] {
        let (answered, trouble) = self.converse(lease, call, rows, sink).await;
        let (Some(trouble), Some((line, text))) = (trouble, rows.get(answered)) else {
            lease.is_clean();
            return &[];
        };
        let error = lease.replace(trouble).await;
        self.tap.saw(|| (text.clone(), error.clone()));
        tracing::warn!(handler = self.name, batch = call.block.batch, line, error, "a process was replaced");
        sink.row(*line, Outcome::Retry { error, after: None });
        &rows[answered + 1..]
    }

    /// Writes and reads at the same time: a program that answers before it has read everything must not block on us. How
    /// many rows were answered, and what came in the way of the next.
    async fn converse(
        &self,
        lease: &mut Lease,
        call: &BlockCall<'_>,
        rows: &[(i32, String)],
        sink: &OutcomeSink,
    ) -> (usize, Option<Trouble>) {
        let mut input = Vec::with_capacity(rows.iter().map(|(_, text)| text.len() + 1).sum());
        for (_, text) in rows {
            input.extend_from_slice(text.as_bytes());
            input.push(b'\n');
        }
        let (mut writer, mut reader) = lease.ends();
        let mut writing = std::pin::pin!(writer.write(&input).fuse());
        for (at, (line, text)) in rows.iter().enumerate() {
            reader.begins(call.block.batch, Some(*line));
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
            match heard(*line, &bytes) {
                Ok(outcome) => sink.row(*line, outcome),
                Err(trouble) => return (at, Some(trouble)),
            }
            self.tap.saw(|| (text.clone(), String::from_utf8_lossy(&bytes).into_owned()));
        }
        (rows.len(), None)
    }

    async fn run_task(&self, call: &TaskCall<'_>) -> TaskOutcome {
        let mut text = match protocol::task_request(call) {
            Ok(text) => text,
            Err(error) => return TaskOutcome::Failed(format!("the payload is not JSON: {error}")),
        };
        let mut lease = match self.pool.lease().await {
            Ok(lease) => lease,
            Err(error) => return TaskOutcome::Retry { error, after: None },
        };
        text.push('\n');
        let (mut writer, mut reader) = lease.ends();
        reader.begins(call.task.reference.id, None);
        // Cancelled by the caller when its time is over; the lease then takes the process along.
        let ((), reply) = tokio::join!(writer.write(text.as_bytes()), reader.line());
        let error = match reply {
            Ok(bytes) => match protocol::read_task(&bytes) {
                Ok(outcome) => {
                    self.tap.saw(|| (text.clone(), String::from_utf8_lossy(&bytes).into_owned()));
                    lease.is_clean();
                    return outcome;
                }
                Err(error) => lease.replace(Trouble::Noise(error.to_string())).await,
            },
            Err(trouble) => lease.replace(trouble).await,
        };
        self.tap.saw(|| (text, error.clone()));
        TaskOutcome::Retry { error, after: None }
    }
}

/// The outcome in a reply to `line`; a reply to anything else means that program and we have lost each other.
fn heard(line: i32, bytes: &[u8]) -> Result<Outcome, Trouble> {
    match protocol::read_row(bytes) {
        Ok((answered, outcome)) if answered == line => Ok(outcome),
        Ok((answered, _)) => {
            Err(Trouble::Noise(format!("it answered line {answered} when it was asked for {line}")))
        }
        Err(error) => Err(Trouble::Noise(error.to_string())),
    }
}

impl Handler for Exec {
    fn intake(&self) -> Intake {
        Intake::Ahead(self.block_size)
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let refusal = "this handler takes rows together".to_owned();
        futures::future::ready(Outcome::Failed(refusal)).boxed()
    }

    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        async move { self.run(&call, rows, &sink).await }.boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        async move { self.run_task(&call).await }.boxed()
    }
}

/// What is wrong with the keys of this kind.
pub(super) fn check(name: &str, config: &Config, problems: &mut Problems) {
    let key = |field: &str| format!("handlers.{name}.{field}");
    let empty = config.argv.first().is_none_or(|program| program.is_empty());
    problems.unless(
        !empty,
        &key("argv"),
        "must name the program and its arguments, such as [\"python3\", \"resize.py\"]",
    );
    if let Some(dir) = config.cwd.as_ref().filter(|dir| !dir.is_dir()) {
        problems.error(key("cwd"), format!("there is no directory {}", dir.display()));
    }
    let odd = |name: &String| name.is_empty() || name.contains(['=', '\0']);
    let wrong = config.env.as_ref().is_some_and(|names| names.iter().any(odd));
    problems.unless(
        !wrong,
        &key("env"),
        "must be names of variables; their values are taken from musterd's own environment",
    );
}

/// The first wait before a program that crashed is started again, and the longest.
const RESTART: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));
