//! Whose fault an error of PostgreSQL is: decided by SQLSTATE, never by text.

use tokio_postgres::Error;

/// What to do about an error of one of our own statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A value of one row cannot be stored: find the row.
    Row,
    /// The schema or the rights are wrong: blame no row, keep everything, call a person.
    Systemic,
    /// The connection or a resource: the same thing again, later.
    Transient,
    /// Another transaction is in the way, or a statement takes too long: of a group, one member may be the cause. Take it
    /// apart.
    Busy,
}

/// The tables in which no value of a row can collide with another's: a refusal there is a fault of ours, or of the disk.
const LEDGER: [&str; 4] = ["chunks", "blocks", "outcomes", "failures"];

pub fn of(error: &Error) -> Fault {
    match error.code() {
        Some(state) if matches!(state.code(), "23505" | "23P01") && is_of_ledger(error) => Fault::Systemic,
        Some(state) => of_sqlstate(state.code()),
        // No SQLSTATE: either the connection broke, or we could not even say what we wanted.
        None if error.is_closed() || caused_by_io(error) => Fault::Transient,
        None => Fault::Systemic,
    }
}

fn is_of_ledger(error: &Error) -> bool {
    let database = error.as_db_error();
    database.and_then(|db| db.table()).is_some_and(|table| LEDGER.contains(&table))
}

fn of_sqlstate(state: &str) -> Fault {
    match state {
        "40001" | "40P01" | "55P03" | "57014" => Fault::Busy,
        // Read-only: a standby being promoted, or a disk being saved. It passes.
        "25006" => Fault::Transient,
        "23503" | "XX001" | "XX002" => Fault::Systemic,
        "2D000" | "P0001" => Fault::Row,
        _ => match state.get(..2).unwrap_or_default() {
            "08" | "53" | "57" | "58" | "26" | "XX" | "F0" => Fault::Transient,
            "42" | "28" | "3D" | "3F" | "0A" | "25" | "2B" | "55" => Fault::Systemic,
            _ => Fault::Row,
        },
    }
}

/// Whether the session ended with this error: then the reply to a COMMIT may be what was lost.
pub fn is_of_connection(error: &Error) -> bool {
    error.code().is_none_or(|state| state.code().starts_with("57P") || state.code().starts_with("08"))
}

/// What the database said, with its SQLSTATE. Without the detail, which quotes rows.
pub fn words(error: &Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} (SQLSTATE {})", db.message(), db.code().code()),
        None => crate::error_text::describe(error),
    }
}

/// Whether stored data cannot be read: asking again would not help.
pub fn is_of_data(error: &Error) -> bool {
    error.code().is_some_and(|state| {
        let state = state.code();
        state.starts_with("22") || state.starts_with("54") || matches!(state, "XX001" | "XX002")
    })
}

fn caused_by_io(error: &Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        if inner.is::<std::io::Error>() {
            return true;
        }
        cause = inner.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_its_culprit() {
        let expected = [
            (
                Fault::Row,
                &["22P05", "22P02", "22003", "23514", "23502", "23505", "54000", "21000", "P0001", "ZZ999"][..],
            ),
            (Fault::Systemic, &["42P01", "42703", "42501", "23503", "28000", "3F000", "XX001", "55000"][..]),
            (Fault::Busy, &["40001", "40P01", "55P03", "57014"][..]),
            (Fault::Transient, &["57P01", "08006", "53100", "53300", "25006", "XX000"][..]),
        ];
        for (fault, states) in expected {
            for state in states {
                assert_eq!(of_sqlstate(state), fault, "{state}");
            }
        }
    }
}
