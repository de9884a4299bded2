//! Many small batches of `noop` rows, all of them there before the first may begin.

use super::{
    binary::Binary,
    run::{Ends, Run, Work, run},
};
use crate::ground::{Database, Ground, connect};
use anyhow::Result;

/// Rows of each batch.
pub(crate) const ROWS: i32 = 50;
/// Batches of one statement that submits them.
const AT_ONCE: i32 = 1_000;

pub(crate) async fn measure(ground: &Ground, musterd: &Binary, batches: i32) -> Result<Run> {
    let database = ground.database().await?;
    submit_paused(&database, batches).await?;
    let release = "musterd.resume_queue('default')".to_owned();
    let work = Work { rows: batches * ROWS, batches, release, ends: Ends::Succeeded };
    let run = run(ground, musterd, &database, &work, &[]).await?;
    ground.drop_database(database).await?;
    Ok(run)
}

/// The batches are open; their queue is paused.
async fn submit_paused(database: &Database, batches: i32) -> Result<()> {
    let client = connect(&database.url).await?;
    client.query_one("SELECT musterd.pause_queue('default')", &[]).await?;
    let sql = "SELECT count(musterd.submit_batch('noop', r.rows))
                 FROM (SELECT array_agg(jsonb_build_object('n', n)) AS rows FROM generate_series(1, $2::int) n) r,
                      generate_series(1, $1::int)";
    let mut missing = batches;
    while missing > 0 {
        let now = missing.min(AT_ONCE);
        client.query_one(sql, &[&now, &ROWS]).await?;
        missing -= now;
    }
    client.close().await;
    Ok(())
}
