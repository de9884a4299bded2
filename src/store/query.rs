//! A statement that could not be run, and what it was for.

use deadpool_postgres::PoolError;

#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    #[error("no connection to the database")]
    Connect(#[from] PoolError),
    #[error("could not {operation}")]
    Query { operation: &'static str, source: tokio_postgres::Error },
}

pub(super) fn failed(operation: &'static str) -> impl FnOnce(tokio_postgres::Error) -> QueryError {
    move |source| QueryError::Query { operation, source }
}
