//! What a worker's set in Redis says it is running: a member for each block and task. Any client of Redis may have written it.

use std::collections::HashSet;
use uuid::Uuid;

/// More of a set than this is not remembered.
const MOST: usize = 20_000;

pub fn block(batch: i64, token: Uuid) -> String {
    format!("block/{batch}/{token}")
}

pub fn task(id: i64, token: Uuid) -> String {
    format!("task/{id}/{token}")
}

/// The members that could be understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracked {
    /// Of blocks, and of claims of tasks.
    pub tokens: HashSet<Uuid>,
    pub tasks: Vec<i64>,
}

impl Tracked {
    /// Takes in a member; one that is not ours is passed over.
    pub fn add(&mut self, member: &[u8]) {
        if self.tokens.len() + self.tasks.len() < MOST
            && let Some((task, token)) = parse(member)
        {
            self.tokens.insert(token);
            self.tasks.extend(task);
        }
    }
}

fn parse(member: &[u8]) -> Option<(Option<i64>, Uuid)> {
    let mut parts = std::str::from_utf8(member).ok()?.split('/');
    let (kind, id, token) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    match (kind, parts.next()) {
        ("block", None) => Some((None, token)),
        ("task", None) => Some((Some(id), token)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_understood_and_garbage_is_passed_over() {
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let mut tracked = Tracked::default();
        for member in [
            block(7, one).as_bytes(),
            task(8, other).as_bytes(),
            b"",
            b"a\0b",
            b"\xff\xfe",
            b"block/7",
            b"block/7/x",
            b"other/7/00000000-0000-0000-0000-000000000003",
            b"task/all/00000000-0000-0000-0000-000000000003",
            b"task/9/00000000-0000-0000-0000-000000000003/more",
        ] {
            tracked.add(member);
        }
        assert_eq!(tracked, Tracked { tokens: HashSet::from([one, other]), tasks: vec![8] });
    }
}
