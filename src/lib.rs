//! Muster: large batches of work on PostgreSQL, every row accounted for.
//!
//! Read the walk of a row in [`flow`], the parts of the daemon in [`daemon`], and the map in ARCHITECTURE.md.

pub mod config;
pub mod secret;
pub mod signal;
pub mod telemetry;

// Vocabulary: depends on no other module.
pub mod backoff;
pub mod error_group;
pub mod error_text;
pub mod failpoint;
pub mod health;
pub mod json;
pub mod keep;
pub mod lines;
pub mod loopback;
pub mod metrics;
pub mod passwd;
pub mod periodic;
pub mod problems;
pub mod pulse;
pub mod queue;
pub mod renewed;
pub mod spans;
pub mod state;
pub mod tether;
pub mod traceparent;
pub mod worker_id;

// Doors: the only files that touch the outside.
pub mod embedded;
pub mod handler;
pub mod held;
pub mod liveness;
pub mod objects;
pub mod store;

// The walk, and what runs beside it.
pub mod flow;
pub mod upkeep;

// On top.
pub mod daemon;
pub mod doctor;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod http;
pub mod supervisor;
pub mod why;
