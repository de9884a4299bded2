//! Muster: large batches of work on PostgreSQL, every row accounted for.
