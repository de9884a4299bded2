//! Errors and panics as text for one line of a log or of a reply; what quotes rows is left out.

use std::any::Any;

/// An error with everything that caused it, on one line.
pub fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = own_words(error);
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = own_words(inner);
        // What a pool says of a connection that failed is about the pool's own doings; the cause comes after it.
        let is_the_pools = inner.is::<deadpool_postgres::PoolError>() && inner.source().is_some();
        if !is_the_pools && !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// What PostgreSQL says, without its DETAIL, which quotes rows.
fn own_words(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref::<tokio_postgres::error::DbError>() {
        Some(said) => format!("{}: {}", said.severity(), said.message()),
        None => error.to_string(),
    }
}

/// What a panic said, when it said it in words.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_pool_are_left_out_and_the_cause_is_told() {
        #[derive(Debug, thiserror::Error)]
        #[error("no connection to sweep with")]
        struct Connect(#[from] deadpool_postgres::PoolError);
        let pool = deadpool_postgres::PoolError::Timeout(deadpool_postgres::TimeoutType::Wait);
        assert!(describe(&Connect(pool)).contains("Timeout"), "what has no cause says it itself");
    }
}
