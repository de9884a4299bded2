//! Company and solitude: a block that some process died with runs when nothing else does.
//!
//! Every other block, and every claim, keeps [`Company`] for as long as it lasts. A solitary block waits until the last
//! of them is gone, and while it waits or runs nobody new comes in.

use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// Shared by all queues of a worker: they are one process.
#[derive(Clone, Debug, Default)]
pub struct Room(Arc<RwLock<()>>);

/// The right to be at work beside others. One claim and the blocks it brings share one: a second could not be had
/// while somebody waits to be alone.
#[derive(Clone, Debug)]
pub struct Company(#[expect(dead_code, reason = "it is held, not read")] Arc<OwnedRwLockReadGuard<()>>);

/// The right to be at work alone.
#[derive(Debug)]
pub struct Solitude(#[expect(dead_code, reason = "it is held, not read")] OwnedRwLockWriteGuard<()>);

impl Room {
    pub async fn enter(&self) -> Company {
        Company(Arc::new(Arc::clone(&self.0).read_owned().await))
    }

    pub async fn alone(&self) -> Solitude {
        Solitude(Arc::clone(&self.0).write_owned().await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn who_wants_to_be_alone_waits_for_the_others_and_keeps_new_ones_out() {
        let room = Room::default();
        let company = room.enter().await;
        let shared = company.clone();
        let mut alone = Box::pin(room.alone());
        assert!((&mut alone).now_or_never().is_none());
        assert!(room.enter().now_or_never().is_none(), "came in beside one who waits to be alone");
        drop(company);
        assert!((&mut alone).now_or_never().is_none(), "a block of the same claim is still at work");
        drop(shared);
        let solitude = alone.await;
        assert!(room.enter().now_or_never().is_none());
        drop(solitude);
        room.enter().await;
    }
}
