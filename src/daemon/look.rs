//! What a scrape shows beside the counts: what is in hand, and what only the database knows.
//!
//! A scrape never waits long for it. While the database is away, the figures of the last look stay, with their time.

use crate::{
    error_text::describe,
    held::Held,
    metrics::Metrics,
    store::{Store, depths},
};
use futures::FutureExt;
use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::sync::Mutex;

/// Two scrapes within this time share one look.
const SHARED_FOR: Duration = Duration::from_secs(5);
/// A scrape waits no longer for the database than this.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Look {
    metrics: Metrics,
    store: Store,
    held: Held,
    last: Mutex<Option<Instant>>,
}

pub(super) fn install(metrics: &Metrics, store: &Store, held: &Held) {
    let look = Arc::new(Look {
        metrics: metrics.clone(),
        store: store.clone(),
        held: held.clone(),
        last: Mutex::default(),
    });
    metrics.on_scrape(move || {
        let look = Arc::clone(&look);
        async move { look.look().await }.boxed()
    });
}

impl Look {
    async fn look(&self) {
        self.metrics.blocks_held.set(self.held.blocks().len() as i64);
        self.metrics.tasks_held.set(self.held.tasks().len() as i64);
        // Another scrape is already querying; share its result.
        let Ok(mut last) = self.last.try_lock() else { return };
        if last.is_some_and(|last| last.elapsed() < SHARED_FOR) {
            return;
        }
        match tokio::time::timeout(PATIENCE, self.ask()).await {
            Ok(Ok(())) => *last = Some(Instant::now()),
            Ok(Err(error)) => tracing::debug!(error = describe(&*error), "the queues could not be looked at"),
            Err(_) => tracing::debug!("the queues could not be looked at in time"),
        }
    }

    async fn ask(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let client = self.store.general.get().await?;
        let queues = self.metrics.database.queues();
        let depths = depths::of(&client, &queues).await?;
        let horizon = depths::horizon(&client).await?;
        self.metrics.database.show(&depths, horizon);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.metrics.database.read_at.set(now.as_secs_f64());
        Ok(())
    }
}
