//! Says "alive" in Redis with every beat in PostgreSQL, and beside it: a Redis that is slow to answer, while a master is
//! replaced say, must not hold up the beats that count.

use super::{Heartbeat, Roll};
use crate::worker_id::WorkerId;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Beats whenever `beaten` says so; several that came during one call to Redis are one. Tells `missing` when the set of what
/// is in hand has to be written again.
pub(super) async fn testify(
    heart: &Heartbeat,
    roll: Option<&Roll>,
    beaten: &Notify,
    missing: &Notify,
    stop: &CancellationToken,
) {
    let Some(roll) = roll else { return };
    let mut name = heart.identity.id();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = beaten.notified() => {}
        }
        let id = heart.identity.id();
        if id != name {
            forget(roll, &name).await;
            name = id;
        }
        beat(heart, roll, missing, &name).await;
    }
}

/// As long as we have the right to: a worker that cannot reach PostgreSQL can finish nothing, and must not keep its blocks
/// from those who can.
async fn beat(heart: &Heartbeat, roll: &Roll, missing: &Notify, id: &WorkerId) {
    if !heart.lease.is_valid() {
        return;
    }
    let config = &heart.config;
    match roll.beat(id, config.heartbeat_ttl, config.rows_ttl).await {
        // The set has run out or was emptied: written again if there is anything to write.
        Ok(false) => missing.notify_one(),
        Ok(true) => {}
        Err(error) => tracing::debug!(%error, "no heartbeat in Redis"),
    }
}

/// We go on under another name.
async fn forget(roll: &Roll, old: &WorkerId) {
    if let Err(error) = roll.strike(old.as_str()).await {
        tracing::debug!(%error, "the old name is still on the roll");
    }
}
