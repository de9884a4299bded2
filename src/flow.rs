//! The walk of a row: submit, claim, run, batch the writes, complete. Stages meet in channel types, not in calls.

pub mod archive;
pub mod batcher;
pub mod claim;
pub mod complete;
pub mod enqueue;
pub mod export;
pub mod fiber;
pub mod input;
pub mod outputs;
pub mod pace;
pub mod rivals;
pub mod solo;
pub mod submit;
pub mod task;
pub mod watch;
pub mod writer;
