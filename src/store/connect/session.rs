//! What a session of our own is pinned to, whatever the role's or the database's defaults are.
//!
//! A belt: every statement names its schema and every BEGIN its isolation. Not for sessions that run the users'
//! procedures (they may count on their role's settings), nor behind a transaction pooler: there a SET stays on a
//! server connection that another client gets next.

use std::time::Duration;

use tokio_postgres::Client;

/// The limits of a session; the rest of what is pinned is the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionSettings {
    /// The longest statement; zero for no limit.
    pub statement_timeout: Duration,
    /// The longest wait for one lock; zero for no limit.
    pub lock_timeout: Duration,
    /// The longest idle time inside a transaction; zero for no limit.
    pub idle_in_transaction_session_timeout: Duration,
    pub plans: Plans,
}

/// How the statements of a session are planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plans {
    /// As the planner thinks best.
    #[default]
    Usual,
    /// Once and by index. Left alone, the planner takes small tables with many dead tuples for worth reading whole: under a
    /// snapshot that is held elsewhere a flush of one row fell to a tenth.
    OnceByIndex,
}

impl SessionSettings {
    /// Pins the session of `client`, in one round trip.
    pub async fn apply(&self, client: &Client) -> Result<(), tokio_postgres::Error> {
        client.batch_execute(&self.to_sql()).await
    }

    fn to_sql(self) -> String {
        let plans = match self.plans {
            Plans::Usual => "",
            Plans::OnceByIndex => "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; ",
        };
        // PostgreSQL 17 has a limit on whole transactions: the end of a large batch takes as long as it takes.
        // Never a just-in-time compiler: the guesses about sets of lines start it, and it costs a hundred times the query.
        format!(
            "{plans}SET jit = off; \
             SET search_path = pg_catalog, pg_temp; \
             SET default_transaction_isolation = 'read committed'; \
             SET default_transaction_read_only = off; \
             SET timezone = 'UTC'; \
             SET statement_timeout = {}; \
             SET lock_timeout = {}; \
             SET idle_in_transaction_session_timeout = {}; \
             SELECT pg_catalog.set_config(s.name, '0', false) FROM pg_catalog.pg_settings s WHERE s.name = 'transaction_timeout'",
            milliseconds(self.statement_timeout),
            milliseconds(self.lock_timeout),
            milliseconds(self.idle_in_transaction_session_timeout),
        )
    }
}

/// PostgreSQL's unit and range. Zero means no limit there, so what is merely tiny becomes 1.
pub fn milliseconds(duration: Duration) -> i32 {
    let rounded = i32::try_from(duration.as_millis()).unwrap_or(i32::MAX);
    if duration.is_zero() { 0 } else { rounded.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_on_whole_transactions_is_lifted_where_there_is_one() {
        let none = Duration::ZERO;
        let settings = SessionSettings {
            statement_timeout: none,
            lock_timeout: none,
            idle_in_transaction_session_timeout: none,
            plans: Plans::Usual,
        };
        // By name in pg_settings: before PostgreSQL 17 a SET of it would be refused.
        let sql = settings.to_sql();
        assert!(
            sql.contains("set_config(s.name, '0', false)") && sql.contains("s.name = 'transaction_timeout'"),
            "{sql}"
        );
    }

    #[test]
    fn a_tiny_limit_is_not_no_limit() {
        assert_eq!(milliseconds(Duration::ZERO), 0);
        assert_eq!(milliseconds(Duration::from_micros(3)), 1);
        assert_eq!(milliseconds(Duration::from_millis(250)), 250);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX);
    }
}
