//! Connections whose end is observed. When one backend crashes, PostgreSQL ends all others, and says so to their clients in
//! a WARNING before it closes the connection: an error of the driver carries nothing of it. The client of the backend that
//! crashed is the only one that hears nothing.

use super::{ConnectError, Connection, POOL_TIMEOUT, Target};
use deadpool::managed::{self, Metrics, PoolError, RecycleError, RecycleResult, TimeoutType};
use deadpool_postgres::{ClientWrapper, Runtime};
use futures::{StreamExt, stream};
use std::{
    num::NonZeroU32,
    ops::{Deref, DerefMut},
    sync::{Arc, OnceLock},
    time::Instant,
};
use tokio_postgres::{AsyncMessage, error::DbError, error::SqlState};
use tokio_util::sync::CancellationToken;

/// What is known of the end of a connection.
#[derive(Debug, Default)]
pub struct Ending {
    announced: OnceLock<Instant>,
    ended: OnceLock<Instant>,
    over: CancellationToken,
}

impl Ending {
    /// When the server said that it ends all sessions: another one crashed, or it is being shut down at once.
    pub fn announced_at(&self) -> Option<Instant> {
        self.announced.get().copied()
    }

    /// When the connection was found closed.
    pub fn ended_at(&self) -> Option<Instant> {
        self.ended.get().copied()
    }

    /// Waits for the end of the connection.
    pub async fn wait(&self) {
        self.over.cancelled().await;
    }
}

/// A client with what is known of its connection.
#[derive(Debug)]
pub struct Watched {
    client: ClientWrapper,
    ending: Arc<Ending>,
}

impl Watched {
    pub fn ending(&self) -> &Arc<Ending> {
        &self.ending
    }
}

impl Deref for Watched {
    type Target = ClientWrapper;

    fn deref(&self) -> &ClientWrapper {
        &self.client
    }
}

impl DerefMut for Watched {
    fn deref_mut(&mut self) -> &mut ClientWrapper {
        &mut self.client
    }
}

impl Target {
    /// Opens a connection that drives itself and whose end is observed.
    pub async fn watched(&self, application_name: &str) -> Result<Watched, ConnectError> {
        let (client, connection) = self.connect(application_name).await?;
        let ending = Arc::new(Ending::default());
        #[expect(clippy::disallowed_methods, reason = "ends with its client, which aborts it")]
        let driver = tokio::spawn(drive(connection, Observed(Arc::clone(&ending))));
        Ok(Watched { client: ClientWrapper::new(client, driver), ending })
    }

    /// A pool of at most `size` such connections. Connects only when one is asked for.
    pub fn watched_pool(
        &self,
        size: NonZeroU32,
        application_name: &'static str,
    ) -> Result<WatchedPool, ConnectError> {
        let maker = Maker { target: self.clone(), application_name };
        let pool = managed::Pool::builder(maker)
            .max_size(usize::try_from(size.get()).unwrap_or(usize::MAX))
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(POOL_TIMEOUT))
            .create_timeout(Some(self.patience()))
            .recycle_timeout(Some(POOL_TIMEOUT))
            .build()
            .map_err(|source| ConnectError::Pool { source })?;
        Ok(WatchedPool { pool, target: self.clone() })
    }
}

/// Marks the end however it comes: by the server, by the network, or because the client was dropped.
#[derive(Debug)]
struct Observed(Arc<Ending>);

impl Drop for Observed {
    fn drop(&mut self) {
        self.0.ended.get_or_init(Instant::now);
        self.0.over.cancel();
    }
}

async fn drive(mut connection: Connection, observed: Observed) {
    let mut messages = stream::poll_fn(move |cx| connection.poll_message(cx));
    while let Some(message) = messages.next().await {
        match message {
            Ok(AsyncMessage::Notice(notice)) if announces_the_end(&notice) => {
                observed.0.announced.get_or_init(Instant::now);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "connection to PostgreSQL ended");
                return;
            }
        }
    }
}

/// What a procedure raises with these codes has a context; what the server says of its own has none.
fn announces_the_end(notice: &DbError) -> bool {
    let ends = matches!(*notice.code(), SqlState::CRASH_SHUTDOWN | SqlState::ADMIN_SHUTDOWN);
    ends && notice.where_().is_none()
}

/// Makes the connections of a [`WatchedPool`].
#[derive(Debug)]
pub struct Maker {
    target: Target,
    application_name: &'static str,
}

impl managed::Manager for Maker {
    type Type = Watched;
    type Error = ConnectError;

    async fn create(&self) -> Result<Watched, ConnectError> {
        self.target.watched(self.application_name).await
    }

    async fn recycle(&self, watched: &mut Watched, _: &Metrics) -> RecycleResult<ConnectError> {
        match watched.is_closed() {
            true => Err(RecycleError::message("the connection is closed")),
            false => Ok(()),
        }
    }
}

/// A connection of a [`WatchedPool`]; goes back when it is dropped.
pub type WatchedObject = managed::Object<Maker>;

/// Connections that users' procedures run on: with their role's own settings, and observed.
#[derive(Clone, Debug)]
pub struct WatchedPool {
    pool: managed::Pool<Maker>,
    target: Target,
}

impl WatchedPool {
    pub async fn get(&self) -> Result<WatchedObject, ConnectError> {
        self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => error,
            PoolError::Timeout(TimeoutType::Wait) => ConnectError::exhausted(&self.target),
            // The pool is never closed and has no hooks.
            _ => ConnectError::timeout(&self.target),
        })
    }

    pub fn target(&self) -> &Target {
        &self.target
    }
}
