//! What the screen shows: a line for all, and a part each for queues, batches and workers. Knows no terminal.

use super::{
    look::{Batch, Picture, Queue},
    table::{Column, Line, Span, Style, number, span, table, text},
};
use crate::cli::screen::{counted, grouped};
use musterd::state::{State, WorkerState};
use musterd::store::workers::Listed;
use std::time::Duration;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Pane {
    #[default]
    Queues,
    Batches,
    Workers,
}

impl Pane {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Queues => Self::Batches,
            Self::Batches => Self::Workers,
            Self::Workers => Self::Queues,
        }
    }
}

/// What a person looks at.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) pane: Pane,
    /// The chosen line of each part.
    pub(super) chosen: [usize; 3],
    /// Why the picture is old.
    pub(super) trouble: Option<String>,
}

const QUEUES: [Column; 8] = [
    text("QUEUE", 0),
    text("STATE", 1),
    number("ROWS WAITING", 0),
    number("ROWS/S", 0),
    number("TASKS WAITING", 2),
    number("TASKS RUNNING", 4),
    number("BATCHES", 3),
    number("WORKERS", 5),
];

const BATCHES: [Column; 9] = [
    number("BATCH", 0),
    text("STATE", 0),
    text("COMMAND", 3),
    text("QUEUE", 5),
    number("DONE", 1),
    number("ROWS", 4),
    number("FAILED", 2),
    number("ROWS/S", 0),
    text("LEFT", 6),
];

const WORKERS: [Column; 7] = [
    text("WORKER", 0),
    text("STATE", 1),
    number("BLOCKS", 3),
    number("ROWS IN HAND", 2),
    number("TASKS", 4),
    text("LAST BEAT", 5),
    text("TROUBLE", 6),
];

/// The picture in at most `width` columns and `height` lines.
pub(super) fn frame(picture: &Picture, view: &View, width: usize, height: usize) -> Vec<Line> {
    let panes = [
        (Pane::Queues, "Queues", table(&QUEUES, &rows(&picture.queues, queue), width)),
        (Pane::Batches, "Batches", table(&BATCHES, &rows(&picture.batches, batch), width)),
        (Pane::Workers, "Workers", table(&WORKERS, &rows(&picture.workers, worker), width)),
    ];
    let live = height != usize::MAX;
    let rooms = rooms([0, 1, 2].map(|index| panes[index].2.len() + 2), height.saturating_sub(2));
    let mut lines = vec![title(picture, view).cut(width)];
    for ((pane, name, table), room) in panes.into_iter().zip(rooms) {
        let count = table.len() - 1;
        let style = if live && pane == view.pane { Style::Strong } else { Style::Plain };
        let mark = if live && pane == view.pane { "▸" } else { " " };
        let shown = [Line::default(), Line::of([span(format!("{mark}{name} ({count})"), style)]).cut(width)];
        let chosen =
            (live && pane == view.pane).then(|| view.chosen[pane as usize].min(count.saturating_sub(1)));
        lines.extend(shown.into_iter().chain(window(table, room.saturating_sub(2), chosen)).take(room));
    }
    if live {
        lines.resize(height.saturating_sub(1), Line::default());
        lines.push(Line::of([span(HELP, Style::Dim)]).cut(width));
        lines.truncate(height);
    }
    lines
}

const HELP: &str = " q leave   tab part   ↑↓ line   p pause or resume the queue";

fn title(picture: &Picture, view: &View) -> Line {
    let running: i64 = picture.queues.iter().map(|queue| queue.shown.tasks_running).sum();
    let summary = format!(
        " musterd top  {}  {}  {} running  {} rows/s",
        counted(picture.workers.len() as i64, "worker", "workers"),
        counted(picture.batches.len() as i64, "batch", "batches"),
        counted(running, "task", "tasks"),
        grouped(picture.rows_per_second as i64),
    );
    let mut spans = vec![span(summary, Style::Strong)];
    if let Some(trouble) = &view.trouble {
        spans.push(span(format!("  {}", trouble.lines().next().unwrap_or_default()), Style::Bad));
    }
    Line::of(spans)
}

/// How many lines each part gets: what it needs, or its share.
fn rooms(needs: [usize; 3], height: usize) -> [usize; 3] {
    let mut rooms = [0; 3];
    let mut left = height;
    // The smallest first: what it does not need is the others'.
    let mut order = [0, 1, 2];
    order.sort_by_key(|index| needs[*index]);
    for (place, index) in order.into_iter().enumerate() {
        rooms[index] = needs[index].min(left / (3 - place));
        left -= rooms[index];
    }
    rooms
}

/// The head, and the rows around the chosen one.
fn window(table: Vec<Line>, room: usize, chosen: Option<usize>) -> Vec<Line> {
    let rows = room.saturating_sub(1);
    let first = chosen.map_or(0, |chosen| (chosen + 1).saturating_sub(rows));
    let mut table = table.into_iter();
    let mut lines: Vec<Line> = table.next().into_iter().collect();
    for (index, line) in table.enumerate().skip(first).take(rows) {
        lines.push(Line { chosen: chosen == Some(index), ..line });
    }
    lines
}

fn rows<T>(things: &[T], row: impl Fn(&T) -> Vec<Span>) -> Vec<Vec<Span>> {
    things.iter().map(row).collect()
}

fn plain(text: impl Into<String>) -> Span {
    span(text, Style::Plain)
}

fn rate(rows_per_second: f64) -> Span {
    let style = if rows_per_second > 0.0 { Style::Good } else { Style::Dim };
    span(grouped(rows_per_second as i64), style)
}

fn queue(queue: &Queue) -> Vec<Span> {
    let shown = &queue.shown;
    let state = if shown.paused { span("paused", Style::Doubtful) } else { span("open", Style::Good) };
    vec![
        plain(&shown.name),
        state,
        plain(grouped(shown.rows_queued)),
        rate(queue.rows_per_second),
        plain(grouped(shown.tasks_queued + shown.tasks_scheduled)),
        plain(grouped(shown.tasks_running)),
        plain(grouped(shown.batches_open)),
        span(grouped(shown.workers), if shown.workers == 0 { Style::Bad } else { Style::Plain }),
    ]
}

fn batch(batch: &Batch) -> Vec<Span> {
    let progress = &batch.progress;
    let done = match progress.rows {
        0 => "100.0 %".to_owned(),
        rows => format!("{:.1} %", f64::from(progress.done()) * 100.0 / f64::from(rows)),
    };
    let left = batch.seconds_left.map(|seconds| humantime::format_duration(Duration::from_secs(seconds)));
    let state = match progress.state {
        _ if progress.aborting => span("aborting", Style::Bad),
        State::Held => span("held", Style::Doubtful),
        other => plain(other.as_str()),
    };
    vec![
        plain(progress.id.to_string()),
        state,
        plain(&progress.command),
        plain(&progress.queue),
        plain(done),
        plain(grouped(progress.rows)),
        span(grouped(progress.failed), if progress.failed > 0 { Style::Bad } else { Style::Dim }),
        rate(batch.rows_per_second),
        plain(left.map(|left| left.to_string()).unwrap_or_default()),
    ]
}

fn worker(worker: &Listed) -> Vec<Span> {
    let state = if worker.state == WorkerState::Alive { Style::Good } else { Style::Doubtful };
    vec![
        plain(&worker.id),
        span(worker.state.as_str(), state),
        plain(grouped(worker.blocks)),
        plain(grouped(worker.rows)),
        plain(grouped(worker.tasks)),
        plain(format!("{} s ago", worker.last_beat_seconds as u64)),
        span(worker.trouble.as_deref().and_then(|text| text.lines().next()).unwrap_or_default(), Style::Bad),
    ]
}
