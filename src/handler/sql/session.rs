//! A connection in use by a `sql` handler. It goes back to the pool clean or not at all: nothing that a procedure left in its
//! session meets the next one. One that is dropped in the middle (a timeout, an abort) is taken out of the pool and its
//! query cancelled: dropping a future does not stop what the server is doing.

use crate::store::connect::{Ending, Target, Watched, WatchedObject, WatchedPool};
use deadpool_postgres::ClientWrapper;
use futures::StreamExt;
use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};
use tokio_postgres::{CancelToken, Error};
use tokio_util::task::TaskTracker;

/// How long a request to cancel may take.
const LIMIT: Duration = Duration::from_secs(5);

/// Between two calls of one transaction: what the first has left in the session does not meet the second. Its advisory locks stay, as
/// the locks of its transaction do.
pub(super) const BETWEEN_CALLS: &str =
    "CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; DISCARD SEQUENCES; DISCARD TEMP";

/// After the transaction, with [`BETWEEN_CALLS`]: `DISCARD ALL` without what makes the next call slow. Plans stay, and so do the
/// statements that the driver prepared. Cursors, roles, settings, channels, sequences, temporary tables, advisory locks and prepared
/// statements of the procedure's go.
const CLEAN: &str = "UNLISTEN *; SELECT musterd.clean_session()";

/// The requests to cancel that are under way.
static UNDER_WAY: LazyLock<TaskTracker> = LazyLock::new(TaskTracker::new);

/// Before the process ends: waits until every request to cancel has been heard. PgBouncer 1.18 dies of one whose sender
/// goes while it passes it on.
pub async fn settle() {
    UNDER_WAY.close();
    let _ = tokio::time::timeout(LIMIT, UNDER_WAY.wait()).await;
}

/// How a transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Commit,
    Rollback,
}

/// What a session is like after its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    Clean,
    /// It could not be cleaned.
    Dirty,
}

/// Ends the transaction and cleans the session in one message: a pooler in transaction mode lends the session to another
/// client right after it. An error is one of the transaction's end; what goes wrong after it concerns the session only.
pub(super) async fn end(client: &ClientWrapper, end: End) -> Result<Condition, Error> {
    let end = match end {
        End::Commit => "COMMIT",
        End::Rollback => "ROLLBACK",
    };
    let answers = client.simple_query_raw(&format!("{end}; {BETWEEN_CALLS}; {CLEAN}")).await?;
    tokio::pin!(answers);
    let Some(ended) = answers.next().await else { return Ok(Condition::Dirty) };
    ended?;
    while let Some(answer) = answers.next().await {
        if let Err(error) = answer {
            tracing::debug!(error = &error as &dyn std::error::Error, "a session could not be cleaned");
            return Ok(Condition::Dirty);
        }
    }
    Ok(Condition::Clean)
}

pub(super) struct Session {
    client: Option<WatchedObject>,
    cancel: CancelToken,
    target: Target,
    ending: Arc<Ending>,
}

impl Session {
    pub(super) fn new(client: WatchedObject, pool: &WatchedPool) -> Self {
        let (cancel, ending) = (client.cancel_token(), Arc::clone(client.ending()));
        Self { cancel, client: Some(client), target: pool.target().clone(), ending }
    }

    pub(super) fn client(&self) -> &Watched {
        self.client.as_ref().expect("there until it is finished or discarded, which takes the session")
    }

    /// What is known of the connection's end.
    pub(super) fn ending(&self) -> Arc<Ending> {
        Arc::clone(&self.ending)
    }

    /// The transaction is over; the connection may serve another call if it is clean.
    pub(super) fn finish(mut self, condition: Condition) {
        match (self.client.take(), condition) {
            (Some(client), Condition::Dirty) => drop(WatchedObject::take(client)),
            (client, _) => drop(client),
        }
    }

    /// After an error no other call inherits the connection, whatever its state is. When the error is the server's
    /// answer, nothing runs any more that could be cancelled.
    pub(super) fn discard(mut self, error: &Error) {
        if error.code().is_some() {
            drop(self.client.take().map(WatchedObject::take));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        let connection = WatchedObject::take(client);
        let (cancel, target) = (self.cancel.clone(), self.target.clone());
        // Drop cannot wait.
        UNDER_WAY.spawn(async move {
            // A server that cannot be reached will notice the broken connection by itself.
            let _ = tokio::time::timeout(LIMIT, target.cancel(&cancel)).await;
            // Not before: a pooler forgets with the connection what there is to cancel.
            drop(connection);
        });
    }
}
