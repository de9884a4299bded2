//! What the API does at a time: so many places of a kind, which no client can take away from the others.
//!
//! Where tokens share the API, a client gets a place while it has fewer than are free: at most half of them, and a second
//! that takes all it can gets half of the rest. Where only one client can come, it may have them all.

use super::guard::Client;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

#[derive(Debug)]
pub(super) struct Slots {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// By the name of the token's holder; `None`: requests that need no token.
    by: HashMap<Option<Arc<str>>, usize>,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub(in crate::http) struct Slot {
    slots: Arc<Slots>,
    holder: Option<Arc<str>>,
}

impl Slots {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, taken: Mutex::default() })
    }

    /// A place, if there is one for this client. `is_alone`: no other client can come.
    pub(super) fn take(self: &Arc<Self>, client: &Client, is_alone: bool) -> Option<Slot> {
        let mut taken = self.lock();
        let free = self.most.saturating_sub(taken.all);
        let holder = client.holder();
        let own = taken.by.get(&holder).copied().unwrap_or_default();
        if free == 0 || !(is_alone || own < free) {
            return None;
        }
        taken.all += 1;
        taken.by.insert(holder.clone(), own + 1);
        drop(taken);
        Some(Slot { slots: Arc::clone(self), holder })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // Every change is a single step, so a panic elsewhere leaves the counts whole.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.lock();
        taken.all = taken.all.saturating_sub(1);
        if let Some(own) = taken.by.get_mut(&self.holder) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                taken.by.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_for(slots: &Arc<Slots>, name: &str, is_alone: bool) -> Vec<Slot> {
        let client = Client::named(name);
        std::iter::from_fn(|| slots.take(&client, is_alone)).collect()
    }

    #[test]
    fn no_client_takes_more_than_half_where_others_can_come() {
        let slots = Slots::new(8);
        let greedy = all_for(&slots, "greedy", false);
        assert_eq!(greedy.len(), 4);
        let second = all_for(&slots, "second", false);
        assert_eq!(second.len(), 2);
        let third = all_for(&slots, "third", false);
        assert_eq!(third.len(), 1);
        assert!(slots.take(&Client::named("greedy"), false).is_none());
        drop(third);
        drop(greedy);
        assert_eq!(all_for(&slots, "second", false).len(), 2, "four of eight");
        drop(second);
        assert!(slots.lock().by.is_empty() && slots.lock().all == 0, "{slots:?}");
    }

    #[test]
    fn one_that_is_alone_has_all_of_them_and_the_only_place_goes_to_any() {
        let slots = Slots::new(3);
        assert_eq!(all_for(&slots, "only", true).len(), 3);
        let slots = Slots::new(1);
        let one = all_for(&slots, "one", false);
        assert_eq!(one.len(), 1);
        assert!(slots.take(&Client::named("other"), false).is_none());
        drop(one);
        assert!(slots.take(&Client::named("other"), false).is_some());
    }
}
