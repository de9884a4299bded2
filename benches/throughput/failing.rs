//! A batch in which every row fails for good at its first try.

use super::{
    binary::Binary,
    run::{Ends, Run, run_one_batch},
};
use crate::ground::Ground;
use anyhow::Result;

/// As shipped, the handler `fail` has its rows tried again.
const NO_RETRY: &str = "handlers.fail.failure=final";

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, rows: i32) -> Result<Run> {
    run_one_batch(ground, musterd, rows, "fail", Ends::Failed, &[NO_RETRY]).await
}
