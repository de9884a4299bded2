//! Who is to blame for a process that ended before it had answered anything: the program, or what it was asked.
//!
//! A program that ends before it has read its input ends of itself. One that dies with two different rows since it answered
//! last does not work, whatever the row. One that has worked, and dies with a single row only, dies of that row; and so,
//! after a while, does one that has never worked and is given nothing else.

use std::collections::BTreeMap;

/// So often a program that has never answered may die with the same row, and no other, before that row is charged.
const LONE_DEATHS: u32 = 10;
/// Two are enough for a judgement; more need not be remembered.
const REMEMBERED: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    Request,
    Program,
}

/// The rows and tasks that processes died with since one answered last.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    deaths: BTreeMap<(i64, Option<i32>), u32>,
    has_worked: bool,
}

impl Suspects {
    pub(super) fn program_works(&mut self) {
        self.has_worked = true;
        self.deaths.clear();
    }

    pub(super) fn judge(&mut self, request: (i64, Option<i32>), had_read: bool) -> Blame {
        if !had_read {
            return Blame::Program;
        }
        if self.deaths.len() < REMEMBERED || self.deaths.contains_key(&request) {
            *self.deaths.entry(request).or_default() += 1;
        }
        let deaths = self.deaths.get(&request).copied().unwrap_or_default();
        match self.deaths.len() {
            1 if self.has_worked || deaths >= LONE_DEATHS => Blame::Request,
            _ => Blame::Program,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_dies_with_everything_is_to_blame_and_one_row_for_its_own_death() {
        let mut suspects = Suspects::default();
        assert_eq!(suspects.judge((1, Some(1)), false), Blame::Program, "it read nothing");
        assert_eq!(suspects.judge((1, Some(1)), true), Blame::Program, "it has never worked");
        assert_eq!(suspects.judge((1, Some(2)), true), Blame::Program);
        for _ in 0..100 {
            assert_eq!(suspects.judge((1, Some(2)), true), Blame::Program, "two rows, one cause");
        }
        suspects.program_works();
        assert_eq!(suspects.judge((1, Some(2)), true), Blame::Request);
        assert_eq!(suspects.judge((1, Some(2)), true), Blame::Request);
        assert_eq!(suspects.judge((1, Some(3)), true), Blame::Program);
    }

    #[test]
    fn a_lone_row_is_charged_in_the_end() {
        let mut suspects = Suspects::default();
        for _ in 1..LONE_DEATHS {
            assert_eq!(suspects.judge((1, Some(1)), true), Blame::Program);
        }
        assert_eq!(suspects.judge((1, Some(1)), true), Blame::Request);
    }
}
