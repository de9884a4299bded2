//! Tables that fit a terminal: prose is wrapped between its words, then columns that can be spared are left out.
//!
//! A word is never broken. What cannot be spared is shown all the same, wider than the window if need be.

use super::{put, size};
use crate::cli::screen;
use anyhow::Result;
use comfy_table::{Cell, ColumnConstraint, ContentArrangement, Row, Width, presets};
use std::{borrow::Cow, io::IsTerminal};

/// A column by its name, and what becomes of it when there is no room.
#[derive(Clone, Copy, Debug)]
pub(in crate::cli) struct Column<'a> {
    name: &'a str,
    fit: Fit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Whole,
    Prose,
    /// The largest goes first.
    Spare(u8),
}

/// Always there, on one line.
pub(in crate::cli) const fn whole(name: &str) -> Column<'_> {
    Column { name, fit: Fit::Whole }
}

/// Always there, over several lines where it must.
pub(in crate::cli) const fn prose(name: &str) -> Column<'_> {
    Column { name, fit: Fit::Prose }
}

/// On one line, or left out; the largest rank first.
pub(in crate::cli) const fn spare(name: &str, rank: u8) -> Column<'_> {
    Column { name, fit: Fit::Spare(rank) }
}

/// The narrowest column of prose that can be read. What is longer without a blank is a payload or a path, and no word.
const READABLE: usize = 24;
/// The blanks around a column.
const PADDING: usize = 2;

pub(in crate::cli) struct Table {
    inner: comfy_table::Table,
    fits: Vec<Fit>,
}

/// An empty table.
pub(in crate::cli) fn table<const N: usize>(columns: [Column<'_>; N]) -> Table {
    let mut inner = comfy_table::Table::new();
    inner.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    inner.set_header(columns.map(|column| column.name.to_uppercase()));
    Table { inner, fits: columns.map(|column| column.fit).to_vec() }
}

impl Table {
    pub(in crate::cli) fn add_row(&mut self, row: impl Into<Row>) {
        // What is no word of ours may have anything in it; a cell that has loses at most its colour.
        let safe = |cell: &Cell| match screen::safe(&cell.content()) {
            Cow::Borrowed(_) => cell.clone(),
            Cow::Owned(text) => Cell::new(text),
        };
        self.inner.add_row(row.into().cell_iter().map(safe).collect::<Vec<Cell>>());
    }

    /// Prints it as wide as it is for a program, and to fit for a person; without the blanks that fill the last column.
    pub(in crate::cli) fn print(mut self) -> Result<()> {
        if std::io::stdout().is_terminal() {
            self.fit(size().0);
        }
        put(&self.inner.trim_fmt())
    }

    /// Prints it; a single row that has no room is turned on its side, so that nothing of it is left out.
    pub(in crate::cli) fn print_one(self) -> Result<()> {
        let room = if std::io::stdout().is_terminal() { size().0 } else { usize::MAX };
        if self.widths().iter().map(|width| width + PADDING).sum::<usize>() <= room {
            return self.print();
        }
        let cells = |row: &Row| row.cell_iter().cloned().collect::<Vec<Cell>>();
        let names = self.inner.header().map(cells).unwrap_or_default();
        let values = self.inner.row(0).map(cells).unwrap_or_default();
        let mut turned = comfy_table::Table::new();
        turned.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        for (name, value) in names.into_iter().zip(values) {
            turned.add_row([name, value]);
        }
        Self { inner: turned, fits: vec![Fit::Whole, Fit::Prose] }.print()
    }

    /// What each column would like.
    fn widths(&self) -> Vec<usize> {
        self.inner.column_max_content_widths().into_iter().map(usize::from).collect()
    }

    fn fit(&mut self, room: usize) {
        let wanted = self.widths();
        let least = |(fit, wanted): (&Fit, &usize)| match fit {
            Fit::Prose => READABLE.min(*wanted),
            Fit::Whole | Fit::Spare(_) => *wanted,
        };
        let least: Vec<usize> = self.fits.iter().zip(&wanted).map(least).collect();
        let fitted = fitted(&self.fits, &least, &wanted, room);
        for (column, width) in self.inner.column_iter_mut().zip(fitted) {
            let fixed = |width: usize| Width::Fixed(u16::try_from(width + PADDING).unwrap_or(u16::MAX));
            column.set_constraint(match width {
                Some(width) => ColumnConstraint::Absolute(fixed(width)),
                None => ColumnConstraint::Hidden,
            });
        }
    }
}

/// The width of every column, or that it is left out.
fn fitted(fits: &[Fit], least: &[usize], wanted: &[usize], room: usize) -> Vec<Option<usize>> {
    let mut kept: Vec<usize> = (0..fits.len()).collect();
    let total = |kept: &[usize], widths: &[usize]| {
        kept.iter().map(|index| widths[*index].saturating_add(PADDING)).sum::<usize>()
    };
    while total(&kept, least) > room {
        let spared = kept.iter().copied().filter(|index| matches!(fits[*index], Fit::Spare(_)));
        let Some(gone) = spared.max_by_key(|index| fits[*index]) else { break };
        kept.retain(|index| *index != gone);
    }
    let mut widths = wanted.to_vec();
    while total(&kept, &widths) > room {
        let wide = kept.iter().copied().filter(|index| widths[*index] > least[*index]);
        let Some(widest) = wide.max_by_key(|index| widths[*index]) else { break };
        widths[widest] -= 1;
    }
    (0..fits.len()).map(|index| kept.contains(&index).then_some(widths[index])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_gives_way_then_what_can_be_spared_and_the_rest_stays_whole() {
        let fits = [Fit::Whole, Fit::Spare(1), Fit::Prose, Fit::Spare(2)];
        let (least, wanted) = ([9, 5, 10, 6], [9, 5, 50, 6]);
        let at = |room| fitted(&fits, &least, &wanted, room);
        assert_eq!(at(200), [Some(9), Some(5), Some(50), Some(6)]);
        assert_eq!(at(78), [Some(9), Some(5), Some(50), Some(6)]);
        assert_eq!(at(77), [Some(9), Some(5), Some(49), Some(6)]);
        assert_eq!(at(38), [Some(9), Some(5), Some(10), Some(6)]);
        assert_eq!(at(37), [Some(9), Some(5), Some(17), None]);
        assert_eq!(at(25), [Some(9), None, Some(12), None]);
        assert_eq!(at(3), [Some(9), None, Some(10), None], "wider than the window rather than broken");
    }
}
