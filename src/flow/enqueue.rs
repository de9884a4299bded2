//! Enqueuing many: a stream of payloads becomes tasks, all of them or none, in constant memory.
//!
//! A thread reads and checks the payloads, as it does for a submission; this side enqueues them group by group. One
//! transaction holds all groups.

use super::submit::{
    Given, Meter, SubmitError,
    read::{Gather, read_beside},
};
use crate::{
    json::Json,
    store::tasks::{self, EnqueuedMany, NewTasks},
};
use std::io::Read;
use tokio_postgres::Client;

/// Payloads that a group has at most.
const PAYLOADS: usize = 5_000;
/// Bytes from which on a group takes no more payloads.
const BYTES: usize = 1 << 20;

/// Reads `given` to its end and makes a task of every payload, in their order.
pub async fn enqueue_many(
    client: &mut Client,
    task: &NewTasks,
    given: Given<impl Read + Send + 'static>,
    meter: Meter,
) -> Result<EnqueuedMany, SubmitError> {
    let (groups, reading) = read_beside(given, Group::default(), meter);
    tasks::enqueue_groups(client, task, groups, reading).await
}

/// The group that takes payloads.
#[derive(Debug, Default)]
struct Group {
    row: Vec<u8>,
    payloads: Vec<Json>,
    bytes: usize,
}

impl Gather for Group {
    type Message = Vec<Json>;

    fn next_row(&mut self) -> &mut Vec<u8> {
        &mut self.row
    }

    fn end_row(&mut self) -> Option<Vec<Json>> {
        // The reader lets nothing but UTF-8 through.
        self.payloads.push(Json::from_text(String::from_utf8_lossy(&self.row)));
        self.bytes += self.row.len();
        self.row.clear();
        let is_full = self.payloads.len() == PAYLOADS || self.bytes >= BYTES;
        is_full.then(|| {
            self.bytes = 0;
            std::mem::take(&mut self.payloads)
        })
    }

    fn finish(self) -> (Vec<Json>, Option<[u8; 32]>) {
        (self.payloads, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(group: &mut Group, text: &str) -> Option<usize> {
        group.next_row().extend_from_slice(text.as_bytes());
        group.end_row().map(|full| full.len())
    }

    #[test]
    fn a_group_closes_at_its_number_of_payloads_or_bytes() {
        let mut group = Group::default();
        for _ in 1..PAYLOADS {
            assert_eq!(add(&mut group, "1"), None);
        }
        assert_eq!(add(&mut group, "1"), Some(PAYLOADS));
        let large = format!("\"{}\"", "x".repeat(BYTES / 2));
        assert_eq!((add(&mut group, &large), add(&mut group, &large)), (None, Some(2)));
        assert_eq!(add(&mut group, "{\"a\": 1}"), None);
        let (rest, hash) = group.finish();
        assert_eq!((rest[0].text(), rest.len(), hash), ("{\"a\": 1}", 1, None));
    }
}
