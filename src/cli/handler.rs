//! `musterd handler …`: a handler tried on sample rows or a task, and what the live workers handle.

mod task;
mod verdict;

use super::{Exit, Global, screen};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use comfy_table::Cell;
use musterd::{
    flow::input::{Format, Limits, Reader},
    handler::{
        self, BlockCall, Done, Entry, Intake, Outcome, Registry, Report,
        tap::{Exchange, Tap},
    },
    json::Json,
    store::{
        blocks::{BlockRef, Parts},
        pages::InputRow,
        workers,
    },
};
use std::{
    collections::BTreeSet,
    io::Read,
    path::{Path, PathBuf},
    time::Instant,
};
use tokio::sync::mpsc::UnboundedReceiver;
use verdict::Verdict;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  musterd handler list\n  musterd handler test noop --input rows.ndjson")]
pub(super) enum HandlerCommand {
    /// Run a handler on sample rows, or on a task, and show request, reply and verdict. Nothing is stored; http and exec do
    /// their work.
    #[command(after_help = "Examples:\n  musterd handler test charge --input sample.ndjson\n  \
        echo '{\"id\":1}' | musterd handler test charge --input - --json\n  \
        musterd handler test report --payload '{\"month\":1}'")]
    Test(Test),
    /// List the commands that are declared, and how many live workers handle each.
    #[command(after_help = "Examples:\n  musterd handler list\n  musterd handler list --json")]
    List,
}

#[derive(Debug, Args)]
pub(super) struct Test {
    /// The handler, by its name in the configuration.
    name: String,
    /// Sample rows (CSV, NDJSON or a JSON array); - for standard input.
    #[arg(long, value_name = "FILE", required_unless_present = "payload")]
    input: Option<PathBuf>,
    /// Run it as a task with this payload, as JSON, instead of on rows.
    #[arg(long, value_name = "JSON", conflicts_with_all = ["input", "context", "limit"])]
    payload: Option<String>,
    /// The batch's context, as JSON.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    context: String,
    /// Rows to run, at most.
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

impl HandlerCommand {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        match self {
            Self::Test(test) => test.execute(global).await,
            Self::List => list(global).await,
        }
    }
}

impl Test {
    async fn execute(self, global: &Global) -> Result<Exit> {
        let mut config = global.load()?.config;
        config.handlers.retain(|name, _| *name == self.name);
        if config.handlers.is_empty() {
            bail!("there is no [handlers.{}] in the configuration", self.name);
        }
        Global::watch_over(&config);
        let (tap, heard) = Tap::new();
        let registry = Registry::open(&config.handlers, &config.queues, &config.database, &tap)?;
        let entry = registry.get(&self.name).context("the handler was made")?;
        match (&self.payload, &self.input) {
            (Some(payload), _) => task::run(&self.name, entry, payload, heard, global).await,
            (None, Some(file)) => self.on_rows(entry, file, config.submit.max_row_bytes, heard, global).await,
            (None, None) => bail!("give --input or --payload"),
        }
    }

    async fn on_rows(
        &self,
        entry: &Entry,
        file: &Path,
        max_row_bytes: usize,
        heard: Heard,
        global: &Global,
    ) -> Result<Exit> {
        let texts = self.rows(file, max_row_bytes)?;
        let rows: Vec<InputRow<'_>> =
            (1..).zip(&texts).map(|(line, text)| InputRow { line, input: text.as_str() }).collect();
        let context = Json::from_text(self.context.as_str());
        if !entry.handler.takes_rows() {
            bail!("handler {} takes tasks only: try it with --payload", self.name);
        }
        let block = BlockRef { id: 0, token: uuid::Uuid::new_v4(), batch: 0 };
        let (timeout, parts) = (entry.config.timeout, Parts::default());
        let call = BlockCall {
            command: &self.name,
            context: &context,
            block,
            uid: uuid::Uuid::nil(),
            parts: &parts,
            attempt: 1,
            timeout,
            traceparent: None,
        };
        let slice = match entry.handler.intake() {
            Intake::OneByOne => usize::MAX,
            Intake::Ahead(rows) | Intake::Together(rows) => rows.get(),
        };
        let began = Instant::now();
        let mut verdicts = Vec::new();
        for rows in rows.chunks(slice.min(rows.len().max(1))) {
            let mut open: BTreeSet<i32> = rows.iter().map(|row| row.line).collect();
            let mut running = handler::run_block(&*entry.handler, call, rows);
            while let Some(reports) = running.next().await {
                for report in reports {
                    if let Report::Unavailable { error, .. } = &report {
                        bail!("the handler cannot work now, and would be given no rows for a while: {error}");
                    }
                    verdicts.extend(verdicts_of(report).into_iter().filter(|(line, _)| open.remove(line)));
                }
            }
            // As in a fiber: a row that was not reported is tried again.
            verdicts.extend(open.into_iter().map(|line| (line, running.unreported())));
        }
        let took = began.elapsed();
        let exchanges = all_of(heard);
        let verdicts: Vec<Verdict> =
            verdicts.into_iter().map(|(line, outcome)| Verdict::of_row(line, outcome)).collect();
        let good = verdicts.iter().all(Verdict::is_good);
        if global.json {
            screen::json(&serde_json::json!({
                "handler": self.name, "ok": good, "took_ms": took.as_millis() as u64, "exchanges": exchanges,
                "rows": verdicts,
            }))?;
        } else {
            show(&exchanges)?;
            print(&verdicts)?;
            let total = verdicts.len();
            let passed = verdicts.iter().filter(|verdict| verdict.is_good()).count();
            screen::line(&format!("{passed} of {total} rows succeeded in {} ms", took.as_millis()))?;
        }
        Ok(if good { Exit::Done } else { Exit::Failed })
    }

    fn rows(&self, file: &Path, max_row_bytes: usize) -> Result<Vec<String>> {
        let mut bytes = Vec::new();
        if file.as_os_str() == "-" {
            std::io::stdin().read_to_end(&mut bytes)?;
        } else {
            bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        }
        let extension = file.extension().and_then(|extension| extension.to_str());
        let format = Format::guess(extension, &bytes).unwrap_or(Format::Ndjson);
        let mut reader = Reader::new(bytes.as_slice(), format, Limits { max_row_bytes });
        let (mut rows, mut row) = (Vec::new(), Vec::new());
        while rows.len() < self.limit && reader.next_row(&mut row)?.is_some() {
            rows.push(String::from_utf8(row.clone())?);
        }
        Ok(rows)
    }
}

/// What a report means for its rows, as the daemon would store it.
fn verdicts_of(report: Report) -> Vec<(i32, Outcome)> {
    match report {
        Report::Row(line, outcome) => vec![(line, outcome.checked())],
        Report::Succeeded(lines) => {
            lines.iter().map(|line| (line, Outcome::Succeeded(Done::default()))).collect()
        }
        // A rehearsal commits nothing.
        Report::Committed { .. } | Report::NotHeld | Report::Unavailable { .. } => Vec::new(),
    }
}

type Heard = UnboundedReceiver<Exchange>;

/// Everything that was heard until now.
fn all_of(mut heard: Heard) -> Vec<Exchange> {
    std::iter::from_fn(|| heard.try_recv().ok()).collect()
}

fn show(exchanges: &[Exchange]) -> Result<()> {
    for exchange in exchanges {
        screen::line(&format!("> {}\n< {}", exchange.request.trim_end(), exchange.reply))?;
    }
    Ok(())
}

fn print(verdicts: &[Verdict]) -> Result<()> {
    let mut table =
        screen::table([screen::whole("line"), screen::whole("verdict"), screen::prose("result or error")]);
    for verdict in verdicts {
        table.add_row([
            Cell::new(verdict.line.unwrap_or_default()),
            screen::word(verdict.outcome, verdict.tone()),
            Cell::new(verdict.said().unwrap_or_default()),
        ]);
    }
    table.print()
}

async fn list(global: &Global) -> Result<Exit> {
    let loaded = global.load()?;
    let client = global.connect(&loaded.config.database).await?;
    let commands = workers::commands(&client).await?;
    client.close().await;
    if global.json {
        screen::json(&commands)?;
        return Ok(Exit::Done);
    }
    let mut table = screen::table([
        screen::whole("command"),
        screen::spare("kind", 2),
        screen::spare("queue", 1),
        screen::whole("workers"),
        screen::spare("procedure", 3),
    ]);
    for command in &commands {
        let tone = if command.workers > 0 { screen::Tone::Good } else { screen::Tone::Doubtful };
        table.add_row([
            Cell::new(&command.name),
            Cell::new(&command.kind),
            Cell::new(&command.queue),
            screen::word(&command.workers.to_string(), tone),
            Cell::new(command.procedure.as_deref().unwrap_or_default()),
        ]);
    }
    table.print()?;
    Ok(Exit::Done)
}
