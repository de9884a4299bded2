//! Rate limits that all replicas share: a row per handler, with the moment of the next free turn.

use deadpool_postgres::ClientWrapper;
use std::time::Duration;
use tokio_postgres::Error;

/// Reserves the next turn, and says how long it is until then. Turns that nobody took are gone: there are no bursts.
pub async fn reserve(client: &ClientWrapper, name: &str, interval: Duration) -> Result<Duration, Error> {
    // Losing a reservation in a crash of the server lets one request too many through; waiting for every one costs more.
    const SQL: &str = "WITH s AS MATERIALIZED (
            SELECT pg_catalog.set_config('synchronous_commit', 'off', true))
        INSERT INTO musterd.rate_limits AS r (name, next_at)
        SELECT $1, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => $2) FROM s
            ON CONFLICT (name) DO UPDATE
           SET next_at = GREATEST(r.next_at, pg_catalog.clock_timestamp()) + pg_catalog.make_interval(secs => $2)
        RETURNING (EXTRACT(EPOCH FROM r.next_at - pg_catalog.clock_timestamp()) - $2)::float8";
    let statement = client.prepare_cached(SQL).await?;
    let wait: f64 = client.query_one(&statement, &[&name, &interval.as_secs_f64()]).await?.get(0);
    Ok(Duration::try_from_secs_f64(wait).unwrap_or_default())
}
