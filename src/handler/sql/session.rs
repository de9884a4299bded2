//! A connection in use by a `sql` handler. It goes back to the pool clean or not at all: nothing that a procedure left in its
//! session meets the next one. One that is dropped in the middle (a timeout, an abort) is taken out of the pool and its
//! query cancelled: dropping a future does not stop what the server is doing.

use crate::store::{
    connect::{Ending, Target, Watched, WatchedObject, WatchedPool},
    procedures::Condition,
};
use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};
use tokio_postgres::{CancelToken, Error};
use tokio_util::task::TaskTracker;

/// How long a request to cancel may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The requests to cancel that are under way.
static UNDER_WAY: LazyLock<TaskTracker> = LazyLock::new(TaskTracker::new);

/// Before the process ends: waits until every request to cancel has been heard. PgBouncer 1.18 dies of one whose sender
/// goes while it passes it on.
pub async fn finish_cancels() {
    UNDER_WAY.close();
    let _ = tokio::time::timeout(LIMIT, UNDER_WAY.wait()).await;
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
