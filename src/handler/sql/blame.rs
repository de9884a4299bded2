//! Whose fault an exception inside a procedure is, by its SQLSTATE; and how long limits of the server are taken for its
//! passing trouble.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// The server's trouble: shutting down, no room, read only, broken disk. It passes, and no attempt is charged.
    Server,
    /// A limit of the server (memory, locks, temporary files): either it is short of them just now, or the procedure always
    /// asks for too much.
    Limit,
    /// The procedure's own failure.
    Procedure,
}

/// The same list as `musterd.is_server_trouble`.
pub(super) fn of(state: &str) -> Blame {
    match state {
        "53200" | "53400" => Blame::Limit,
        // A standby, or a server that is kept read only for a while.
        "25006" => Blame::Server,
        _ if state.starts_with("57P") => Blame::Server,
        _ => match state.get(..2).unwrap_or_default() {
            "08" | "53" | "58" => Blame::Server,
            _ => Blame::Procedure,
        },
    }
}

/// How often in a row a limit is taken for the server's trouble; after that every further time is a failed attempt.
pub(super) const PATIENCE: u32 = 3;

/// Tasks remembered at most.
const MOST: usize = 10_000;

/// How often in a row each task met a limit of the server, as far as this process knows.
#[derive(Debug, Default)]
pub(super) struct Limits(Mutex<HashMap<i64, u32>>);

impl Limits {
    /// The task met a limit; true when it is to be charged.
    pub(super) fn is_spent(&self, task: i64) -> bool {
        let mut met = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // They are counted again from the start: that costs each a few tries.
        if met.len() >= MOST {
            met.clear();
        }
        let times = met.entry(task).or_default();
        *times += 1;
        *times > PATIENCE
    }

    pub(super) fn forget(&self, task: i64) {
        let mut met = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !met.is_empty() {
            met.remove(&task);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_blame() {
        let expected = [
            (
                Blame::Server,
                &["25006", "08006", "08P01", "53100", "53300", "57P01", "57P03", "58030", "58P01"][..],
            ),
            (Blame::Limit, &["53200", "53400"][..]),
            (Blame::Procedure, &["P0001", "57014", "55P03", "23505", "25001", "2D000", "XX000", "42883"][..]),
        ];
        for (blame, states) in expected {
            for state in states {
                assert_eq!(of(state), blame, "{state}");
            }
        }
    }

    #[test]
    fn a_limit_is_charged_from_the_fourth_time_in_a_row() {
        let limits = Limits::default();
        assert_eq!([(); 5].map(|()| limits.is_spent(7)), [false, false, false, true, true]);
        assert!(!limits.is_spent(8));
        limits.forget(7);
        assert!(!limits.is_spent(7));
    }
}
