//! What runs by the clock, beside the walk: it repairs by SQL only, never by call.

pub mod reconcile;
pub mod recovery;
pub mod registry;
pub mod retention;
pub mod sweep;
pub mod timeouts;
