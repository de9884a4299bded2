//! Flushes of single rows: each row is claimed, run and written by itself, one after the other.

use super::{
    binary::Binary,
    run::{Ends, Run, run_one_batch},
};
use crate::ground::Ground;
use anyhow::Result;

const ONE_BY_ONE: [&str; 4] =
    ["queues.default.fibers=1", "queues.default.block_size=1", "batcher.max_size=1", "batcher.capacity=1"];

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, rows: i32) -> Result<Run> {
    run_one_batch(ground, musterd, rows, "noop", Ends::Succeeded, &ONE_BY_ONE).await
}
