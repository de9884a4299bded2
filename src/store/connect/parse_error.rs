//! What is wrong with a connection string, and what to write instead; a value is never quoted.

use super::params::Params;

/// The parameters we know; what libpq has beyond them is refused rather than ignored.
const KNOWN: &[&str] = &[
    "user",
    "password",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "options",
    "application_name",
    "connect_timeout",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "ssl",
    "sslnegotiation",
    "channel_binding",
    "target_session_attrs",
    "load_balance_hosts",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
];

/// A connection string that cannot be used; says what to change, never quotes a value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    #[error("the connection string is empty: write postgres://user@host/database")]
    Empty,
    #[error(
        "the connection string is neither a postgres:// URL nor key=value pairs: quote values with spaces in '…'"
    )]
    Pairs,
    #[error("a quoted value of the connection string does not end: close it with '")]
    Quote,
    #[error("the URL has an @ or / too many: write %40 for @ and %2F for / in user and password")]
    Unencoded,
    #[error("a %-sequence of the URL is not valid: write %25 for a percent sign")]
    Encoding,
    #[error("a host of the URL is not valid: an IPv6 address is written [::1] or [::1]:5432")]
    Host,
    #[error("after the ? of the URL key=value is expected: write %3F for a ? in user and password")]
    Query,
    #[error("unknown parameter in the connection string{}", suggestion(.like))]
    Unknown { like: Option<&'static str> },
    #[error("{key} is not valid: use {use_instead}")]
    Invalid { key: &'static str, use_instead: &'static str },
    #[error("a value of the connection string is not valid: correct the one named here")]
    Driver {
        #[from]
        source: tokio_postgres::Error,
    },
}

fn suggestion(like: &Option<&'static str>) -> String {
    match like {
        Some(key) => format!(": did you mean {key}?"),
        None => format!(": known are {}", KNOWN.join(", ")),
    }
}

/// The unknown key itself is not shown: it may be the tail of a password with a space in it.
pub(super) fn refuse_unknown(params: &Params) -> Result<(), ParseError> {
    let Some(unknown) = params.keys().find(|key| !KNOWN.contains(key)) else { return Ok(()) };
    let near = |known: &&&str| strsim::damerau_levenshtein(unknown, known) <= 2;
    Err(ParseError::Unknown { like: KNOWN.iter().find(near).copied() })
}
