//! What the database makes of the sets of a flush, beside the same arithmetic on [`Lines`]: any lines open, done and to be tried again.

use musterd::lines::Lines;
use musterd::store::flush::{BlockWrite, Close, Outcomes};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{carve, session, write};
use crate::suite::support::sql::rows;
use crate::suite::support::worker::submit;

const LINES: i32 = 60;
const CASES: usize = 150;

fn some_lines() -> impl Strategy<Value = Lines> {
    prop::collection::vec(1..=LINES, 0..40).prop_map(|lines| lines.into_iter().collect())
}

/// What is in both.
fn both(one: &Lines, other: &Lines) -> Lines {
    one.minus(&one.minus(other))
}

/// One block after another is shrunk once, at most, and closed, with lists of lines that have nothing to do with what is open.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_close_frees_is_what_is_open_and_not_done_whatever_the_worker_lists() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let mut runner = TestRunner::default();
    let strategy = (some_lines(), some_lines(), some_lines());
    let (mut refused, mut split) = (0, 0);
    for _ in 0..CASES {
        let (first, second, retry) = strategy.new_tree(&mut runner).unwrap().current();
        let batch = submit(&client, "work", LINES, "").await;
        let block = carve(&worker, 1, LINES).await.remove(0);
        let mut open = block.lines.clone();
        let mut flush = async |done: &Lines, close: Option<Close>| {
            let mut outcomes = Outcomes::default();
            outcomes.succeed_all(done);
            let is_written = done.minus(&open).is_empty();
            let write_it = BlockWrite { block: block.reference, part: block.parts.next(), outcomes, close };
            let answer = write(&worker, write_it).await;
            assert_eq!(answer, is_written.then_some(done.len() as u64), "{done} of {open}");
            if is_written {
                open = open.minus(done);
            }
            is_written
        };
        assert!(flush(&first, None).await, "all its lines were open");
        let close = || Some(Close { retry: retry.clone(), error: Some("again".into()), ..Close::default() });
        if !flush(&second, close()).await {
            // A line of it is done already: refused whole, the block is as it was, and can still be closed.
            refused += 1;
            assert!(flush(&Lines::new(), close()).await);
        }
        let (again, rest) = (both(&retry, &open), open.minus(&retry));
        let expected: Vec<String> = [(&rest, 1), (&again, 2)]
            .into_iter()
            .filter(|(lines, _)| !lines.is_empty())
            .map(|(lines, attempt)| format!("{lines}|{}|{attempt}", lines.len()))
            .collect();
        // `attempt` counts from 1 with the claim.
        let free = format!(
            "SELECT lines, rows, attempt FROM musterd.blocks WHERE batch_id = {batch} AND worker IS NULL ORDER BY attempt"
        );
        let found = rows(&client, &free).await;
        assert_eq!(
            found.iter().map(|row| row.rsplit_once('|').unwrap().0).collect::<Vec<_>>(),
            expected.iter().map(|row| row.rsplit_once('|').unwrap().0).collect::<Vec<_>>()
        );
        split += usize::from(expected.len() == 2);
        let missing = format!(
            "SELECT missing = COALESCE((SELECT range_agg(r) FROM musterd.blocks k, unnest(k.lines) r WHERE k.batch_id = {batch}), '{{}}') FROM musterd.audit({batch})"
        );
        assert_eq!(rows(&client, &missing).await, ["t"], "a line is in a block, or it is recorded");
    }
    assert!(
        refused > CASES / 10 && split > CASES / 2,
        "{refused} refused, {split} split: the cases say little"
    );
}
