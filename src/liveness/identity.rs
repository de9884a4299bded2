//! Who this process is: one name at a time, a new one when the old was declared dead.

use crate::worker_id::WorkerId;
use tokio::sync::watch;

/// The worker's current name, shared by everything that signs with it.
#[derive(Clone, Debug)]
pub struct Identity(watch::Sender<WorkerId>);

impl Identity {
    pub fn new(id: WorkerId) -> Self {
        Self(watch::Sender::new(id))
    }

    pub fn id(&self) -> WorkerId {
        self.0.borrow().clone()
    }

    /// The old name is dead for good: what is still signed with it is refused.
    pub fn change(&self, id: WorkerId) {
        self.0.send_replace(id);
    }

    /// Notifies of every change.
    pub fn watch(&self) -> watch::Receiver<WorkerId> {
        self.0.subscribe()
    }
}
