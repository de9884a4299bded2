//! What goes after the end: rows of batches, bodies and records of tasks, events; and held work that was abandoned.
//!
//! One replica at a time does a pass, in small transactions with rests between them, and every one of them may be the last: what is
//! half done the next pass finds. What one batch or its files refuse holds up only that batch.

mod config;
mod pass;

pub use config::{Config, Ended, Rule};
pub use pass::{Gone, Meter, Pass};

use crate::{
    metrics::Metrics,
    objects,
    periodic::{Periodic, Rhythm, Tally},
    store::{Store, retention},
};
use deadpool_postgres::PoolError;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A pass rests this many times as long as its steps take: a tenth of the time is its own.
const GENTLY: f64 = 9.0;
/// A whole walk through all tasks, which finds what ended late or was kept, is done this often.
const WALK_EVERY: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
pub struct Retention {
    pub store: Store,
    pub objects: objects::Store,
    pub metrics: Metrics,
    pub every: Duration,
    pub stop: CancellationToken,
}

#[derive(Debug, thiserror::Error)]
pub enum RetentionError {
    #[error("no connection to prune with")]
    Connect(#[from] PoolError),
    #[error("could not prune")]
    Query(#[from] tokio_postgres::Error),
    #[error("where the output files of a batch are")]
    Key(crate::objects::ObjectError),
}

impl Retention {
    /// Looks more often than passes are: after one that was cut off, another replica is not a whole period late.
    pub fn rhythm(every: Duration) -> Rhythm {
        Rhythm::Between(every / 8, every / 4)
    }
}

impl Periodic for Retention {
    const NAME: &'static str = "retention";
    type Error = RetentionError;

    async fn tick(&mut self) -> Result<Tally, RetentionError> {
        if !retention::begin_pass(&**self.store.general.get().await?, self.every).await? {
            return Ok(Tally(0));
        }
        let pass = Pass {
            store: self.store.clone(),
            objects: self.objects.clone(),
            metrics: self.metrics.clone(),
            rests: GENTLY,
            walk_every: WALK_EVERY,
            stop: self.stop.clone(),
            meter: Meter::default(),
        };
        Ok(Tally(pass.run().await?.total()))
    }
}
