//! What must hold in every state. Each is a property of the checker; the ones that a step breaks are noted at that step.

use super::{
    state::{State, first},
    walk::Walk,
};
use stateright::Property;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Promise {
    /// S4: a line waits, or is in one block, or is recorded; one of the three.
    EveryLineInOnePlace,
    /// S3: a line is recorded once in a generation.
    RecordedOnce,
    /// S2: a write has the current token of its block.
    CurrentToken,
    /// S5: what a worker hears was written is recorded under its token.
    ToldTheTruth,
    /// A worker's account of a block that it holds agrees with the database's.
    OneAccount,
    /// S9: a batch ends once in a generation.
    EndsOnce,
    /// S24: a batch ends only when every line is accounted for, with the counts of a recount.
    EndsBalanced,
    /// S3: nothing is written to a batch that has ended.
    EndedStays,
    /// S15: a worker that renews is not declared dead.
    LivingStayAlive,
    /// S16: only what a dead worker held is taken away.
    OnlyFromTheDead,
    /// L9: a worker that was declared dead starts nothing.
    DeadStartNothing,
}

impl Promise {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::EveryLineInOnePlace => "every line is in one place",
            Self::RecordedOnce => "a line is recorded once",
            Self::CurrentToken => "only the current token writes",
            Self::ToldTheTruth => "what is acknowledged is recorded",
            Self::OneAccount => "worker and database agree on a held block",
            Self::EndsOnce => "a batch ends once",
            Self::EndsBalanced => "a batch ends when every line is accounted for",
            Self::EndedStays => "an ended batch does not change",
            Self::LivingStayAlive => "no living worker is declared dead",
            Self::OnlyFromTheDead => "nothing is taken from the living",
            Self::DeadStartNothing => "a worker that is dead starts nothing",
        }
    }
}

/// Where each line is: not carved yet, in a block, or recorded.
fn every_line_is_in_one_place(state: &State) -> bool {
    (0..state.rows).all(|line| {
        let bit = 1 << line;
        let places = usize::from(line >= state.next)
            + state.blocks.iter().flatten().filter(|block| block.lines & bit != 0).count()
            + usize::from(state.succeeded & bit != 0)
            + usize::from(state.failed & bit != 0);
        // An abort drops lines, and so does a hand in the database.
        places == 1 || (places == 0 && (state.aborting || state.deleted & bit != 0))
    }) && state.recorded() & !first(state.rows) == 0
}

/// A property that the steps themselves watch.
macro_rules! noted {
    ($promise:ident) => {
        Property::always(Promise::$promise.name(), |_: &Walk, state: &State| {
            state.broken != Some(Promise::$promise)
        })
    };
}

pub(super) const ENDS: &str = "the batch ends";

pub(super) fn properties() -> Vec<Property<Walk>> {
    vec![
        Property::always(Promise::EveryLineInOnePlace.name(), |_, state: &State| {
            every_line_is_in_one_place(state)
        }),
        noted!(RecordedOnce),
        noted!(CurrentToken),
        noted!(ToldTheTruth),
        noted!(OneAccount),
        noted!(EndsOnce),
        noted!(EndsBalanced),
        noted!(EndedStays),
        noted!(LivingStayAlive),
        noted!(OnlyFromTheDead),
        noted!(DeadStartNothing),
        Property::sometimes(ENDS, |_, state: &State| state.has_ended()),
    ]
}
