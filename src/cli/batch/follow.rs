//! `musterd batch watch`, and other commands that follow a batch: a live bar on a terminal, plain lines without one.

use super::{find, open, show};
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use musterd::state::State;
use musterd::{
    config::Config,
    store::{batches::Progress, connect::OneShot},
};
use std::{
    fmt::Write,
    io::IsTerminal,
    time::{Duration, Instant},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch watch 17
  musterd batch watch 17 --json      a JSON object a line, as things change";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Watch {
    /// The batch's id.
    id: i64,
}

impl Watch {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, _) = open(global, config, self.id).await?;
        let view = match global.json {
            true => View::Json,
            false => View::for_people(),
        };
        let progress = follow(&client, self.id, view).await?;
        client.close().await;
        if !global.json {
            show::summary(global, &progress)?;
        }
        Ok(exit_of(&progress))
    }
}

/// How often it is asked; the answer costs the same for ten rows and ten million.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How often a line says something new, and how often it says that there is nothing new.
const LINE_EVERY: Duration = Duration::from_secs(1);
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);

/// How a batch is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum View {
    /// A live bar on stderr.
    Bar,
    /// A line on stdout when something has changed.
    Lines,
    /// A JSON object a line when something has changed.
    Json,
    Silent,
}

impl View {
    /// A bar where it can be drawn, else lines.
    pub(in crate::cli) fn for_people() -> Self {
        if std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines }
    }
}

/// Follows a batch to its end.
pub(in crate::cli) async fn follow(client: &OneShot, id: i64, view: View) -> Result<Progress> {
    let mut shown = Shown::new(view);
    loop {
        let progress = find(client, id).await?;
        shown.update(&progress)?;
        if progress.is_over() {
            shown.bar.finish_and_clear();
            return Ok(progress);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

/// Follows a batch to its end, with a bar on a terminal, and prints its summary. Done only when it succeeded.
pub(in crate::cli) async fn wait(
    global: &Global,
    database: &musterd::store::Config,
    id: i64,
) -> Result<Exit> {
    let client = global.connect(database).await?;
    let began = Instant::now();
    let view = if std::io::stderr().is_terminal() { View::Bar } else { View::Silent };
    let progress = follow(&client, id, view).await?;
    client.close().await;
    show::summary(global, &progress)?;
    if !global.json {
        let rate = f64::from(progress.rows) / began.elapsed().as_secs_f64().max(1e-3);
        let took = took(began.elapsed());
        screen::line(&format!("{} after {took}, {} rows/s", progress.state, screen::grouped(rate as i64)))?;
    }
    Ok(exit_of(&progress))
}

/// A time as people say it; a short one to the millisecond.
fn took(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        _ => HumanDuration(time).to_string(),
    }
}

fn exit_of(progress: &Progress) -> Exit {
    if progress.state == State::Succeeded { Exit::Done } else { Exit::Failed }
}

/// What was shown last.
struct Shown {
    view: View,
    bar: ProgressBar,
    rate: Rate,
    last: Option<(String, Instant)>,
}

impl Shown {
    fn new(view: View) -> Self {
        let bar = if view == View::Bar { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let rate = |state: &ProgressState, out: &mut dyn Write| {
            let _ = write!(out, "{} rows/s", HumanCount(state.per_sec() as u64));
        };
        let template = "{msg} {wide_bar} {human_pos}/{human_len} {rate} eta {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.with_key("rate", rate));
        }
        Self { view, bar, rate: Rate::default(), last: None }
    }

    fn update(&mut self, progress: &Progress) -> Result<()> {
        match self.view {
            View::Silent => Ok(()),
            View::Bar => {
                self.draw(progress);
                Ok(())
            }
            View::Lines => {
                let speed = self.rate.of(progress.done());
                self.say(progress, line(progress, speed))
            }
            View::Json => self.say(progress, serde_json::to_string(progress)?),
        }
    }

    fn draw(&mut self, progress: &Progress) {
        self.bar.set_length(progress.rows as u64);
        self.bar.set_position(progress.done() as u64);
        if self.last.is_none() {
            // What was done before we came says nothing about the speed now.
            self.bar.reset_eta();
            self.last = Some((String::new(), Instant::now()));
        }
        let failed = match progress.failed {
            0 => String::new(),
            failed => format!(" ({} failed)", HumanCount(failed as u64)),
        };
        self.bar.set_message(format!("{}{failed}", show::state(progress)));
    }

    fn say(&mut self, progress: &Progress, text: String) -> Result<()> {
        let is_due = match &self.last {
            None => true,
            Some((last, since)) if *last == text => since.elapsed() > SIGN_OF_LIFE,
            Some((_, since)) => progress.is_over() || since.elapsed() >= LINE_EVERY,
        };
        if is_due {
            screen::line(&text)?;
            self.last = Some((text, Instant::now()));
        }
        Ok(())
    }
}

fn line(progress: &Progress, speed: f64) -> String {
    let (done, rows) = (progress.done(), progress.rows);
    let percent = if rows == 0 { 100.0 } else { f64::from(done) * 100.0 / f64::from(rows) };
    let eta = match f64::from(rows - done) / speed {
        seconds if seconds.is_finite() && !progress.is_over() => {
            format!(", eta {}", humantime::format_duration(Duration::from_secs(seconds as u64)))
        }
        _ => String::new(),
    };
    format!(
        "{} {}/{} ({percent:.1} %), {} rows/s{eta}, {} failed",
        show::state(progress),
        screen::grouped(done),
        screen::grouped(rows),
        screen::grouped(speed as i64),
        screen::grouped(progress.failed),
    )
}

/// Rows per second over the last few seconds.
#[derive(Default)]
struct Rate(std::collections::VecDeque<(Instant, i32)>);

impl Rate {
    const OVER: Duration = Duration::from_secs(10);

    fn of(&mut self, done: i32) -> f64 {
        self.0.push_back((Instant::now(), done));
        while self.0.len() > 2 && self.0[0].0.elapsed() > Self::OVER {
            self.0.pop_front();
        }
        let (since, then) = self.0[0];
        f64::from(done - then) / since.elapsed().as_secs_f64().max(1e-3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_time_is_not_zero() {
        let times =
            [(0, "0 ms"), (220, "220 ms"), (1_240, "1.2 s"), (60_000, "60 seconds"), (180_000, "3 minutes")];
        for (ms, said) in times {
            assert_eq!(took(Duration::from_millis(ms)), said);
        }
    }

    #[test]
    fn the_speed_is_that_of_what_was_seen_not_of_what_was_there_before() {
        let mut rate = Rate::default();
        assert_eq!(rate.of(1_000_000) as i64, 0);
        assert!(rate.of(1_000_100) > 0.0);
    }
}
