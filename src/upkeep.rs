//! What runs by the clock, beside the walk: it mends by SQL only, never by call.

pub mod sweep;
