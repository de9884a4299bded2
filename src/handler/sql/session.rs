//! A connection in use by a `sql` handler. One that is dropped in the middle (a timeout, an abort) is taken out of the
//! pool and its query cancelled: dropping a future does not stop what the server is doing.

use crate::store::connect::Target;
use deadpool_postgres::Object;
use std::{sync::LazyLock, time::Duration};
use tokio_postgres::{CancelToken, Error};
use tokio_util::task::TaskTracker;

/// How long a request to cancel may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The requests to cancel that are under way.
static UNDER_WAY: LazyLock<TaskTracker> = LazyLock::new(TaskTracker::new);

/// Before the process ends: waits until every request to cancel has been heard. PgBouncer 1.18 dies of one whose sender
/// goes while it passes it on.
pub async fn settle() {
    UNDER_WAY.close();
    let _ = tokio::time::timeout(LIMIT, UNDER_WAY.wait()).await;
}

pub(super) struct Session {
    client: Option<Object>,
    cancel: CancelToken,
    target: Target,
}

impl Session {
    pub(super) fn new(client: Object, target: &Target) -> Self {
        Self { cancel: client.cancel_token(), client: Some(client), target: target.clone() }
    }

    pub(super) fn client(&mut self) -> &mut Object {
        self.client.as_mut().expect("there until it is finished or discarded, which takes the session")
    }

    /// The transaction is over; the connection may serve somebody else.
    pub(super) fn finish(mut self) {
        drop(self.client.take());
    }

    /// Whatever the connection's state is after this error, nobody else should inherit it. When the error is the server's
    /// answer, nothing runs any more that could be cancelled.
    pub(super) fn discard(mut self, error: &Error) {
        if error.code().is_some() {
            drop(self.client.take().map(Object::take));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        let connection = Object::take(client);
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
