//! What was cut is read again as COPY would read it.

use bytes::Buf;
use proptest::prelude::*;

use super::*;

/// A tuple of the COPY.
#[derive(Debug, PartialEq)]
struct Tuple {
    batch: Option<i64>,
    first: i32,
    last: i32,
    inputs: String,
}

impl Tuple {
    fn lines(&self) -> Vec<&str> {
        self.inputs.split('\n').collect()
    }
}

fn read(mut copied: &[u8], target: Target) -> Vec<Tuple> {
    assert_eq!(copied.copy_to_bytes(SIGNATURE.len()), SIGNATURE);
    assert_eq!((copied.get_i32(), copied.get_i32()), (0, 0));
    let mut tuples = Vec::new();
    loop {
        let fields = copied.get_i16();
        if fields == -1 {
            assert!(copied.is_empty(), "nothing follows the mark of the end");
            return tuples;
        }
        let batch = match target {
            Target::Batch(_) => {
                assert_eq!((fields, copied.get_i32()), (4, 8));
                Some(copied.get_i64())
            }
            Target::Staged => {
                assert_eq!(fields, 3);
                None
            }
        };
        assert_eq!(copied.get_i32(), 4);
        let first = copied.get_i32();
        assert_eq!(copied.get_i32(), 4);
        let last = copied.get_i32();
        let length = copied.get_i32() as usize;
        let inputs = String::from_utf8(copied.copy_to_bytes(length).to_vec()).unwrap();
        tuples.push(Tuple { batch, first, last, inputs });
    }
}

/// Cuts the rows; all messages, and the hash.
fn messages(rows: &[String], target: Target, hash: Option<Sha256>) -> (Vec<Bytes>, Option<[u8; 32]>) {
    let mut chunks = Chunks::new(target, hash);
    let mut messages = Vec::new();
    for row in rows {
        chunks.next_row().extend_from_slice(row.as_bytes());
        messages.extend(chunks.end_row());
    }
    // The reader finds the end only after it has asked for one row more.
    chunks.next_row();
    let (last, hash) = chunks.finish();
    messages.push(last);
    (messages, hash)
}

fn cut(rows: &[String], target: Target) -> Vec<Tuple> {
    read(&messages(rows, target, None).0.concat(), target)
}

fn hash(rows: &[String], seed: &str) -> [u8; 32] {
    messages(rows, Target::Batch(1), Some(Sha256::new_with_prefix(seed))).1.unwrap()
}

fn numbers(count: usize) -> Vec<String> {
    (1..=count).map(|number| number.to_string()).collect()
}

fn ends(tuples: &[Tuple]) -> Vec<(i32, i32)> {
    tuples.iter().map(|tuple| (tuple.first, tuple.last)).collect()
}

#[test]
fn a_chunk_closes_at_its_number_of_lines() {
    let tuples = cut(&numbers(1201), Target::Batch(7));
    assert_eq!(ends(&tuples), [(1, 500), (501, 1000), (1001, 1201)]);
    assert!(tuples.iter().all(|tuple| tuple.batch == Some(7)));
    assert_eq!(ends(&cut(&numbers(500), Target::Batch(7))), [(1, 500)], "no empty chunk follows");
    assert_eq!(ends(&cut(&numbers(501), Target::Batch(7))), [(1, 500), (501, 501)]);
}

#[test]
fn a_chunk_closes_with_the_row_that_brings_it_to_its_bytes() {
    let row = |len: usize| "x".repeat(len);
    let rows = [row(BYTES - 1), row(5), row(BYTES), row(1), row(2 * BYTES), row(1)];
    assert_eq!(ends(&cut(&rows, Target::Batch(1))), [(1, 2), (3, 3), (4, 5), (6, 6)]);
}

#[test]
fn no_rows_are_no_chunk() {
    assert_eq!(cut(&[], Target::Batch(1)), []);
    assert_eq!(cut(&[], Target::Staged), []);
}

#[test]
fn staged_chunks_have_no_batch() {
    let tuples = cut(&numbers(3), Target::Staged);
    assert_eq!(tuples, [Tuple { batch: None, first: 1, last: 3, inputs: "1\n2\n3".into() }]);
}

#[test]
fn a_message_is_sent_as_soon_as_it_is_full() {
    let rows = vec!["x".repeat(1000); 5000];
    let (messages, _) = messages(&rows, Target::Batch(1), None);
    let (last, full) = messages.split_last().unwrap();
    assert!(full.iter().all(|message| (MESSAGE..MESSAGE + BYTES + 2000).contains(&message.len())));
    assert!(last.len() < MESSAGE + 2 && full.len() >= 9, "{} {}", full.len(), last.len());
}

#[test]
fn the_hash_stands_for_the_rows_and_for_what_was_hashed_before_them() {
    let rows = numbers(1201);
    let text = rows.iter().map(|row| format!("{row}\n")).collect::<String>();
    assert_eq!(hash(&rows, "seed"), <[u8; 32]>::from(Sha256::digest(format!("seed{text}"))));
    let joined = |rows: &[&str]| hash(&rows.iter().map(ToString::to_string).collect::<Vec<_>>(), "");
    assert_ne!(joined(&["12", "3"]), joined(&["1", "23"]));
    assert_ne!(joined(&["1", "2"]), joined(&["2", "1"]));
    assert_ne!(joined(&["1"]), joined(&["1", ""]));
    assert_eq!(messages(&rows, Target::Staged, None).1, None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chunks_hold_the_rows_in_order_without_a_gap_and_within_their_limits(
        runs in prop::collection::vec((1_usize..400, prop_oneof![0_usize..40, 500_usize..3000, 100_000_usize..300_000]), 0..5),
    ) {
        // Runs of rows of one length; long ones are few.
        let rows: Vec<String> = runs.iter().enumerate().flat_map(|(run, (count, length))| {
            let count = if *length > 50_000 { count % 7 } else { *count };
            (0..count).map(move |row| format!("{run}.{row}.{}", "x".repeat(*length)))
        }).collect();
        let tuples = cut(&rows, Target::Batch(3));
        let joined: Vec<&str> = tuples.iter().flat_map(Tuple::lines).collect();
        prop_assert_eq!(&joined, &rows);
        let mut next = 1;
        for (place, tuple) in tuples.iter().enumerate() {
            let lines = tuple.lines();
            prop_assert_eq!((tuple.first, tuple.last), (next, next + lines.len() as i32 - 1));
            next = tuple.last + 1;
            let before_the_last = tuple.inputs.len() - lines.last().unwrap().len();
            prop_assert!(lines.len() <= LINES as usize && before_the_last <= BYTES);
            let is_full = lines.len() == LINES as usize || tuple.inputs.len() >= BYTES;
            prop_assert!(is_full || place + 1 == tuples.len(), "only the last may have room left");
        }
    }
}
