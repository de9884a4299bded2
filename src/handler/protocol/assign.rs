//! Who gets which outcome: every row that was asked for gets exactly one, and no other row gets any.

use super::RowsReply;
use crate::handler::Outcome;
use std::collections::{HashMap, hash_map::Entry};

/// What a reply said beside the point; worth a line in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Lines answered more than once: the first answer counts.
    pub duplicate: usize,
    /// Lines that were not asked for.
    pub unknown: usize,
    /// Entries without a readable line.
    pub unreadable: usize,
    /// Lines without an answer: another try.
    pub missing: usize,
}

impl Leftovers {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// The outcome of every line of `asked`, in that order.
pub fn assign(asked: impl IntoIterator<Item = i32>, reply: RowsReply) -> (Vec<(i32, Outcome)>, Leftovers) {
    let mut leftovers = Leftovers { unreadable: reply.unreadable, ..Leftovers::default() };
    let mut answered: HashMap<i32, Outcome> = HashMap::with_capacity(reply.rows.len());
    for (line, outcome) in reply.rows {
        match answered.entry(line) {
            Entry::Occupied(_) => leftovers.duplicate += 1,
            Entry::Vacant(place) => {
                place.insert(outcome);
            }
        }
    }
    let assigned: Vec<(i32, Outcome)> = asked
        .into_iter()
        .map(|line| {
            let outcome = answered.remove(&line).or_else(|| reply.others.clone()).unwrap_or_else(|| {
                leftovers.missing += 1;
                Outcome::Retry { error: "no outcome for this line in the reply".into(), after: None }
            });
            (line, outcome)
        })
        .collect();
    leftovers.unknown = answered.len();
    (assigned, leftovers)
}
