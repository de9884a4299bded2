//! A statement that could not be run, and what it was for.

use deadpool_postgres::PoolError;

#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    #[error("no connection to the database")]
    Connect(#[from] PoolError),
    #[error("could not {operation}")]
    Query { operation: &'static str, source: tokio_postgres::Error },
}

impl QueryError {
    /// What the database said.
    pub fn database(&self) -> Option<&tokio_postgres::Error> {
        match self {
            Self::Query { source, .. } => Some(source),
            Self::Connect(_) => None,
        }
    }
}

pub(super) fn failed(operation: &'static str) -> impl FnOnce(tokio_postgres::Error) -> QueryError {
    move |source| QueryError::Query { operation, source }
}
