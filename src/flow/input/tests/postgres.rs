//! The check says what PostgreSQL says, text by text; it is stricter only where the corpus names it.

use super::jsonb::{Verdict, cases};
use super::*;

#[test]
fn the_check_agrees_with_postgresql() {
    let wrong: Vec<_> = cases()
        .filter(|(verdict, text)| check(text).is_ok() != (*verdict == Verdict::Stored))
        .map(|(verdict, text)| (verdict, text.chars().take(60).collect::<String>(), check(&text)))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn where_we_are_stricter_it_is_the_depth() {
    for (verdict, text) in cases() {
        if verdict == Verdict::OursAlone {
            assert!(matches!(check(&text), Err(Refusal { fault: Fault::Depth, .. })));
        }
    }
}

/// Why the depth is capped where it is: what is stored is read by serde_json again, with a few levels around it.
#[test]
fn a_row_of_the_greatest_depth_is_still_read_within_an_envelope() {
    let depth = MAX_DEPTH as usize;
    let row = "[".repeat(depth) + &"]".repeat(depth);
    assert!(check(&row).is_ok());
    let envelope = format!("{{\"block\":{{\"rows\":[{{\"input\":{row}}}]}}}}");
    serde_json::from_str::<serde_json::Value>(&envelope).unwrap();
}
