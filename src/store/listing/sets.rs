//! Which rows there are, found as sets of lines: outcomes, failures, blocks and the cursor. No value is read here.

use super::Which;
use crate::{lines::Lines, store::moment};
use jiff::Timestamp;
use tokio_postgres::{Row, types::ToSql};

/// Lines that have their fate in common.
#[derive(Clone, Debug)]
pub(super) struct Set {
    pub(super) state: &'static str,
    pub(super) lines: Lines,
    pub(super) attempt: Option<i32>,
    /// Of a single line.
    pub(super) error: Option<String>,
    pub(super) finished_at: Option<Timestamp>,
    pub(super) started_at: Option<Timestamp>,
    pub(super) run_seconds: Option<f32>,
    /// The outcome that has their results, by its first line.
    pub(super) outcome: Option<i32>,
    /// The generation of a failure, if it may be history.
    pub(super) generation: Option<i32>,
}

impl Set {
    pub(super) fn read(row: &Row) -> Self {
        Self {
            state: state(row.get("state")),
            lines: row.get("lines"),
            attempt: row.get("attempt"),
            error: row.get("error"),
            finished_at: moment::maybe(row, "finished_at"),
            started_at: moment::maybe(row, "started_at"),
            run_seconds: row.get("run_seconds"),
            outcome: row.get("outcome"),
            generation: row.try_get("generation").ok(),
        }
    }
}

/// The state of a row by its name.
fn state(name: &str) -> &'static str {
    match name {
        "queued" => "queued",
        "running" => "running",
        "succeeded" => "succeeded",
        "failed" => "failed",
        _ => "aborted",
    }
}

impl Which {
    /// The statement that finds the sets: $1 batch, $2 first line, $3 how many rows; $4 the state, the group or the generation.
    pub(super) fn sql(self) -> &'static str {
        match self {
            Self::All => include_str!("../sql/rows_all.sql"),
            Self::Queued | Self::Running => include_str!("../sql/rows_open.sql"),
            Self::Succeeded => include_str!("../sql/rows_succeeded.sql"),
            Self::Failed => {
                "SELECT 'failed' AS state, NULL::int AS outcome, f.attempt, f.error, f.finished_at, f.started_at, f.run_seconds,
                        pg_catalog.int4multirange(pg_catalog.int4range(f.line, f.line + 1)) AS lines
                   FROM musterd.failures f
                  WHERE f.batch_id = $1 AND f.line >= $2::int
                  ORDER BY f.line LIMIT $3::bigint"
            }
            // By the index alone, until the lines are known.
            Self::InGroup(_) => {
                "SELECT 'failed' AS state, NULL::int AS outcome, f.attempt, f.error, f.finished_at, f.started_at, f.run_seconds,
                        pg_catalog.int4multirange(pg_catalog.int4range(f.line, f.line + 1)) AS lines
                   FROM (SELECT g.line FROM musterd.failures g
                          WHERE g.batch_id = $1 AND g.line >= $2::int AND g.error_group = $4::int
                          ORDER BY g.line LIMIT $3::bigint) g
                   JOIN musterd.failures f ON f.batch_id = $1 AND f.line = g.line
                  ORDER BY f.line"
            }
            Self::FailedIn(_) => {
                "SELECT 'failed' AS state, NULL::int AS outcome, f.attempt, f.error, f.finished_at, f.started_at, f.run_seconds,
                        pg_catalog.int4multirange(pg_catalog.int4range(f.line, f.line + 1)) AS lines, f.generation
                   FROM (SELECT a.attempt, a.error, a.finished_at, a.started_at, a.run_seconds, a.line, a.generation FROM musterd.failures a
                          WHERE a.batch_id = $1 AND a.line >= $2::int AND a.generation = $4::int
                         UNION ALL
                         SELECT a.attempt, a.error, a.finished_at, a.started_at, a.run_seconds, a.line, a.generation FROM musterd.failures_history a
                          WHERE a.batch_id = $1 AND a.line >= $2::int AND a.generation = $4::int) f
                  ORDER BY f.line LIMIT $3::bigint"
            }
            Self::Aborted => include_str!("../sql/rows_aborted.sql"),
        }
    }

    /// What $4 is, where there is one.
    pub(super) fn fourth(&self) -> Option<&(dyn ToSql + Sync)> {
        match self {
            Self::Queued => Some(&"queued"),
            Self::Running => Some(&"running"),
            Self::InGroup(group) => Some(&group.0),
            Self::FailedIn(generation) => Some(generation),
            _ => None,
        }
    }
}

/// The first `most` lines from `from` on that are in any of `sets`, each with the last of the sets that has it.
pub(super) fn choose(sets: &[Set], from: i32, most: usize) -> Vec<(i32, usize)> {
    let mut ranges: Vec<(i32, i32, usize)> = Vec::new();
    for (index, set) in sets.iter().enumerate() {
        let behind = set.lines.ranges().iter().filter(|range| range.end > from);
        ranges.extend(behind.map(|range| (range.start.max(from), range.end, index)));
    }
    ranges.sort_unstable();
    let mut chosen: Vec<(i32, usize)> = Vec::new();
    for (start, end, index) in ranges {
        // Lines that an earlier range has, too: the later set knows more about them.
        let known = chosen.partition_point(|(line, _)| *line < start);
        let overlap = chosen[known..].iter_mut().take_while(|(line, _)| *line < end);
        overlap.for_each(|(_, owner)| *owner = index.max(*owner));
        let next = chosen.last().map_or(start, |(last, _)| start.max(last + 1));
        let room = most - chosen.len();
        chosen.extend((next..end).take(room).map(|line| (line, index)));
        if room == 0 && known == chosen.len() {
            break;
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn set(lines: Lines) -> Set {
        Set {
            state: "queued",
            lines,
            attempt: None,
            error: None,
            finished_at: None,
            started_at: None,
            run_seconds: None,
            outcome: None,
            generation: None,
        }
    }

    #[test]
    fn of_two_sets_that_have_a_line_the_later_one_counts() {
        let sets =
            [set(Lines::span(1, 6)), set([3, 9].into_iter().collect()), set([3, 5].into_iter().collect())];
        assert_eq!(choose(&sets, 2, 5), [(2, 0), (3, 2), (4, 0), (5, 2), (6, 0)]);
        assert_eq!(choose(&sets, 2, 2), [(2, 0), (3, 2)]);
        assert_eq!(choose(&sets, 6, 9), [(6, 0), (9, 1)]);
        assert_eq!(choose(&sets, 10, 9), []);
    }

    proptest! {
        #[test]
        fn the_first_lines_are_chosen_each_once(
            sets in prop::collection::vec(prop::collection::vec(1..80_i32, 0..40), 0..6), from in 1..80_i32, most in 1..50_usize,
        ) {
            let sets: Vec<Set> = sets.into_iter().map(|lines| set(lines.into_iter().collect())).collect();
            let mut owners = BTreeMap::new();
            for (index, set) in sets.iter().enumerate() {
                set.lines.iter().filter(|line| *line >= from).for_each(|line| _ = owners.insert(line, index));
            }
            let expected: Vec<(i32, usize)> = owners.into_iter().take(most).collect();
            prop_assert_eq!(choose(&sets, from, most), expected);
        }
    }
}
