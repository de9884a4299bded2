//! `musterd task …`: one unit of work, seen and steered.

use super::{Exit, Global, screen};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use musterd::state::State;
use musterd::store::{
    connect::OneShot,
    tasks::{self, Filter, Shown, Steer},
};
use std::time::{Duration, Instant};

const SHOW_EXAMPLES: &str = "Examples:\n  musterd task show 17\n  musterd task show 17 --json";
const LIST_EXAMPLES: &str = "\
Examples:
  musterd task list
  musterd task list --state failed --command report
  musterd task list --parent 17 --json";
const WAIT_EXAMPLES: &str = "Examples:\n  musterd task wait 17\n  musterd task wait 17 --timeout 5m";
const ABORT_EXAMPLES: &str = "Examples:\n  musterd task abort 17";
const RETRY_EXAMPLES: &str = "Examples:\n  musterd task retry 17";

#[derive(Debug, Subcommand)]
#[command(after_help = LIST_EXAMPLES)]
pub(super) enum TaskCommand {
    /// Show a task: its state, attempts, result or error.
    #[command(after_help = SHOW_EXAMPLES)]
    Show { id: i64 },
    /// List tasks, newest first.
    #[command(after_help = LIST_EXAMPLES)]
    List(List),
    /// Wait for a task's end; exit code 1 unless it succeeded.
    #[command(after_help = WAIT_EXAMPLES)]
    Wait {
        id: i64,
        /// Give up after this long, with exit code 1.
        #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
        timeout: Option<Duration>,
    },
    /// Abort a task; one that runs is cancelled, and its children with it.
    #[command(after_help = ABORT_EXAMPLES)]
    Abort { id: i64 },
    /// Run a failed or aborted task again, or a scheduled one at once.
    #[command(after_help = RETRY_EXAMPLES)]
    Retry { id: i64 },
}

#[derive(Debug, Args)]
pub(super) struct List {
    /// held, scheduled, queued, running, waiting, succeeded, failed or aborted.
    #[arg(long, value_parser = ["held", "scheduled", "queued", "running", "waiting", "succeeded", "failed", "aborted"])]
    state: Option<String>,
    #[arg(long)]
    command: Option<String>,
    #[arg(long)]
    queue: Option<String>,
    /// Only the children of this task.
    #[arg(long, value_name = "ID")]
    parent: Option<i64>,
    /// Only tasks older than this one: the next page.
    #[arg(long, value_name = "ID")]
    before: Option<i64>,
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

impl TaskCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let client = global.connect(&loaded.config.database).await?;
        let exit = match self {
            Self::Show { id } => {
                print(global, &find(&client, id).await?)?;
                Exit::Done
            }
            Self::List(list) => list.execute(global, &client).await?,
            Self::Wait { id, timeout } => follow(global, &client, id, timeout).await?,
            Self::Abort { id } => steer(global, &client, id, Steer::Abort).await?,
            Self::Retry { id } => steer(global, &client, id, Steer::Retry).await?,
        };
        client.close().await;
        Ok(exit)
    }
}

impl List {
    async fn execute(self, global: &Global, client: &OneShot) -> Result<Exit> {
        let filter = Filter {
            state: self.state,
            command: self.command,
            queue: self.queue,
            parent: self.parent,
            before: self.before,
            limit: self.limit,
        };
        let found = tasks::list(&**client, &filter, usize::MAX).await?.items;
        if global.json {
            screen::json(&found)?;
            return Ok(Exit::Done);
        }
        let mut table = screen::table([
            screen::whole("task"),
            screen::whole("state"),
            screen::whole("command"),
            screen::spare("queue", 1),
            screen::spare("attempt", 2),
            screen::spare("parent", 3),
            screen::prose("error"),
        ]);
        for task in &found {
            table.add_row([
                comfy_table::Cell::new(task.id),
                screen::word(task.state.as_str(), tone(task.state)),
                comfy_table::Cell::new(&task.command),
                comfy_table::Cell::new(&task.queue),
                comfy_table::Cell::new(task.attempt),
                comfy_table::Cell::new(task.parent_id.map(|id| id.to_string()).unwrap_or_default()),
                comfy_table::Cell::new(first_line(task.error.as_deref().unwrap_or_default())),
            ]);
        }
        table.print()?;
        if found.len() as i64 == filter.limit {
            let last = found.last().map(|task| task.id).unwrap_or_default();
            screen::line(&format!("more: musterd task list --before {last}"))?;
        }
        Ok(Exit::Done)
    }
}

async fn find(client: &OneShot, id: i64) -> Result<Shown> {
    match tasks::show(&**client, id).await? {
        Some(task) => Ok(task),
        None => bail!("there is no task {id}"),
    }
}

async fn steer(global: &Global, client: &OneShot, id: i64, how: Steer) -> Result<Exit> {
    let state = tasks::steer(&**client, id, how, None).await.map_err(in_words)?;
    match global.json {
        true => screen::json(&serde_json::json!({ "id": id, "state": state }))?,
        false => screen::line(&format!("task {id} is {state}"))?,
    }
    Ok(Exit::Done)
}

/// How often a waiting command asks.
const ASK_EVERY: Duration = Duration::from_millis(50);

pub(super) async fn follow(
    global: &Global,
    client: &OneShot,
    id: i64,
    timeout: Option<Duration>,
) -> Result<Exit> {
    let began = Instant::now();
    loop {
        let task = find(client, id).await?;
        if task.is_over() {
            print(global, &task)?;
            return Ok(if task.state == State::Succeeded { Exit::Done } else { Exit::Failed });
        }
        if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
            print(global, &task)?;
            bail!("task {id} is still {} after {}", task.state, humantime::format_duration(began.elapsed()));
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

fn print(global: &Global, task: &Shown) -> Result<()> {
    if global.json {
        return screen::json(task);
    }
    let id = task.id.to_string();
    let mut table = screen::table([screen::whole("task"), screen::prose(&id)]);
    let mut row = |name: &str, value: comfy_table::Cell| {
        table.add_row([comfy_table::Cell::new(name), value]);
    };
    let plain = |text: String| comfy_table::Cell::new(text);
    row("state", screen::word(task.state.as_str(), tone(task.state)));
    row("command", plain(task.command.clone()));
    row("queue", plain(task.queue.clone()));
    let tries = match task.max_attempts {
        Some(most) => format!("{} of {most}", task.attempt),
        None => task.attempt.to_string(),
    };
    row("attempt", plain(tries));
    if let Some(parent) = task.parent_id {
        row("parent", plain(parent.to_string()));
    }
    if task.children > 0 {
        let states = task.children_by_state.iter().map(|(state, number)| format!("{number} {state}"));
        row("children", plain(format!("{}: {}", task.children, states.collect::<Vec<_>>().join(", "))));
    }
    if !task.after.is_empty() {
        row("waits for", plain(task.after.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")));
    }
    row("created", plain(task.created_at.to_string()));
    if let Some(finished) = task.finished_at {
        row("finished", plain(finished.to_string()));
    }
    if let Some(gone) = task.data_gone_at {
        row("data", plain(format!("payload, result and error went on {gone:.0}")));
    }
    if let Some(result) = &task.result {
        row("result", plain(result.text().to_owned()));
    }
    if let Some(error) = &task.error {
        row("error", plain(error.clone()));
    }
    table.print()
}

pub(super) fn tone(state: State) -> screen::Tone {
    match state {
        State::Succeeded => screen::Tone::Good,
        State::Failed | State::Aborted => screen::Tone::Bad,
        State::Held | State::Scheduled => screen::Tone::Doubtful,
        State::Queued | State::Running | State::Waiting => screen::Tone::Plain,
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(100).collect()
}

/// Our functions raise in a person's words; the rest keeps the driver's.
pub(super) fn in_words(error: tokio_postgres::Error) -> anyhow::Error {
    match error.as_db_error() {
        _ if super::schema::misses_something(&error) => error.into(),
        Some(db) => {
            let hint = db.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
            anyhow::anyhow!("{}{hint}", db.message())
        }
        None => anyhow::Error::new(error).context("the database"),
    }
}
