//! `musterd top`: queues, batches, workers and rates, live. One picture for pipes.

mod frame;
mod keys;
mod look;
mod table;
mod terminal;

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use crossterm::event::{Event, EventStream};
use frame::View;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use keys::Wish;
use look::{Eye, Picture};
use musterd::config::Config;
use std::{io::IsTerminal, time::Duration};
use terminal::Terminal;
use tokio::signal::unix::{SignalKind, signal};

const EXAMPLES: &str = "\
Examples:
  musterd top
  musterd top --interval 2s
  musterd top --once             one picture, for pipes and logs
  musterd top --json | jq '.queues[] | select(.paused)'

Keys: q leaves, tab goes from part to part, arrows choose a line, p pauses or resumes the chosen queue.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Top {
    /// Time between two looks; rates are over ten seconds, or two looks.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    interval: Duration,
    /// Print one picture and end; so it is without a terminal, and with --json.
    #[arg(long)]
    once: bool,
}

impl Top {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let interval = self.interval.max(Duration::from_millis(100));
        if self.once || global.json || !std::io::stdout().is_terminal() {
            return once(global, &loaded.config, interval).await;
        }
        live(&loaded.config, interval).await
    }
}

/// One picture. It takes two looks: a rate is a difference.
async fn once(global: &Global, config: &Config, interval: Duration) -> Result<Exit> {
    let mut eye = Eye::new(&config.database)?;
    eye.look().await?;
    tokio::time::sleep(interval).await;
    let picture = eye.look().await?;
    if global.json {
        screen::json(&picture)?;
        return Ok(Exit::Done);
    }
    let size = match std::io::stdout().is_terminal() {
        true => screen::size(),
        false => terminal::UNBOUNDED,
    };
    for line in frame::frame(&picture, &View::default(), size.0, usize::MAX) {
        screen::line(line.plain().trim_end())?;
    }
    Ok(Exit::Done)
}

/// What is under way beside the drawing: the screen answers to keys while the database is slow.
enum Done {
    Looked(Box<Eye>, Result<Picture>),
    Steered(Result<()>),
}

type Jobs = FuturesUnordered<BoxFuture<'static, Done>>;

async fn live(config: &Config, interval: Duration) -> Result<Exit> {
    let mut eye = Box::new(Eye::new(&config.database)?);
    // The first look before the screen is taken: a database that is not there is reported as by any other command.
    let mut picture = eye.look().await?;
    let (mut terminated, mut hung_up) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    let mut terminal = Terminal::take()?;
    let (mut view, mut events, mut jobs) = (View::default(), EventStream::new(), Jobs::new());
    jobs.push(after(interval, eye));
    loop {
        let (width, height) = screen::size();
        terminal.draw(&frame::frame(&picture, &view, width, height))?;
        musterd::failpoint!("top.drawn");
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) => match keys::wish(key, &mut view, &picture) {
                    Some(Wish::Leave) => break,
                    Some(Wish::Steer { queue, pause }) => {
                        jobs.push(steer(config.database.clone(), queue, pause));
                    }
                    None => {}
                },
                // A new size is read before the next drawing.
                Some(Ok(_)) => {}
                Some(Err(_)) | None => break,
            },
            Some(done) = jobs.next() => match done {
                Done::Looked(eye, looked) => {
                    match looked {
                        Ok(new) => {
                            view.trouble = None;
                            picture = new;
                        }
                        Err(error) => view.trouble = Some(error.to_string()),
                    }
                    jobs.push(after(interval, eye));
                }
                Done::Steered(Ok(())) => {}
                Done::Steered(Err(error)) => view.trouble = Some(error.to_string()),
            },
            _ = terminated.recv() => break,
            _ = hung_up.recv() => break,
        }
    }
    drop(terminal);
    Ok(Exit::Done)
}

fn after(interval: Duration, mut eye: Box<Eye>) -> BoxFuture<'static, Done> {
    async move {
        tokio::time::sleep(interval).await;
        let looked = eye.look().await;
        Done::Looked(eye, looked)
    }
    .boxed()
}

fn steer(database: musterd::store::Config, queue: String, pause: bool) -> BoxFuture<'static, Done> {
    async move { Done::Steered(look::steer(&database, &queue, pause).await) }.boxed()
}
