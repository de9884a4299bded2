//! The heartbeat: a thread and a runtime of its own, so that no handler, however busy, can keep it from beating.
//!
//! It ignores the shutdown and ends after everything it vouches for. Each beat says "alive" in PostgreSQL and in Redis;
//! beside them it copies what is in hand to Redis. A worker that finds itself declared dead gives up all it holds and
//! begins again under another name.

mod beats;
mod tracking;
mod witness;

use super::{
    Config, RedisConfig, identity::Identity, lease::Lease, presence::Presence, roll::Roll, session::Session,
};
use crate::{
    health::Health,
    held::Held,
    metrics::Metrics,
    store::{connect::Target, workers::Enlisted},
};
use std::time::Duration;
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
};
use tokio_util::sync::CancellationToken;

/// How long a blocked thread may keep the others from their sockets.
const BETWEEN_WAKES: Duration = Duration::from_secs(1);

/// Everything the heartbeat needs; cheap to clone, so that it can be started again.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    pub config: Config,
    pub redis: RedisConfig,
    pub presence: Presence,
    pub target: Target,
    pub enlisted: Enlisted,
    pub identity: Identity,
    pub lease: Lease,
    pub session: Session,
    pub held: Held,
    pub health: Health,
    pub metrics: Metrics,
    /// The worker is going: the beats say so.
    pub drain: CancellationToken,
}

#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    #[error("the heartbeat's thread could not be started")]
    Thread { source: std::io::Error },
    #[error("redis.url")]
    Redis(#[from] super::redis::RedisError),
    #[error("the heartbeat's thread panicked")]
    Panicked,
}

impl Heartbeat {
    /// Beats until `stop`, or until this future is dropped: the thread does not outlive what it vouches for.
    pub async fn run(self, stop: CancellationToken) -> Result<(), HeartbeatError> {
        let stop = stop.child_token();
        let _ends_with_us = stop.clone().drop_guard();
        let (report, ended) = oneshot::channel();
        let others = Handle::current();
        let thread = move || {
            // The receiver is gone only when the whole process is going.
            let _ = report.send(self.run_here(stop, &others));
        };
        std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(thread)
            .map_err(|source| HeartbeatError::Thread { source })?;
        ended.await.unwrap_or(Err(HeartbeatError::Panicked))
    }

    fn run_here(self, stop: CancellationToken, others: &Handle) -> Result<(), HeartbeatError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| HeartbeatError::Thread { source })?;
        runtime.block_on(self.live(stop, others))
    }

    async fn live(self, stop: CancellationToken, others: &Handle) -> Result<(), HeartbeatError> {
        let roll = if self.config.backend.uses_redis(&self.redis) {
            Some(Roll::open(&self.redis, &self.presence, self.config.heartbeat_ttl)?)
        } else {
            None
        };
        let (beaten, missing) = (Notify::new(), Notify::new());
        tokio::join!(
            beats::beat(&self, &beaten, &stop),
            witness::testify(&self, roll.as_ref(), &beaten, &missing, &stop),
            tracking::track(&self, roll.as_ref(), &missing, &stop),
            wake(others, &stop),
        );
        if let Some(roll) = roll {
            self.farewell(&roll).await;
        }
        Ok(())
    }

    /// Off the roll. The record of what is still in hand stays for the worker that recovers it; an empty one is gone by itself.
    async fn farewell(&self, roll: &Roll) {
        if let Err(error) = roll.strike(self.identity.id().as_str()).await {
            tracing::debug!(%error, "could not say goodbye to Redis");
        }
        roll.close().await;
    }
}

/// One thread of a runtime looks after the sockets and timers of all. When a handler blocks just that one, the idle threads do
/// not know, and the whole worker stands still; one that is woken takes over.
async fn wake(others: &Handle, stop: &CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(BETWEEN_WAKES) => {}
        }
        // To be run is all it is for.
        drop(others.spawn(std::future::ready(())));
    }
}
