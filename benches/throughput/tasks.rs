//! A full queue of `noop` tasks, drained by one worker, beside the queue table with as many rows.

use super::{
    binary::Binary,
    classic,
    drain::{Enqueue, Speed, drain, fill},
};
use crate::ground::Ground;
use anyhow::Result;
use serde::Serialize;

/// The four ways of one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Tasks {
    pub(crate) classic: Speed,
    pub(crate) shipped: Speed,
    pub(crate) fibers_64: Speed,
    pub(crate) one_by_one: Speed,
}

const FIBERS_64: &str = "queues.default.fibers=64";

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, tasks: i32) -> Result<Tasks> {
    Ok(Tasks {
        classic: classic::measure(ground, tasks).await?.into(),
        shipped: drained(ground, musterd, tasks, Enqueue::SetWise, &[]).await?,
        fibers_64: drained(ground, musterd, tasks, Enqueue::SetWise, &[FIBERS_64]).await?,
        one_by_one: drained(ground, musterd, tasks, Enqueue::OneByOne, &[]).await?,
    })
}

async fn drained(
    ground: &Ground,
    musterd: &Binary,
    tasks: i32,
    how: Enqueue,
    settings: &[&str],
) -> Result<Speed> {
    let database = ground.database().await?;
    fill(&database, "noop", tasks, how).await?;
    let speed = drain(ground, musterd, &database, tasks, settings).await?;
    ground.drop_database(database).await?;
    Ok(speed)
}
