//! Keeps the registry of workers in Redis tidy: members that are no worker's name, and names of workers that are gone.
//!
//! A part of its own: any client of Redis may add members, and a registry full of them must not hold up the recovery.

use crate::{
    liveness::roll::{FIRST_PAGE, Roll},
    periodic::{Periodic, Tally},
    store::{Store, recovery},
    worker_id,
};
use deadpool_postgres::PoolError;
use std::time::{Duration, Instant};

/// A tick ends after this long; the next one goes on where it was.
const AT_MOST: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Tidy {
    pub store: Store,
    pub roll: Roll,
    /// Where the next tick begins.
    pub cursor: String,
}

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("no connection to ask which workers live")]
    Connect(#[from] PoolError),
    #[error("could not ask which workers live")]
    Query(#[from] tokio_postgres::Error),
}

impl Periodic for Tidy {
    const NAME: &'static str = "registry";
    type Error = RegistryError;

    async fn tick(&mut self) -> Result<Tally, RegistryError> {
        let until = Instant::now() + AT_MOST;
        let mut removed = 0;
        loop {
            let Ok(page) = self.roll.members(&self.cursor).await else {
                self.cursor = FIRST_PAGE.to_owned();
                return Ok(Tally(removed));
            };
            let (names, garbage): (Vec<_>, Vec<_>) =
                page.members.into_iter().partition(|member| worker_id::is_name(member.as_bytes()));
            removed += self.roll.remove(garbage).await.unwrap_or_default();
            removed +=
                self.clear_gone(names.into_iter().filter_map(|name| name.into_string()).collect()).await?;
            self.cursor = page.next;
            if self.cursor == FIRST_PAGE || Instant::now() >= until {
                return Ok(Tally(removed));
            }
        }
    }
}

impl Tidy {
    /// Names that do not live and do not beat: left over by a Redis that was away when they were declared dead.
    async fn clear_gone(&self, names: Vec<String>) -> Result<u64, RegistryError> {
        if names.is_empty() {
            return Ok(0);
        }
        let living = recovery::living(&self.store.general.get().await?, &names).await?;
        let mut cleared = 0;
        for id in names.iter().filter(|id| !living.contains(id)) {
            if matches!(self.roll.heartbeat_left(id).await, Ok(None)) {
                self.roll.clear(id).await;
                cleared += 1;
            }
        }
        Ok(cleared)
    }
}
