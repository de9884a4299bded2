//! Replies of handlers: whatever is wrong with one concerns the rows it is wrong about, and every row gets exactly one outcome.

use crate::handler::{
    Outcome, TaskOutcome,
    protocol::{assign, has_outcome, names_request, quote, read_row, read_rows, read_task},
};
use serde_json::value::RawValue;

/// A reply to as many rows as the first byte says, to one row, and to a task.
pub fn protocol(bytes: &[u8]) {
    let [count, reply @ ..] = bytes else { return };
    let asked: Vec<i32> = (1..=i32::from(*count)).collect();
    if let Ok(read) = read_rows(reply) {
        let (answered, unreadable) = (read.rows.len(), read.unreadable);
        let (assigned, leftovers) = assign(asked.iter().copied(), read);
        assert!(assigned.iter().map(|(line, _)| line).eq(&asked), "every row has one outcome, in order");
        assert_eq!(leftovers.unreadable, unreadable);
        assert!(leftovers.duplicate + leftovers.unknown <= answered, "{leftovers:?} of {answered}");
        assert!(leftovers.missing <= asked.len());
        assigned.into_iter().for_each(|(_, outcome)| can_be_stored(outcome));
    }
    if let Ok((_, outcome)) = read_row(reply) {
        can_be_stored(outcome);
    }
    if let Ok(TaskOutcome::Done(done)) = read_task(reply) {
        done.result.iter().for_each(|result| assert!(is_json(result.text())));
    }
    has_outcome(reply);
    if let Ok(true) = names_request(reply, "7-0123abcd/1", Some(7)) {
        assert!(names_request(reply, "8-0123abcd/1", Some(8)).is_err(), "a reply names one request");
    }
    let quoted = quote(reply);
    assert!(quoted.chars().count() <= 501 && !quoted.contains(char::is_control), "{quoted:?}");
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok()
}

/// After the check at the door everything that a row leaves behind is one line of JSON.
fn can_be_stored(outcome: Outcome) {
    let Outcome::Succeeded(done) = outcome.checked() else { return };
    let stored = done.stored().expect("what was checked is stored");
    for json in stored.result.iter().chain(&stored.outputs).chain(&stored.append) {
        assert!(is_json(json.text()) && !json.text().contains(['\n', '\r']), "{:?}", json.text());
    }
}
