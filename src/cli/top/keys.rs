//! What a key means.

use super::{
    frame::{Pane, View},
    look::Picture,
};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What a person wants that the view alone cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Leave,
    Steer { queue: String, pause: bool },
}

pub(super) fn wish(key: KeyEvent, view: &mut View, picture: &Picture) -> Option<Wish> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let last = |pane: Pane| view_len(pane, picture).saturating_sub(1);
    let chosen = view.chosen[view.pane as usize].min(last(view.pane));
    match key.code {
        // The terminal is raw: these do not come as signals.
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return Some(Wish::Leave);
        }
        KeyCode::Char('q') | KeyCode::Esc => return Some(Wish::Leave),
        KeyCode::Tab | KeyCode::Right => view.pane = view.pane.next(),
        KeyCode::BackTab | KeyCode::Left => view.pane = view.pane.next().next(),
        KeyCode::Down => view.chosen[view.pane as usize] = (chosen + 1).min(last(view.pane)),
        KeyCode::Up => view.chosen[view.pane as usize] = chosen.saturating_sub(1),
        KeyCode::Char('p') if view.pane == Pane::Queues => {
            let queue = &picture.queues.get(chosen)?.shown;
            return Some(Wish::Steer { queue: queue.name.clone(), pause: !queue.paused });
        }
        _ => {}
    }
    None
}

fn view_len(pane: Pane, picture: &Picture) -> usize {
    match pane {
        Pane::Queues => picture.queues.len(),
        Pane::Batches => picture.batches.len(),
        Pane::Workers => picture.workers.len(),
    }
}
