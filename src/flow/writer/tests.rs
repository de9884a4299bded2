//! Updates that meet in one flush: what belongs to the same block or task becomes one write.

use super::{tasks::newest_of_each, *};
use crate::{lines::Lines, store::tasks::TaskRef};
use std::time::Duration;

fn update(id: i64, parts: &Parts, outcomes: Outcomes, close: Option<Close>) -> BlockUpdate {
    let block = BlockRef { id, token: Uuid::from_u128(id as u128), batch: 7 };
    let (sender, _) = oneshot::channel();
    BlockUpdate {
        block,
        parts: parts.clone(),
        outcomes,
        close,
        waited_for: false,
        brake: None,
        written: vec![sender],
    }
}

fn succeeded(first: i32, last: i32) -> Outcomes {
    let mut outcomes = Outcomes::default();
    outcomes.succeed_all(&Lines::span(first, last));
    outcomes
}

fn close(seconds: u64) -> Option<Close> {
    Some(Close { retry_after: Duration::from_secs(seconds), ..Close::default() })
}

#[test]
fn updates_of_a_block_are_one_write_with_the_newest_close() {
    let (one, other) = (Parts::default(), Parts::default());
    let mut failed = Outcomes::default();
    failed.fail(9, "no".into());
    let merged = merge(vec![
        update(2, &other, succeeded(1, 3), None),
        update(1, &one, succeeded(1, 3), close(1)),
        update(1, &one, failed, close(2)),
        update(1, &one, succeeded(4, 6), None),
    ]);
    let seen: Vec<(i64, i32, String, usize)> = merged
        .iter()
        .map(|(write, note)| {
            (write.block.id, write.part, write.outcomes.done().to_string(), note.written.len())
        })
        .collect();
    assert_eq!(seen, [(1, 1, "{[1,7),[9,10)}".to_owned(), 3), (2, 1, "{[1,4)}".to_owned(), 1)]);
    assert_eq!(
        (&merged[0].0.close, &merged[1].0.close),
        (&close(2), &None),
        "the newest close, and no invented one"
    );
    assert_eq!(merged[0].1.pending, 1, "the brake hears of the failure that is on its way");
    // The next flush of the block is another part.
    assert_eq!(merge(vec![update(1, &one, succeeded(10, 10), None)])[0].0.part, 2);
}

#[test]
fn the_newest_outcome_of_a_task_wins() {
    let write = |id: i64, token: u128, error: &str| TaskWrite {
        task: TaskRef { id, token: Uuid::from_u128(token) },
        parent: None,
        end: TaskEnd::failed(error),
    };
    let written = newest_of_each(vec![
        write(3, 1, "three"),
        write(1, 1, "first"),
        write(2, 1, "two"),
        write(1, 1, "second"),
        write(1, 1, "third"),
    ]);
    let seen: Vec<(i64, &TaskEnd)> = written.iter().map(|write| (write.task.id, &write.end)).collect();
    let failed = |error: &str| TaskEnd::failed(error);
    assert_eq!(seen, [(1, &failed("third")), (2, &failed("two")), (3, &failed("three"))]);
    // Two claims of one task are two matters: the fence decides between them.
    assert_eq!(newest_of_each(vec![write(1, 1, "old claim"), write(1, 2, "new claim")]).len(), 2);
}
