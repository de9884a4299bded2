//! `exec` handlers: a pool of long-lived programs, one JSON object per line on stdin and stdout. At least once.
//!
//! The rows of a block are written ahead and answered in order. A row that crashes, outlasts its time or is answered with
//! noise is a failed try of that row alone: the process is replaced, and the rows behind it, which had not begun as far as
//! we can know, go to the next one with no try charged. A program that does not work at all charges no row: see `blame`.

mod blame;
mod lease;
mod pool;
mod process;
mod program;
pub mod reaper;
mod rows;
mod scratch;
mod stderr;
pub mod watch;

use super::{
    BlockCall, BuildError, Config, Handler, Intake, Outcome, OutcomeSink, RowCall, TaskCall, TaskOutcome,
    protocol, tap::Tap,
};
use crate::{problems::Problems, store::pages::InputRow};
use blame::Blame;
use futures::{FutureExt, future::BoxFuture};
use lease::{Lease, Loss};
use pool::{Outage, Pool};
use process::Trouble;
use std::{num::NonZeroUsize, time::Duration};

/// Rows written ahead, unless the configuration says otherwise.
const BLOCK_SIZE: usize = 500;
/// What a program gets of our environment, unless the configuration names other variables: enough to be found and to speak
/// its user's language.
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
    pub(super) fn new(name: &str, config: &Config, fibers: u32, tap: Tap) -> Result<Self, BuildError> {
        let most = config.processes.map_or(fibers, |given| given.get()) as usize;
        let program = program::Program::new(name, config)?;
        Ok(Self {
            name: name.to_owned(),
            pool: Pool::new(program, config, most),
            block_size: config.block_size.or(NonZeroUsize::new(BLOCK_SIZE)).unwrap_or(NonZeroUsize::MIN),
            tap,
        })
    }

    async fn run_task(&self, call: &TaskCall<'_>) -> TaskOutcome {
        let mut text = match protocol::task_request(call) {
            Ok(text) => text,
            Err(error) => return TaskOutcome::Failed(format!("the payload is not JSON: {error}").into()),
        };
        let mut lease = match self.pool.lease().await {
            Ok(lease) => lease,
            Err(outage) => return postponed(outage),
        };
        text.push('\n');
        // Cancelled by the caller when its time is over; the lease then takes the process along.
        let trouble = match self.ask(&mut lease, call, &text).await {
            Ok(outcome) => {
                lease.is_clean();
                return outcome;
            }
            Err(trouble) => trouble,
        };
        let loss = lease.replace(trouble).await;
        let error = loss.ending.error();
        let id = call.task.reference.id;
        tracing::warn!(handler = self.name, task = id, reason = loss.ending.reason, "a process was replaced");
        self.quote(&loss);
        self.tap.saw(|| (text, error.clone()));
        match self.pool.judge((id, None), &loss) {
            Blame::Request => TaskOutcome::Retry { error: error.into(), after: None },
            Blame::Program => postponed(self.pool.outage(&loss.ending.reason, error)),
        }
    }

    /// The reply to a task, if it is the only one, and not another task's.
    async fn ask(&self, lease: &mut Lease, call: &TaskCall<'_>, text: &str) -> Result<TaskOutcome, Trouble> {
        let (mut writer, mut reader) = lease.ends(1);
        let id = call.task.reference.id;
        reader.begins(id, None);
        let ((), reply) = tokio::join!(writer.write(text.as_bytes()), reader.line());
        let bytes = reply?;
        let noise = |error: protocol::BadReply| Trouble::Noise(error.to_string());
        let outcome = protocol::read_task(&bytes).map_err(noise)?;
        let is_named = protocol::names_request(&bytes, &call.idempotency_key(), Some(id)).map_err(noise)?;
        let is_reply = is_named || protocol::has_outcome(&bytes);
        if !reader.accepts(is_named) || !is_reply || !lease.is_silent() {
            // Which of its lines is the reply, and to which task, cannot be known.
            if is_reply {
                self.pool.wrote_too_much(id);
            }
            return Err(Trouble::Noise(format!("{} and more", protocol::quote(&bytes))));
        }
        self.tap.saw(|| (text.to_owned(), String::from_utf8_lossy(&bytes).into_owned()));
        Ok(outcome)
    }

    /// What a program wrote may be what it was given: it is for the log of those who ask for it.
    fn quote(&self, loss: &Loss) {
        if let Some(words) = &loss.ending.words {
            tracing::debug!(handler = self.name, words, "the last words of a process that was replaced");
        }
    }
}

/// A program that runs as the same user as we do could read our environment, which may hold secrets, and our memory, through
/// `/proc` and the calls for debuggers: not any more. Root still can.
pub fn hide_own_memory() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        tracing::warn!(%error, "programs of exec handlers can read the environment of musterd");
    }
}

fn postponed(outage: Outage) -> TaskOutcome {
    TaskOutcome::Postponed { error: outage.error, crashed: false, after: Some(outage.after) }
}

impl Handler for Exec {
    fn may_block(&self) -> bool {
        false
    }

    fn rest(&self) -> Option<Duration> {
        self.pool.rest()
    }

    fn intake(&self) -> Intake {
        Intake::Ahead(self.block_size)
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let refusal = "this handler takes rows together".to_owned();
        futures::future::ready(Outcome::Failed(refusal.into())).boxed()
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
    let none = |time: Option<Duration>| time.is_some_and(|time| time.is_zero());
    problems.unless(!none(config.max_age), &key("max_age"), "must be above zero");
    problems.unless(!none(config.max_cpu_time), &key("max_cpu_time"), "must be above zero");
    let odd = |name: &String| name.is_empty() || name.contains(['=', '\0']);
    let wrong = config.env.as_ref().is_some_and(|names| names.iter().any(odd));
    problems.unless(
        !wrong,
        &key("env"),
        "must be names of variables; their values are taken from musterd's own environment",
    );
}
