//! How much waits in the queues, for metrics: through the indexes, with an end to every count. Never a look at rows.

use crate::metrics::{Depth, HorizonAge};
use deadpool_postgres::Object;
use tokio_postgres::Error;

/// Counts end here: a queue with more is deep, however much more it is.
const MOST: i64 = 10_000;

/// What waits in each of these queues.
pub async fn of(client: &Object, queues: &[String]) -> Result<Vec<Depth>, Error> {
    const SQL: &str = include_str!("sql/depths.sql");
    let statement = client.prepare_cached(SQL).await?;
    let rows = client.query(&statement, &[&queues, &MOST]).await?;
    let depth = |row: &tokio_postgres::Row| Depth {
        queue: row.get("queue"),
        rows: row.get("rows"),
        tasks_queued: row.get("tasks_queued"),
        tasks_scheduled: row.get("tasks_scheduled"),
        oldest_due: row.get::<_, Option<f64>>("oldest_due").unwrap_or_default().max(0.0),
    };
    Ok(rows.iter().map(depth).collect())
}

/// Which session holds the xmin horizon of this database, and for how long; `None` when none does.
pub async fn horizon(client: &Object) -> Result<Option<HorizonAge>, Error> {
    const SQL: &str = "SELECT a.pid, EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.xact_start)::float8 AS seconds
          FROM pg_catalog.pg_stat_activity a
         WHERE a.backend_xmin IS NOT NULL AND a.xact_start IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
           AND (a.datname = pg_catalog.current_database() OR a.backend_type = 'walsender')
         ORDER BY pg_catalog.age(a.backend_xmin) DESC, a.xact_start LIMIT 1";
    let statement = client.prepare_cached(SQL).await?;
    let row = client.query_opt(&statement, &[]).await?;
    Ok(row.map(|row| HorizonAge { pid: row.get(0), seconds: row.get(1) }))
}
