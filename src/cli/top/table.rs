//! Lines of a screen: text with a few styles, and tables that give up columns until they fit.

/// How a piece of text looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    #[default]
    Plain,
    Strong,
    Dim,
    Good,
    Doubtful,
    Bad,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) text: String,
    pub(super) style: Style,
}

pub(super) fn span(text: impl Into<String>, style: Style) -> Span {
    Span { text: text.into(), style }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) spans: Vec<Span>,
    /// The line that a person has chosen.
    pub(super) chosen: bool,
}

impl Line {
    pub(super) fn of(spans: impl IntoIterator<Item = Span>) -> Self {
        Self { spans: spans.into_iter().collect(), chosen: false }
    }

    pub(super) fn plain(&self) -> String {
        self.spans.iter().map(|span| span.text.as_str()).collect()
    }

    /// The same in at most so many characters.
    pub(super) fn cut(mut self, width: usize) -> Self {
        let mut left = width;
        for span in &mut self.spans {
            let length = span.text.chars().count();
            if length > left {
                span.text = span.text.chars().take(left).collect();
            }
            left -= length.min(left);
        }
        self
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) head: &'static str,
    /// Numbers are set to the right.
    pub(super) right: bool,
    /// Columns with a larger one go first when there is no room; zero stays.
    pub(super) spare: u8,
}

pub(super) const fn text(head: &'static str, spare: u8) -> Column {
    Column { head, right: false, spare }
}

pub(super) const fn number(head: &'static str, spare: u8) -> Column {
    Column { head, right: true, spare }
}

/// A head and a line per row, as wide as `width` at most.
pub(super) fn table(columns: &[Column], rows: &[Vec<Span>], width: usize) -> Vec<Line> {
    let wide = |index: usize| {
        let cells = rows.iter().map(|row| row[index].text.chars().count());
        cells.chain([columns[index].head.chars().count()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns.len()).map(wide).collect();
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let total = |kept: &[usize]| kept.iter().map(|index| widths[*index] + 2).sum::<usize>();
    while total(&kept) > width {
        let most = kept.iter().copied().filter(|index| columns[*index].spare > 0);
        let Some(gone) = most.max_by_key(|index| columns[*index].spare) else { break };
        kept.retain(|index| *index != gone);
    }
    let set = |index: usize, text: &str| match columns[index].right {
        true => format!(" {text:>width$} ", width = widths[index]),
        false => format!(" {text:<width$} ", width = widths[index]),
    };
    let head = kept.iter().map(|index| span(set(*index, columns[*index].head), Style::Dim));
    let mut lines = vec![Line::of(head).cut(width)];
    for row in rows {
        let cells = kept.iter().map(|index| span(set(*index, &row[*index].text), row[*index].style));
        lines.push(Line::of(cells).cut(width));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_table_gives_up_what_can_be_spared_and_then_cuts() {
        let columns = [text("QUEUE", 0), number("TASKS", 2), number("ROWS", 1)];
        let row = ["default", "1,000", "7"].map(|cell| span(cell, Style::Plain)).to_vec();
        let shown = |width| -> Vec<String> {
            table(&columns, std::slice::from_ref(&row), width).iter().map(Line::plain).collect()
        };
        assert_eq!(shown(80), [" QUEUE    TASKS  ROWS ", " default  1,000     7 "]);
        assert_eq!(shown(16), [" QUEUE    ROWS ", " default     7 "]);
        assert_eq!(shown(6), [" QUEUE", " defau"]);
    }
}
