//! The terminal, taken and given back: at the end, on a signal, and when something panics.

use super::table::{Line, Style};
use anyhow::Result;
use crossterm::{
    cursor::{Hide, MoveTo, Show},
    queue,
    style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor},
    terminal::{
        BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen,
        LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
    },
};
use std::io::{Stdout, Write, stdout};

/// A size for output that is not shown at once.
pub(super) const UNBOUNDED: (usize, usize) = (usize::MAX, usize::MAX);

/// The screen is ours until this is dropped.
pub(super) struct Terminal {
    out: Stdout,
    colours: bool,
}

impl Terminal {
    pub(super) fn take() -> Result<Self> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // First the screen, or what the panic says is lost with it.
            give_back();
            before(panic);
        }));
        enable_raw_mode()?;
        let mut terminal = Self { out: stdout(), colours: crate::cli::screen::colours() };
        queue!(terminal.out, EnterAlternateScreen, Hide)?;
        terminal.out.flush()?;
        Ok(terminal)
    }

    /// Draws a whole picture at once: no line of the last one shines through.
    pub(super) fn draw(&mut self, lines: &[Line]) -> Result<()> {
        queue!(self.out, BeginSynchronizedUpdate)?;
        for (row, line) in lines.iter().enumerate() {
            queue!(self.out, MoveTo(0, u16::try_from(row).unwrap_or(u16::MAX)))?;
            if line.chosen {
                queue!(self.out, SetAttribute(Attribute::Reverse))?;
            }
            for span in &line.spans {
                self.style(span.style)?;
                queue!(self.out, Print(&span.text), ResetColor, SetAttribute(Attribute::NormalIntensity))?;
            }
            queue!(self.out, SetAttribute(Attribute::Reset), Clear(ClearType::UntilNewLine))?;
        }
        queue!(self.out, Clear(ClearType::FromCursorDown), EndSynchronizedUpdate)?;
        Ok(self.out.flush()?)
    }

    fn style(&mut self, style: Style) -> Result<()> {
        let colour = match style {
            Style::Plain => return Ok(()),
            Style::Strong => return Ok(queue!(self.out, SetAttribute(Attribute::Bold))?),
            Style::Dim => return Ok(queue!(self.out, SetAttribute(Attribute::Dim))?),
            Style::Good => Color::Green,
            Style::Doubtful => Color::Yellow,
            Style::Bad => Color::Red,
        };
        if self.colours {
            queue!(self.out, SetForegroundColor(colour))?;
        }
        Ok(())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

/// As it was before, as far as it goes: a person looks at it next.
fn give_back() {
    let _ = disable_raw_mode();
    let mut out = stdout();
    let _ = queue!(out, EndSynchronizedUpdate, LeaveAlternateScreen, Show, ResetColor);
    let _ = out.flush();
}
