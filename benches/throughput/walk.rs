//! One large batch of `noop` rows: how fast it is worked through, and what its inputs and outcomes take on disk.

use super::{
    binary::Binary,
    files,
    run::{Ends, Run, Work, run},
    server,
    submit::{Stored, submit},
};
use crate::ground::Ground;
use anyhow::Result;
use serde::Serialize;

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Walk {
    #[serde(flatten)]
    pub(crate) run: Run,
    pub(crate) submit: Stored,
    pub(crate) outcome_disk_bytes_per_row: f64,
}

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, rows: i32) -> Result<Walk> {
    let database = ground.database().await?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("small.ndjson");
    files::write_small(&file, rows)?;
    let (stored, batch) = submit(ground, musterd, &database, &file, rows).await?;
    let size = server::size(ground, &database).await?;
    let release = format!("musterd.release({batch})");
    let work = Work { rows, batches: 1, release, ends: Ends::Succeeded };
    let run = run(ground, musterd, &database, &work, &[]).await?;
    let grown = server::size(ground, &database).await? - size;
    ground.drop_database(database).await?;
    Ok(Walk { run, submit: stored, outcome_disk_bytes_per_row: grown / f64::from(rows) })
}
