//! `musterd enqueue`: one task, or one for each line of a file.

use super::{
    Exit, Global,
    input::{self, ENQUEUING, with_bar},
    screen,
    submit::{context, name},
    task::{follow, in_words},
};
use anyhow::{Context, Result};
use clap::Args;
use musterd::{
    config::Config,
    flow::{
        enqueue::enqueue_many,
        input::{Format, Limits},
        submit::{Given, Meter, SubmitError},
    },
    json::Json,
    store::{
        submissions::SubmissionError,
        tasks::{self, EnqueuedMany, NewTask, NewTasks},
    },
    traceparent::Traceparent,
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

const EXAMPLES: &str = "\
Examples:
  musterd enqueue noop
  musterd enqueue echo '{\"id\": 7}' --wait
  musterd enqueue report --delay 10m --dedup-key report
  musterd enqueue report --after 17 --after 18
  musterd enqueue echo --file payloads.ndjson
  seq 1000 | musterd enqueue echo --file - --priority 50

With --file every line is the JSON payload of a task of its own. All of them are enqueued, or none.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Enqueue {
    /// The command that runs the task.
    #[arg(value_parser = name)]
    command: String,
    /// What its handler gets.
    #[arg(value_name = "JSON", default_value = "{}", value_parser = context)]
    payload: Json,
    /// A task for each line of this file, which has one JSON payload a line; - for standard input.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["payload", "dedup_key", "replace", "idempotency_key", "after", "wait"]
    )]
    file: Option<PathBuf>,
    /// The queue; the command's own when left out.
    #[arg(long, value_parser = name)]
    queue: Option<String>,
    /// Smaller runs sooner; 100 when left out.
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1_000_000..=1_000_000))]
    priority: Option<i32>,
    /// Not before this much time has passed.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "run_at")]
    delay: Option<Duration>,
    /// Not before this moment, such as 2026-12-24T18:00:00Z.
    #[arg(long, value_name = "WHEN")]
    run_at: Option<jiff::Timestamp>,
    /// Tries in all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=1_000))]
    max_attempts: Option<i32>,
    /// A try that runs longer is cancelled.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// One task with this key waits to be started; a second enqueue joins it.
    #[arg(long, value_name = "KEY")]
    dedup_key: Option<String>,
    /// Of two with the same dedup key the newer payload wins.
    #[arg(long, requires = "dedup_key")]
    replace: bool,
    /// The same key with the same body is the same task, however often it is sent.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Start only after this task or batch has ended. May be repeated.
    #[arg(long, value_name = "ID")]
    after: Vec<i64>,
    /// When one of its children fails: wait for the others, or abort them.
    #[arg(long, value_name = "HOW", default_value = "wait", value_parser = ["wait", "abort_siblings"])]
    on_child_failure: String,
    /// The W3C trace context to hand on to the handler; what is none is left out.
    #[arg(long, value_name = "TRACE", env = "TRACEPARENT", hide_env_values = true)]
    traceparent: Option<String>,
    /// Follow the task to its end; exit code 1 unless it succeeded.
    #[arg(long)]
    wait: bool,
}

impl Enqueue {
    pub(super) async fn execute(mut self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        match self.file.take() {
            Some(file) => self.many(global, &loaded.config, &file).await,
            None => self.one(global, &loaded.config).await,
        }
    }

    async fn one(self, global: &Global, config: &Config) -> Result<Exit> {
        let client = global.connect(&config.database).await?;
        let task = NewTask {
            command: self.command,
            payload: self.payload,
            queue: self.queue,
            priority: self.priority,
            delay: self.delay,
            run_at: self.run_at,
            max_attempts: self.max_attempts,
            timeout: self.timeout,
            dedup_key: self.dedup_key,
            dedup_replace: self.replace,
            idempotency_key: self.idempotency_key,
            after: self.after,
            on_child_failure: self.on_child_failure,
            traceparent: self.traceparent.as_deref().and_then(Traceparent::parse),
        };
        let id = tasks::enqueue(&*client, &task).await.map_err(in_words)?;
        if self.wait {
            return follow(global, &client, id, None).await;
        }
        match global.json {
            true => screen::json(&serde_json::json!({ "id": id }))?,
            false => screen::line(&id.to_string())?,
        }
        client.close().await;
        Ok(Exit::Done)
    }

    async fn many(self, global: &Global, config: &Config, file: &Path) -> Result<Exit> {
        let (source, size) = input::open(file)?;
        let mut client = global.connect(&config.database).await?;
        let limits = Limits { max_row_bytes: config.submit.max_row_bytes };
        let given = Given { source, format: Format::Ndjson, limits, exported: false };
        let task = NewTasks {
            command: self.command,
            queue: self.queue,
            priority: self.priority,
            delay: self.delay,
            run_at: self.run_at,
            max_attempts: self.max_attempts,
            timeout: self.timeout,
            on_child_failure: self.on_child_failure,
            traceparent: self.traceparent.as_deref().and_then(Traceparent::parse),
        };
        let meter = Meter::default();
        let enqueuing = enqueue_many(&mut client, &task, given, meter.clone());
        let enqueued = with_bar(ENQUEUING, enqueuing, &meter, size).await;
        let enqueued = enqueued
            .map_err(refused)
            .with_context(|| format!("nothing of {} was enqueued", input::shown(file)))?;
        client.close().await;
        if enqueued.tasks == 0 {
            screen::note(&format!("{} has no payloads", input::shown(file)));
        }
        match global.json {
            true => screen::json(&enqueued)?,
            false => screen::line(&summary(&enqueued))?,
        }
        Ok(Exit::Done)
    }
}

/// What the database says is in a person's words; what the reader says, too.
fn refused(error: SubmitError) -> anyhow::Error {
    match error {
        SubmitError::Store(SubmissionError::Query { source, .. }) => in_words(source),
        error => error.into(),
    }
}

fn summary(enqueued: &EnqueuedMany) -> String {
    let tasks = screen::counted(enqueued.tasks.cast_signed(), "task", "tasks");
    match (enqueued.first_id, enqueued.last_id) {
        (Some(first), Some(last)) if first != last => format!("{tasks}, first id {first}, last id {last}"),
        (Some(only), _) => format!("{tasks}, id {only}"),
        _ => tasks,
    }
}
