//! Rate limits that all replicas share: a row per handler, with the moment of the next free turn.

use deadpool_postgres::ClientWrapper;
use std::time::Duration;
use tokio_postgres::Error;

/// What became of a request for a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It comes after this time, and belongs to the caller.
    Reserved(Duration),
    /// The next one that is free is further away than the caller waits for; none was reserved.
    TooFar(Duration),
}

/// No turn is ever reserved further ahead than this.
pub const FURTHEST: Duration = Duration::from_secs(1);

/// Reserves the next turn if it comes within `most`, and within [`FURTHEST`]. Turns that were not taken are gone: there are no bursts.
///
/// A turn that is further ahead was reserved before the server's clock was set back, or by a slower limit: it does not count. A row that
/// another session has locked is not waited for.
pub async fn reserve(
    client: &ClientWrapper,
    name: &str,
    interval: Duration,
    most: Duration,
) -> Result<Turn, Error> {
    // Losing a reservation in a crash of the server lets one request too many through; waiting for every one costs more.
    const SQL: &str = "WITH s AS MATERIALIZED (
            SELECT pg_catalog.set_config('synchronous_commit', 'off', true), pg_catalog.set_config('lock_timeout', '500', true),
                   pg_catalog.clock_timestamp() AS now, pg_catalog.make_interval(secs => $2) AS step),
        reserved AS (
            INSERT INTO musterd.rate_limits AS r (name, next_at)
            SELECT $1, s.now + s.step FROM s
                ON CONFLICT (name) DO UPDATE
               SET next_at = CASE WHEN r.next_at > EXCLUDED.next_at + pg_catalog.make_interval(secs => $4::float8 + 1) THEN EXCLUDED.next_at
                                  ELSE GREATEST(r.next_at + pg_catalog.make_interval(secs => $2), EXCLUDED.next_at) END
             WHERE r.next_at <= EXCLUDED.next_at + pg_catalog.make_interval(secs => $3::float8 - $2)
                OR r.next_at > EXCLUDED.next_at + pg_catalog.make_interval(secs => $4 + 1)
            RETURNING r.next_at)
        SELECT EXTRACT(EPOCH FROM r.next_at - s.now)::float8 - $2 AS reserved,
               (SELECT EXTRACT(EPOCH FROM l.next_at - s.now)::float8 FROM musterd.rate_limits l WHERE l.name = $1) AS free
          FROM s LEFT JOIN reserved r ON true";
    let statement = client.prepare_cached(SQL).await?;
    let seconds = [interval, most.min(FURTHEST), FURTHEST].map(|length| length.as_secs_f64());
    let row = client.query_one(&statement, &[&name, &seconds[0], &seconds[1], &seconds[2]]).await?;
    let wait = |column| {
        row.get::<_, Option<f64>>(column).map(|wait| Duration::try_from_secs_f64(wait).unwrap_or_default())
    };
    Ok(match wait("reserved") {
        Some(wait) => Turn::Reserved(wait),
        // The first turns of all are being reserved at this moment: their row is not to be seen yet.
        None => Turn::TooFar(wait("free").unwrap_or(FURTHEST).max(Duration::from_millis(50))),
    })
}
